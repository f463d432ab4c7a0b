"""A drafter before its first step: fresh, for a target, or one that somebody published, to be trained further."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from drafter.config import DrafterConfig, read_target_config
from drafter.model import Eagle3Drafter
from drafter.naming import load_drafter
from drafter.published import published_config
from hidden_states.errors import TrainingError
from hidden_states.target_config import refuse_other_logits

_OF_THE_DATASET = ("after_block", "draft_vocab_size")


def first_config(
    target: str | Path,
    after_block: Sequence[int],
    draft_vocab_size: int,
    start_from: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> DrafterConfig:
    """The shape a training begins with; reads no weights.

    Args:
        target: the target's folder.
        after_block: the blocks whose states there are.
        draft_vocab_size: of a fresh drafter; a published one has its own.
        start_from: a published drafter's folder, in any layout of `drafter.naming`.
        overrides: fields of `DrafterConfig` for a fresh drafter, `latent_attention` among them.

    Raises: TrainingError when there is no such drafter for this target and these blocks; DataError when the target's
        logits are more than `lm_head(final)`.
    """
    refuse_other_logits(target)
    config, overrides = read_target_config(target), dict(overrides or {})
    if start_from is None:
        if fixed := [name for name in _OF_THE_DATASET if name in overrides]:
            raise TrainingError(
                "drafter", ", ".join(fixed), "fields that the dataset does not decide", "Leave them out."
            )
        return DrafterConfig.from_target(config, after_block, draft_vocab_size, **overrides)
    if overrides:
        raise TrainingError(
            "drafter",
            f"{', '.join(overrides)} beside start_from",
            "one of the two",
            "A published drafter has its shape.",
        )
    found = published_config(start_from, config)
    if found.after_block != tuple(after_block):
        raise TrainingError(
            str(start_from), f"a drafter that reads the outputs of blocks {list(found.after_block)}",
            f"one of blocks {list(after_block)}, whose states there are", "Capture its blocks, or start with another.",
        )  # fmt: skip
    return found


def first_drafter(
    target: str | Path,
    target_head: Tensor,
    after_block: Sequence[int],
    d2t: Tensor,
    seed: int,
    start_from: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Eagle3Drafter:
    """The drafter a training begins with: float32, on the CPU.

    Args:
        target_head: [V, H]; a fresh drafter's head is made of it.
        d2t: [D], a fresh drafter's vocabulary map; a published one keeps its own.
        seed: of a fresh drafter's weights.

    Raises: TrainingError as `first_config`, and for published weights that cannot be read.
    """
    config = first_config(target, after_block, len(d2t), start_from, overrides)
    if start_from is not None:
        return load_drafter(start_from, config)
    drafter = Eagle3Drafter(config, d2t)
    drafter.initialise(target_head, seed)
    return drafter
