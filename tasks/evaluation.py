"""`evaluation.json` in a drafter's folder: how it served every prompt of every set, so that drafters can be compared.

format     eyas-evaluation/2
settings   what must be alike for a comparison: the target's digests, the engine, the length of the drafts, ...
sets       per prompt set and sampling: name, version, digest, domain, `figures`, and per prompt an `answer`
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hidden_states.errors import DatasetError
from infra.client import acceptance_length
from tasks.intervals import FEWEST, Paired, paired
from tasks.job import Job

FILE, FORMAT = "evaluation.json", "eyas-evaluation/2"
GREEDY: dict[str, Any] = {"temperature": 0.0}


def set_key(name: str, sampling: dict[str, Any]) -> str:
    """What a set served at one sampling is called: its name, with `/production` where it is not greedy."""
    return name if sampling == GREEDY else f"{name}/production"


@dataclass(frozen=True)
class Answer:
    """One prompt, served with the drafter and without.

    Attributes:
        prompt: digest of its tokens.
        histogram: verifications by accepted drafted tokens; ends at the longest acceptance.
        tokens, latency_s: output tokens, and seconds in the server.
        differs_at: first output position at which it is not what plain decoding gives; None = equal.
    """

    prompt: str
    source: str
    prompt_tokens: int
    histogram: list[int]
    tokens: int
    latency_s: float
    plain_tokens: int
    plain_latency_s: float
    differs_at: int | None = None


@dataclass(frozen=True)
class SetRecord:
    """A prompt set as one drafter served it, at one sampling.

    Attributes:
        sampling: SGLang's sampling parameters; `{"temperature": 0.0}` = greedy.
        in_training: prompts left out because training had seen them.
    """

    name: str
    version: str
    digest: str
    domain: str
    sampling: dict[str, Any]
    in_training: int
    answers: list[Answer]

    @property
    def key(self) -> str:
        """See `set_key`."""
        return set_key(self.name, self.sampling)

    @property
    def greedy(self) -> bool:
        """Whether outputs must equal plain decoding."""
        return self.sampling == GREEDY

    @property
    def histogram(self) -> list[int]:
        """Verifications by accepted drafted tokens, over all prompts."""
        return [sum(column) for column in zip_longest(*(a.histogram for a in self.answers), fillvalue=0)]

    @property
    def acceptance_length(self) -> float:
        """Accepted drafted tokens per verification + 1."""
        return acceptance_length(self.histogram)

    @property
    def by_position(self) -> list[float]:
        """Share of the verifications that accept at least 1, 2, ... drafted tokens."""
        histogram = self.histogram
        total = max(1, sum(histogram))
        return [sum(histogram[i:]) / total for i in range(1, len(histogram))]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the server's seconds per request: what one request sees, whatever runs beside it."""
        return _speed((a.tokens, a.latency_s) for a in self.answers)

    @property
    def plain_tokens_per_s(self) -> float:
        """The same without a drafter."""
        return _speed((a.plain_tokens, a.plain_latency_s) for a in self.answers)

    @property
    def speed_up(self) -> float:
        """With the drafter, over without."""
        plain = self.plain_tokens_per_s
        return self.tokens_per_s / plain if plain else 0.0

    @property
    def outputs_equal(self) -> int:
        """Prompts answered token for token as in plain decoding."""
        return sum(answer.differs_at is None for answer in self.answers)

    @property
    def differences(self) -> list[str]:
        """Which prompts were answered differently, and where; of a greedy set only."""
        return [
            f"set {self.key}, prompt {a.source} (tokens {a.prompt[:16]}), output position {a.differs_at}"
            for a in self.answers
            if self.greedy and a.differs_at is not None
        ]

    def figures(self) -> dict[str, Any]:
        """What there is to say about the set, rounded."""
        found: dict[str, Any] = {
            "acceptance_length": round(self.acceptance_length, 4),
            "by_position": [round(share, 4) for share in self.by_position],
            "prompts": len(self.answers),
            "tokens": sum(answer.tokens for answer in self.answers),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "plain_tokens_per_s": round(self.plain_tokens_per_s, 2),
            "speed_up": round(self.speed_up, 3),
        }
        return {**found, "outputs_equal": self.outputs_equal} if self.greedy else found


def _speed(parts: Any) -> float:
    tokens, seconds = (sum(column) for column in zip(*parts, strict=True))
    return float(tokens / seconds) if seconds else 0.0


@dataclass(frozen=True)
class Evaluation:
    """One drafter's serving record.

    Attributes:
        name: what it is called here.
        settings: what must be alike for a comparison.
        sets: by `SetRecord.key`, in the order they were served.
        prediction: simulated against served acceptance (`tasks.prediction`); empty where there is none.
    """

    name: str
    settings: dict[str, Any]
    sets: dict[str, SetRecord]
    prediction: dict[str, Any]

    @classmethod
    def of(
        cls, name: str, settings: dict[str, Any], records: Sequence[SetRecord], prediction: dict[str, Any] | None = None
    ) -> "Evaluation":
        """From what was just served."""
        return cls(name, settings, {record.key: record for record in records}, prediction or {})

    @classmethod
    def read(cls, folder: Path, name: str) -> "Evaluation":
        """Of a drafter's folder.

        Raises:
            DatasetError: it was not served, or by another program, or by an Eyas before prompt sets.
        """
        path = folder / FILE
        again = f"Measure it: eyas evaluate RECIPE --drafter {name}"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if "format" not in data and "histograms" in data:
                raise DatasetError(
                    str(path), "written before there were prompt sets: plain decoding is not in it", FORMAT, again
                )  # fmt: skip
            if data["format"] != FORMAT:
                raise DatasetError(str(path), f"format {data['format']}", FORMAT, again)
            records = [_record(entry) for entry in data["sets"]]
            settings, prediction = data["settings"], data.get("prediction") or {}
            if not isinstance(settings, dict) or not isinstance(prediction, dict):
                raise TypeError("settings or prediction are no object")
            return cls.of(name, settings, records, prediction)
        except FileNotFoundError:
            raise DatasetError(name, f"no {FILE} in its folder", "a drafter that was served", again) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(str(path), f"unusable ({error!r})", "an evaluation written by Eyas", again) from error

    def write(self, folder: Path) -> Path:
        """As `evaluation.json` in a folder."""
        content = {
            "format": FORMAT,
            "settings": self.settings,
            "prediction": self.prediction,
            "sets": [{**asdict(record), "key": key, "figures": record.figures()} for key, record in self.sets.items()],
        }
        path = folder / FILE
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return path

    @property
    def differences(self) -> list[str]:
        """Every prompt answered otherwise than in plain decoding, over all greedy sets."""
        return [line for record in self.sets.values() for line in record.differences]


def keep_evaluation(job: Job) -> None:
    """Write it into the new drafter's folder; nothing to write for a drafter that was not served."""
    if job.evaluation is not None:
        job.evaluation.write(job.folder / "drafter")


def _record(entry: dict[str, Any]) -> SetRecord:
    own = {field.name: entry[field.name] for field in fields(SetRecord)}
    record = SetRecord(**{**own, "answers": [_answer(answer) for answer in entry["answers"]]})
    words = (record.name, record.version, record.digest, record.domain)
    if not record.answers or not all(isinstance(word, str) for word in words) or not isinstance(record.sampling, dict):
        raise TypeError(f"set {record.name!r} has no answers, or values of another kind")
    return record


def _answer(entry: dict[str, Any]) -> Answer:
    answer = Answer(**entry)
    counts = [*answer.histogram, answer.prompt_tokens, answer.tokens, answer.plain_tokens, answer.differs_at or 0]
    if not all(isinstance(count, int) and 0 <= count < 2**53 for count in counts):
        raise TypeError(f"counts of prompt {answer.prompt!r}: {counts}")
    seconds = (answer.latency_s, answer.plain_latency_s)
    if not all(isinstance(s, int | float) and math.isfinite(s) and s >= 0 for s in seconds):
        raise TypeError(f"seconds of prompt {answer.prompt!r}: {seconds}")
    if not isinstance(answer.histogram, list) or not isinstance(answer.prompt, str):
        raise TypeError(f"prompt {answer.prompt!r}: histogram {answer.histogram!r}")
    return answer


@dataclass(frozen=True)
class Comparison:
    """Two drafters, set by set.

    Attributes:
        overall: over the prompts of all greedy sets together; None when they are too few.
        sets: per set of at least 8 common prompts.
        too_few: sets with fewer, and how many.
        notes: sets whose content changed under the same version.
    """

    overall: Paired | None
    sets: dict[str, Paired]
    too_few: dict[str, int]
    notes: list[str]


def compare(one: Evaluation, other: Evaluation, only: Sequence[str] | None = None) -> Comparison:
    """On the prompts that both were served.

    Args:
        only: names of sets (`SetRecord.key`); left out = all that both have.

    Raises:
        DatasetError: served under other settings, no such set, or too few prompts in common in every set.
    """
    where = f"{one.name} and {other.name}"
    _refuse_other_settings(where, one.settings, other.settings)
    common = [key for key in one.sets if key in other.sets]
    if unknown := sorted(set(only or []) - set(common)):
        raise DatasetError(where, f"no set {', '.join(unknown)} in both",
                           f"one of {', '.join(common)}" if common else None, "")  # fmt: skip
    sets: dict[str, Paired] = {}
    too_few: dict[str, int] = {}
    notes: list[str] = []
    everything: dict[str, tuple[list[int], list[int]]] = {}
    for key in [key for key in common if not only or key in only]:
        ours, theirs = one.sets[key], other.sets[key]
        if ours.sampling != theirs.sampling:
            notes.append(f"set {key} was sampled differently: {ours.sampling} / {theirs.sampling}; left out")
            continue
        if ours.digest != theirs.digest:
            notes.append(f"set {key} has another content (version {ours.version} / {theirs.version})")
        pairs = {a.prompt: (a.histogram, b.histogram) for a, b in answered_by_both(ours, theirs)}
        if ours.greedy:
            everything |= pairs
        if len(pairs) < FEWEST:
            too_few[key] = len(pairs)
        else:
            sets[key] = _paired(pairs)
    if not sets and len(everything) < FEWEST:
        raise DatasetError(
            where, f"{len(everything)} prompts in common", f"at least {FEWEST}",
            "Their held-out prompts differ. A pipeline run serves the champion on the prompts of its own drafter.",
        )  # fmt: skip
    return Comparison(_paired(everything) if len(everything) >= FEWEST else None, sets, too_few, notes)


def answered_by_both(ours: SetRecord, theirs: SetRecord) -> list[tuple[Answer, Answer]]:
    """What both answered, prompt by prompt."""
    other = {answer.prompt: answer for answer in theirs.answers}
    return [(answer, other[answer.prompt]) for answer in ours.answers if answer.prompt in other]


def _paired(pairs: dict[str, tuple[list[int], list[int]]]) -> Paired:
    ordered = [pairs[digest] for digest in sorted(pairs)]
    return paired([ours for ours, _ in ordered], [theirs for _, theirs in ordered])


def _refuse_other_settings(where: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    differing = [
        f"{key}: {ours.get(key)} / {theirs.get(key)}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]
    if differing:
        raise DatasetError(where, f"served differently ({'; '.join(differing)})", "the same target and settings",
                           "Run one of them again with the other's settings.")  # fmt: skip
