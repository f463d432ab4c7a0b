"""Checkpoints of a training: whole or absent, the newest few kept.

    <folder>/step-<n>/drafter.safetensors   weights by SGLang's names
                     /training.pt           optimiser, random state, position in the data
                     /progress.json         step, epoch, what the training is
    <folder>/best/drafter.safetensors, figures.json

A folder appears by one rename of a finished, synced temporary one; what a crash leaves behind is called `.tmp-*` and is
removed at the next start.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hidden_states.errors import TrainingError

_WEIGHTS, _TRAINING, _PROGRESS = "drafter.safetensors", "training.pt", "progress.json"


@dataclass(frozen=True)
class Checkpoint:
    """weights by name; training: tensors and plain values only; progress: JSON."""

    weights: dict[str, Tensor]
    training: dict[str, Any]
    progress: dict[str, Any]


class CheckpointFolder:
    """Reads and writes one training's checkpoints."""

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_behind in self.folder.glob(".tmp-*"):
            shutil.rmtree(left_behind)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending."""
        return sorted(int(p.name.removeprefix("step-")) for p in self.folder.glob("step-*"))

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        """Writes one checkpoint, then removes all but the newest `keep`."""
        temporary = self.folder / f".tmp-step-{step}"
        temporary.mkdir(exist_ok=True)
        save_file(checkpoint.weights, temporary / _WEIGHTS)
        torch.save(checkpoint.training, temporary / _TRAINING)
        (temporary / _PROGRESS).write_text(json.dumps(checkpoint.progress, indent=2))
        final = self.folder / f"step-{step:08d}"
        _publish(temporary, final)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old:08d}")
        return final

    def load_newest(self) -> Checkpoint | None:
        """The newest checkpoint; None when there is none yet.

        Raises: TrainingError when it cannot be read.
        """
        if not (steps := self.steps()):
            return None
        folder = self.folder / f"step-{steps[-1]:08d}"
        try:
            progress = json.loads((folder / _PROGRESS).read_text())
            training = torch.load(folder / _TRAINING, weights_only=True)
            return Checkpoint(load_file(folder / _WEIGHTS), training, progress)
        except Exception as error:  # the unpickler ends in any of ten types on a torn file; they all mean this
            raise TrainingError(
                str(folder), f"unreadable ({error})", "a whole checkpoint",
                "Remove this folder; training then resumes from the one before.",
            ) from error  # fmt: skip

    def save_best(self, weights: dict[str, Tensor], figures: dict[str, Any]) -> Path:
        """Replaces the best drafter."""
        temporary = self.folder / ".tmp-best"
        temporary.mkdir(exist_ok=True)
        save_file(weights, temporary / _WEIGHTS)
        (temporary / "figures.json").write_text(json.dumps(figures, indent=2))
        final = self.folder / "best"
        _publish(temporary, final)
        return final

    def load_best(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Weights and figures of the best drafter so far."""
        folder = self.folder / "best"
        if not folder.is_dir():
            return None
        return load_file(folder / _WEIGHTS), json.loads((folder / "figures.json").read_text())


def _publish(temporary: Path, final: Path) -> None:
    """Syncs a finished folder and renames it into place."""
    for file in [*temporary.iterdir(), temporary]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if final.exists():
        replaced = final.with_name(f".tmp-replaced-{final.name}")
        os.rename(final, replaced)
        os.rename(temporary, final)
        shutil.rmtree(replaced)
    else:
        os.rename(temporary, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
