"""Which version of the dataset a run works on. The bucket alone remembers: a kill, another machine, a lost disk change
nothing.

    <name>-v<k>/plan.json           what the version is made of; written first
    <name>-v<k>/target.json         digests of the target whose replies and states these are
    <name>-v<k>/replies/...json     the target's own replies, chunk by chunk
    <name>-v<k>/reports/...json     what each batch's proof found; written before the batch is committed
    <name>-v<k>/quarantined/..json  batches of which no sample could be used, with the reasons
    <name>-v<k>/shards, manifest    see hidden_states.dataset_writer
    <name>-v<k>/runs/<run>.json     the summary of each pipeline run that went to its end: the version is closed

A run goes on with the newest open version of the same plan; where another one is at work on it, they share the work. A
closed one is used again, or followed by a new version, as the recipe says.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hidden_states.dataset import Dataset
from hidden_states.dataset_writer import MANIFEST
from hidden_states.errors import DatasetError
from hidden_states.prompts import Prompt
from hidden_states.samples import Sample
from hidden_states.store import ObjectExists, ObjectMissing, Store
from infra.recipe import Recipe

PLAN, RUNS, REPLIES, REPORTS, QUARANTINED = "plan.json", "runs", "replies", "reports", "quarantined"
TARGET = "target.json"
PARTS_OF_LEDGER = frozenset({PLAN, RUNS, REPLIES, REPORTS, QUARANTINED, TARGET})
_ROUNDS = 4  # requests in flight, times this: the prompts of a chunk; the server is never short of work for long


def plan_identity(recipe: Recipe, prompts: list[Prompt], samples: list[Sample]) -> dict[str, Any]:
    """What makes two runs extract the same samples: the inputs' digests and the settings that shape them.

    How states are captured is not in it: that is the fingerprint's, and a difference there is refused, not versioned.
    """
    section = recipe.dataset.model_dump(mode="json", include={"aux", "final", "final_rows", "top_k"})
    kept = {name: value for name, value in section.items() if value not in ("captured", "all", None)}
    digests = [p.digest for p in prompts] + [s.digest for s in samples]
    inputs = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return {
        "inputs": inputs,
        "count": len(prompts) + len(samples),
        "regenerate": recipe.regenerate.model_dump(mode="json"),
        "data": recipe.data.model_dump(mode="json", exclude={"conversations", "strict", "max_bad_share"}),
        "batch_tokens": recipe.extract.batch_tokens,
        "target": recipe.target.model_path.rstrip("/").rpartition("/")[2],
        "kept": kept or None,
    }


@dataclass(frozen=True)
class Ledger:
    """One version of a dataset, chosen for a run.

    Attributes:
        name: the version's name, `<dataset>-v<k>`.
        state: "new", "resumed" (begun by an earlier run) or "complete" (its manifest is committed).
        differs: how the newest version's plan differs from this run's, when a new one was made for want of an equal.
    """

    store: Store
    name: str
    state: Literal["new", "resumed", "complete"]
    differs: tuple[str, ...] = ()

    @classmethod
    def choose(
        cls, store: Store, base: str, identity: dict[str, Any], on_complete: Literal["reuse", "new"]
    ) -> "Ledger":
        """Find the version to go on with, or begin a new one."""
        versions = sorted(versions_with(PLAN, store, base), reverse=True)
        differs: tuple[str, ...] = ()
        for version in versions:
            name = f"{base}-v{version}"
            theirs = json.loads(store.get_bytes(f"{name}/{PLAN}"))
            changed = tuple(
                f"{key}: {theirs.get(key)} / {identity[key]}" for key in identity if theirs.get(key) != identity[key]
            )
            if not changed:
                closed = any(True for _ in store.list(f"{name}/{RUNS}/"))
                if closed and on_complete == "new":
                    break
                complete = store.head(f"{name}/{MANIFEST}") is not None
                return cls(store, name, "complete" if complete else "resumed")
            differs = differs or changed
        name = f"{base}-v{max(versions, default=0) + 1}"
        try:
            store.put_bytes(f"{name}/{PLAN}", _json(identity), if_none_match=True)
        except ObjectExists:  # another run began this version a moment ago: join it, or begin the next one
            return cls.choose(store, base, identity, on_complete)
        return cls(store, name, "new", differs)

    @property
    def uri(self) -> str:
        """Where the dataset is, for people and for `eyas inspect`."""
        return self.store.object_uri(self.name)

    def dataset(self) -> Dataset:
        """The committed dataset."""
        return Dataset.open(self.store, self.name)

    def replies(self) -> dict[str, dict[str, Any]]:
        """Prompt digest -> reply, from the chunks stored so far."""
        found: dict[str, dict[str, Any]] = {}
        for info in self.store.list(f"{self.name}/{REPLIES}/"):
            for reply in json.loads(self.store.get_bytes(info.key))["replies"]:
                found[reply["prompt"]] = reply
        return found

    def replies_to(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]] | None:
        """The stored chunk of replies to exactly these prompts; None if there is none yet."""
        try:
            return list(json.loads(self.store.get_bytes(self._chunk([p.digest for p in prompts])))["replies"])
        except ObjectMissing:
            return None

    def keep_replies(self, settings: dict[str, Any], replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Store one chunk of replies, named by its prompts, with the sampling settings they were made with.

        Returns:
            What is stored now: of two runs that asked the same prompts, the first one's replies count for both.
        """
        key = self._chunk([reply["prompt"] for reply in replies])
        try:
            self.store.put_bytes(key, _json({"settings": settings, "replies": replies}), if_none_match=True)
        except ObjectExists:
            return list(json.loads(self.store.get_bytes(key))["replies"])
        return replies

    def _chunk(self, digests: Sequence[str]) -> str:
        return f"{self.name}/{REPLIES}/{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}.json"

    def keep_report(self, batch_id: str, report: dict[str, int]) -> None:
        """Store what a batch's proof found: counts that add up over batches."""
        self.store.put_bytes(f"{self.name}/{REPORTS}/{batch_id}.json", _json(report))

    def reports(self) -> dict[str, int]:
        """The sums of the reports of all batches, whichever run did them."""
        total: dict[str, int] = {}
        for info in self.store.list(f"{self.name}/{REPORTS}/"):
            for name, value in json.loads(self.store.get_bytes(info.key)).items():
                total[name] = total.get(name, 0) + value
        return total

    def keep_quarantined(self, batch_id: str, reasons: Mapping[str, str]) -> None:
        """Record a batch without a usable sample: it has no shard, and is done all the same."""
        self.store.put_bytes(f"{self.name}/{QUARANTINED}/{batch_id}.json", _json(dict(reasons)))

    def is_quarantined(self, batch_id: str) -> bool:
        """Whether some run has found no usable sample in a batch."""
        return self.store.head(f"{self.name}/{QUARANTINED}/{batch_id}.json") is not None

    def quarantined_batches(self) -> dict[str, dict[str, str]]:
        """Batch id -> sample id -> reason, of the batches without a usable sample."""
        found = {}
        for info in self.store.list(f"{self.name}/{QUARANTINED}/"):
            batch_id = info.key.rpartition("/")[2].removesuffix(".json")
            found[batch_id] = dict(json.loads(self.store.get_bytes(info.key)))
        return found

    def forget_quarantined(self, batch_id: str) -> None:
        """A batch that was given up is to be captured again."""
        self.store.delete(f"{self.name}/{QUARANTINED}/{batch_id}.json")

    def claim_target(self, target: Mapping[str, Any]) -> None:
        """Say which target's this version is; the first to say so counts, before there is one reply of it.

        Raises:
            DatasetError: it is another target's: replies and states of two must not meet in one dataset.
        """
        key = f"{self.name}/{TARGET}"
        try:
            self.store.put_bytes(key, _json(target), if_none_match=True)
        except ObjectExists:
            theirs = json.loads(self.store.get_bytes(key))
            if differing := [f"{name}: {value} / {theirs.get(name)}" for name, value in target.items()
                             if theirs.get(name) != value]:  # fmt: skip
                raise DatasetError(
                    self.uri, f"was begun with another target; ours / theirs: {'; '.join(differing)}",
                    "one target a dataset", "Put the target back, or give dataset.name another name.",
                ) from None  # fmt: skip

    def close(self, run_id: str, summary: dict[str, Any]) -> None:
        """Record that a run went to its end with this version."""
        self.store.put_bytes(f"{self.name}/{RUNS}/{run_id}.json", _json(summary))

    def objects(self) -> dict[str, int]:
        """Key -> bytes of everything stored of this version."""
        return {info.key: info.bytes for info in self.store.list(f"{self.name}/")}


def chunks(items: list[Prompt], in_flight: int) -> list[list[Prompt]]:
    """Prompts in the groups their replies are asked and stored in: what a kill loses at most."""
    size = _ROUNDS * in_flight
    return [items[start : start + size] for start in range(0, len(items), size)]


def versions_with(file: str, store: Store, base: str) -> list[int]:
    """Numbers of the versions of a dataset in which there is this file."""
    pattern = re.compile(re.escape(base) + r"-v(\d+)/" + re.escape(file))
    return [int(m[1]) for info in store.list(f"{base}-v") if (m := pattern.fullmatch(info.key))]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()
