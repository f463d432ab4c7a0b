"""Checkpoints of a training: whole or absent, the newest few kept, readable by any number of ranks.

    <folder>/step-<n>/state/         weights by SGLang's names, and the optimiser (torch.distributed.checkpoint)
                     /training.pt    random state, position in the data
                     /progress.json  step, epoch, what the training is
    <folder>/best/drafter.safetensors, figures.json

A folder appears by one rename of a finished, synced temporary one; what a crash leaves behind is called `.tmp-*` and is
removed at the next start. Every rank writes its share into the same folder: several machines need a shared one.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from drafter.course import Progress
from drafter.ranks import Ranks
from hidden_states.errors import TrainingError

_STATE, _TRAINING, _PROGRESS = "state", "training.pt", "progress.json"
_BEST, _FIGURES = "drafter.safetensors", "figures.json"
_LOST = "Remove this folder; training goes on, and the best of what is still to come is kept."
_REPLACED = ".tmp-replaced-"


@dataclass(frozen=True)
class Checkpoint:
    """training: tensors and plain values only; progress: JSON."""

    training: dict[str, Any]
    progress: dict[str, Any]


class CheckpointFolder:
    """Reads and writes one training's checkpoints. With several ranks, all of them call `save` and `load_state`."""

    def __init__(self, folder: str | Path, keep: int = 3, ranks: Ranks | None = None) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.ranks = ranks or Ranks(torch.device("cpu"))
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for replaced in self.folder.glob(f"{_REPLACED}*"):
                if not (was := self.folder / replaced.name.removeprefix(_REPLACED)).exists():
                    replaced.rename(was)  # the crash came between the two renames of `_publish`
            for left_behind in self.folder.glob(".tmp-*"):
                shutil.rmtree(left_behind)
        self.ranks.wait()

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending."""
        numbers = (p.name.removeprefix("step-") for p in self.folder.glob("step-*"))
        return sorted(int(n) for n in numbers if n.isdecimal())

    def save(self, step: int, drafter: nn.Module, optimiser: torch.optim.Optimizer, checkpoint: Checkpoint) -> Path:
        """Writes one checkpoint, then removes all but the newest `keep`."""
        temporary, final = self.folder / f".tmp-step-{step}", self._path(step)
        if self.ranks.first:
            temporary.mkdir(exist_ok=True)
        self.ranks.wait()
        with _alone_is_fine():
            dcp.save(_state(drafter, optimiser), checkpoint_id=temporary / _STATE)
        self.ranks.wait()
        if self.ranks.first:
            torch.save(checkpoint.training, temporary / _TRAINING)
            (temporary / _PROGRESS).write_text(json.dumps(checkpoint.progress, indent=2))
            _publish(temporary, final)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self._path(old))
        self.ranks.wait()
        return final

    def load_newest(self) -> Checkpoint | None:
        """What the newest checkpoint says of its training; None when there is none yet.

        Raises: TrainingError when it cannot be read.
        """
        if not (steps := self.steps()):
            return None
        folder = self._path(steps[-1])
        with _readable(folder):
            training = torch.load(folder / _TRAINING, weights_only=True)
            progress = json.loads((folder / _PROGRESS).read_text())
            Progress(**{name: value for name, value in progress.items() if name != "training"})
            if not isinstance(progress["training"], dict) or training["random"].dtype != torch.uint8:
                raise TypeError("parts of it are of another kind")
            if not isinstance(training["ranks"], int):
                raise TypeError(f"ranks: {training['ranks']!r}")
            return Checkpoint(training, progress)

    def load_state(self, drafter: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Puts the newest checkpoint's weights and optimiser state in place, spread as they are now.

        Raises: TrainingError when it cannot be read.
        """
        folder = self._path(self.steps()[-1])
        state = _state(drafter, optimiser)
        with _readable(folder), _alone_is_fine(), _quiet():
            dcp.load(state, checkpoint_id=folder / _STATE)
        drafter.load_state_dict(state["drafter"])
        set_optimizer_state_dict(drafter, optimiser, state["optimiser"])

    def save_best(self, weights: dict[str, Tensor], figures: dict[str, Any]) -> Path:
        """Replaces the best drafter; the first rank's task."""
        temporary = self.folder / ".tmp-best"
        temporary.mkdir(exist_ok=True)
        save_file(weights, temporary / _BEST)
        (temporary / _FIGURES).write_text(json.dumps(figures, indent=2))
        final = self.folder / "best"
        _publish(temporary, final)
        return final

    def load_best(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Weights and figures of the best drafter so far.

        Raises: TrainingError when they cannot be read.
        """
        figures, folder = self.best_figures(), self.folder / "best"
        if figures is None:
            return None
        with _readable(folder, _LOST):
            return load_file(folder / _BEST), figures

    def best_figures(self) -> dict[str, Any] | None:
        """Only the figures; they have `acceptance_length`. Raises as `load_best`."""
        folder = self.folder / "best"
        if not folder.is_dir():
            return None
        with _readable(folder, _LOST):
            figures: dict[str, Any] = json.loads((folder / _FIGURES).read_text())
            figures["acceptance_length"] = float(figures["acceptance_length"])
            return figures

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def _state(drafter: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    return {"drafter": drafter.state_dict(), "optimiser": get_optimizer_state_dict(drafter, optimiser)}


@contextmanager
def _readable(
    folder: Path, do: str = "Remove this folder; training then resumes from the one before."
) -> Iterator[None]:
    try:
        yield
    # The unpicklers end in any of ten types on a torn file, torch's own is a BaseException; they all mean this.
    except (Exception, CheckpointException) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        # of an unpickler only its name: torch's message advises to load the file without its checks
        said = "torch cannot read it" if type(first).__name__ == "UnpicklingError" else str(first).partition("\n")[0]
        raise TrainingError(
            str(folder), f"unreadable ({type(first).__name__}: {said[:300]})", "a whole checkpoint", do
        ) from error


def _not_of_metadata(record: logging.LogRecord) -> bool:
    return "metadata is not found" not in record.getMessage()


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a traceback for each file it misses, to the root logger; the refusal says it in one line."""
    log = logging.getLogger()
    log.addFilter(_not_of_metadata)
    try:
        yield
    finally:
        log.removeFilter(_not_of_metadata)


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """torch warns when a checkpoint is written or read outside of a process group, as it is on one rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed.*", category=UserWarning)
        yield


def _publish(temporary: Path, final: Path) -> None:
    """Syncs a finished folder and renames it into place."""
    for file in [*temporary.rglob("*"), temporary]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if final.exists():
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        os.rename(final, replaced)
        os.rename(temporary, final)
        shutil.rmtree(replaced)
    else:
        os.rename(temporary, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
