"""The prompts drafters are judged on: the dataset's held-out split, and the named sets of the recipe.

A set has a name, a version and a digest of its content. No prompt of any set is in the training split: each is looked
for there by the digest of its tokens, and left out and counted when it is found. It is left out rather than refused
because a public set (HumanEval) turns up in people's data, and days of training should not end over it; a set of which
too little is left is refused.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from eyas_capture import contract
from hidden_states.dataset import Dataset
from hidden_states.errors import DataError
from hidden_states.manifest import HELD_OUT as HELD_OUT_SPLIT
from hidden_states.trained_prompts import trained_prompts
from infra.recipe import PromptSet as Section
from infra.recipe import Recipe
from tasks.planning import TargetShape, read_set

HELD_OUT = "held-out"


@dataclass(frozen=True)
class ServedPrompt:
    """One prompt. `digest` of its tokens; `source` says where it stands: a sample's id, or `file:line`."""

    ids: list[int]
    digest: str
    source: str


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are served together.

    Attributes:
        version: as the recipe calls it; the dataset's name for the held-out split.
        digest: hex sha256 of the content (of all rows of the set, whichever are served).
        in_training: prompts left out because the drafter was trained on an answer to them.
    """

    name: str
    version: str
    digest: str
    domain: str
    prompts: list[ServedPrompt]
    in_training: int = 0


def prompt_sets(recipe: Recipe, dataset: Dataset) -> list[PromptSet]:
    """The held-out split first, then the recipe's sets in their order.

    Raises:
        DataError: a set's file cannot be read, or nothing is left of the set.
    """
    trained = trained_prompts(dataset)
    named = [_apart(_from_file(section, recipe), trained, section.prompts) for section in recipe.evaluate.sets]
    return [held_out_set(dataset, trained, recipe.evaluate.prompts), *named]


def held_out_set(dataset: Dataset, trained: frozenset[str], most: int) -> PromptSet:
    """The first held-out samples by id, each cut where its first reply begins; no further one is read."""
    table = dataset.samples
    splits = zip(table["id"].to_pylist(), table["split"].to_pylist(), strict=True)
    ids = sorted(sample_id for sample_id, split in splits if split == HELD_OUT_SPLIT)
    prompts: dict[str, ServedPrompt] = {}
    seen = 0
    for sample_id in ids:
        if len(prompts) == most:
            break
        tokens, mask = dataset.read_tokens(sample_id)
        asked = tokens[: mask.index(1)]
        digest = contract.tokens_sha256(asked)
        seen += digest in trained
        if digest not in trained:
            prompts.setdefault(digest, ServedPrompt(asked, digest, sample_id))
    found = PromptSet(HELD_OUT, dataset.name, _digest(ids), HELD_OUT, list(prompts.values()), seen)
    return _not_empty(found)


def _from_file(section: Section, recipe: Recipe) -> PromptSet:
    """A set of the recipe, in the order of its prompts' token digests."""
    shape = TargetShape.read(Path(recipe.target.model_path), recipe.target.dtype)
    read, content = read_set(section, recipe, shape)
    prompts = [ServedPrompt(p.ids, p.digest, p.source) for p in read]
    return PromptSet(section.name, section.version, _digest(content), section.domain or section.name, prompts)


def _apart(found: PromptSet, trained: frozenset[str], most: int) -> PromptSet:
    """The first prompts of a set that training has not seen."""
    new = [prompt for prompt in found.prompts if prompt.digest not in trained]
    return _not_empty(replace(found, prompts=new[:most], in_training=len(found.prompts) - len(new)))


def _not_empty(found: PromptSet) -> PromptSet:
    if not found.prompts:
        raise DataError(
            f"prompt set {found.name}", f"all {found.in_training} prompts are in the training split",
            "prompts it has not seen", "Take the set out of evaluate.sets, or its rows out of data.conversations.",
        )  # fmt: skip
    return found


def _digest(content: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(content)).encode()).hexdigest()


def describe(sets: list[PromptSet]) -> list[dict[str, Any]]:
    """What the sets are, for the summary and MLflow; says what was left out to the log."""
    log = get_run_logger()
    for found in sets:
        log.info("prompt set %s, version %s: %d prompts, content %s", found.name, found.version, len(found.prompts),
                 found.digest[:16])  # fmt: skip
        if found.in_training:
            log.warning("prompt set %s: %d prompts are in the training split and were left out", found.name,
                        found.in_training)  # fmt: skip
    return [
        {"name": s.name, "version": s.version, "digest": s.digest, "domain": s.domain, "prompts": len(s.prompts),
         "in_training": s.in_training}
        for s in sets
    ]  # fmt: skip
