"""`evaluation.json` in a drafter's folder: how it served each prompt, so that drafters can be compared later."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_capture import contract
from hidden_states.errors import DatasetError
from tasks.intervals import FEWEST, Paired, paired
from tasks.job import Job, need

FILE = "evaluation.json"
SETTINGS = ("target", "sglang_version", "num_steps", "max_new_tokens", "concurrency")


@dataclass(frozen=True)
class Evaluation:
    """One drafter's serving record.

    Attributes:
        name: what it is called here.
        settings: what must be alike for a comparison; see SETTINGS.
        histograms: prompt digest -> verifications by accepted drafted tokens.
        tokens_per_s: output tokens over the server's seconds per request.
        outputs_equal: prompts answered as in plain decoding.
    """

    name: str
    settings: dict[str, Any]
    histograms: dict[str, list[int]]
    tokens_per_s: float
    outputs_equal: int

    @classmethod
    def read(cls, folder: Path, name: str) -> "Evaluation":
        """Of a drafter's folder.

        Raises:
            DatasetError: it was not served, or by another program.
        """
        path = folder / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(name, data["settings"], data["histograms"], data["tokens_per_s"], data["outputs_equal"])
        except FileNotFoundError:
            raise DatasetError(
                name, f"no {FILE} in its folder", "a drafter that was served", "Run it with evaluate.enabled true."
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(str(path), f"unusable ({error!r})", "an evaluation written by Eyas") from error


def keep_evaluation(job: Job) -> None:
    """Write it; nothing to write for a drafter that was not served."""
    figures, recipe = job.figures, job.recipe
    if "served_histograms" not in figures:
        return
    settings = {
        "target": job.target_name, "sglang_version": figures["sglang_version"],
        "num_steps": recipe.evaluate.num_steps, "max_new_tokens": recipe.evaluate.max_new_tokens,
        "concurrency": recipe.evaluate.concurrency,
    }  # fmt: skip
    digests = [contract.tokens_sha256(prompt.ids) for prompt in need(job.prompts, "prompts")]
    content = {
        "settings": settings,
        "histograms": dict(zip(digests, figures["served_histograms"], strict=True)),
        "tokens_per_s": figures["served_tokens_per_s"],
        "outputs_equal": figures["served_outputs_equal"],
    }
    (job.folder / "drafter" / FILE).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def compare(one: Evaluation, other: Evaluation) -> Paired:
    """On the prompts that both were served.

    Raises:
        DatasetError: served under other settings, or with too few prompts in common.
    """
    where = f"{one.name} and {other.name}"
    differing = [
        f"{key}: {one.settings.get(key)} / {other.settings.get(key)}"
        for key in SETTINGS
        if one.settings.get(key) != other.settings.get(key)
    ]
    if differing:
        raise DatasetError(where, f"served differently ({'; '.join(differing)})", "the same target and settings",
                           "Run one of them again with the other's settings.")  # fmt: skip
    common = sorted(one.histograms.keys() & other.histograms.keys())
    if len(common) < FEWEST:
        raise DatasetError(
            where, f"{len(common)} prompts in common", f"at least {FEWEST}",
            "Their held-out prompts differ. A pipeline run serves the champion on the prompts of its own drafter.",
        )  # fmt: skip
    return paired([one.histograms[d] for d in common], [other.histograms[d] for d in common])
