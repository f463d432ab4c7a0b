"""The training loop. One optimiser step sees `accumulate` packed rows per rank; its loss is their token-weighted mean.

The same loop runs alone, in a thread (no signal handler, no global state but torch's random state on resume), and on
every rank of an initialised `torch.distributed` group, over which the weights are then spread. Nothing here knows where
batches come from or metrics go.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from drafter.acceptance import Figures, Tally
from drafter.batch import Batch
from drafter.checkpoint import Checkpoint, CheckpointFolder
from drafter.course import Progress, StepMetrics, TrainConfig, TrainResult
from drafter.loss import LossConfig
from drafter.memory import freed_memory_kept
from drafter.model import Eagle3Drafter, TargetWeights, vocabulary_digest
from drafter.objective import Teacher, batch_loss, placed, plan_work
from drafter.ranks import Ranks, whole, whole_weights
from hidden_states.errors import TrainingError

STOPPED_EXIT_CODE = 75  # of a process that saved and left because it was asked to: run the same command again

Batches = Callable[[int], Iterable[Batch]]


@runtime_checkable
class Stateful(Protocol):
    """A stream of packed rows that knows where it is."""

    def state_dict(self) -> dict[str, Any]:
        """The place after the last row it gave."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""


class Trainer:
    """Trains a drafter on packed rows.

    Args:
        config: the course.
        drafter: its weights are trained in place.
        target: embedding and head of the target.
        batches: epoch number -> that epoch's packed rows. An iterable with `state_dict` and `load_state_dict` is
            resumed by them, any other by passing over the rows already seen.
        checkpoint_dir: None keeps nothing.
        validation: () -> held-out packed rows; evaluated every `validate_every` steps and at the end.
        on_step, on_validation: called with what just happened (on every rank).
        stop: asked before every step; True saves and returns.
    """

    def __init__(
        self,
        config: TrainConfig,
        drafter: Eagle3Drafter,
        target: TargetWeights,
        batches: Batches,
        checkpoint_dir: str | Path | None = None,
        validation: Callable[[], Iterable[Batch]] | None = None,
        on_step: Callable[[StepMetrics], None] | None = None,
        on_validation: Callable[[int, Figures], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.config, self.drafter, self.batches, self.validation = config, drafter, batches, validation
        self.on_step, self.on_validation, self.stop = on_step, on_validation, stop
        self.dtype = getattr(torch, config.dtype)
        self.device = drafter.d2t.device
        self.teacher = Teacher(target.to(self.device, self.dtype), drafter.draft_ids)
        self.ranks = Ranks(self.device)
        self.ranks.shard(drafter)
        self.optimiser = torch.optim.AdamW(
            drafter.parameters(),
            lr=config.schedule.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.folder = None if checkpoint_dir is None else CheckpointFolder(checkpoint_dir, config.keep, self.ranks)
        self.progress = Progress()
        self._stream: Iterable[Batch] | None = None
        self._stopped = False
        # Packed rows of this epoch, on all ranks, and those behind; 0 = its length is not known.
        self._epoch_rows = self._epoch_done = 0.0

    def run(self) -> TrainResult:
        """Trains to the end of the course, from the newest checkpoint when there is one.

        Raises: TrainingError on a loss or gradient that is not finite or jumps, naming the samples of that step.
        """
        with freed_memory_kept():
            return self._run()

    def _run(self) -> TrainResult:
        self._resume()
        config, progress = self.config, self.progress
        began = time.monotonic() - progress.seconds
        validated: Figures | None = None
        validated_at = -1
        for group in self._groups():
            step_began = time.monotonic()
            lr = config.schedule.at(progress.step, self._course_done())
            for parameters in self.optimiser.param_groups:
                parameters["lr"] = lr
            tally, tokens = self._gradients(group)
            figures = tally.figures(config.loss.decay)
            norm = float(whole(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), config.clip)))
            self._guard(figures.loss, norm, group)
            self.optimiser.step()
            self.optimiser.zero_grad()
            now = time.monotonic()
            progress.step += 1
            progress.in_epoch += len(group)
            self._epoch_done += self.ranks.total(len(group))
            progress.tokens += tokens
            progress.seconds = self.ranks.largest(now - began)
            if self.on_step:
                self.on_step(
                    StepMetrics(
                        progress.step, progress.epoch, lr, figures.loss, norm, tokens, tokens / (now - step_began),
                        progress.seconds, figures,
                    )
                )  # fmt: skip
            if config.checkpoint_every and progress.step % config.checkpoint_every == 0:
                self._save()  # before the validation: its troubles cost no training
            if config.validate_every and progress.step % config.validate_every == 0:
                validated, validated_at = self._validate(), progress.step
        self._save()
        if not self._stopped and validated_at != progress.step:  # also of a course that was over when we resumed it
            validated = self._validate()
        return TrainResult(
            progress.step, progress.epoch, progress.tokens, progress.seconds, progress.loss_first, progress.loss_last,
            self._stopped, validated, progress.best,
        )  # fmt: skip

    def evaluate(self, batches: Iterable[Batch]) -> Figures:
        """Figures of the drafter as it is on other packed rows; every rank sees its own share of them."""
        return evaluate(self.drafter, batches, self.teacher, self.config.ttt_steps, self.config.loss, self.dtype)

    def _groups(self) -> Iterator[list[Batch]]:
        """The packed rows of each optimiser step, epoch after epoch, until the course is done or a stop is asked for
        (before rows are taken: a position in the data is saved with the steps that used it). A rank whose rows have run
        out gives empty groups until every rank's have."""
        progress = self.progress
        while not self._leaving():
            if self._stream is None:
                self._stream = self.batches(progress.epoch)
                self._epoch_rows, self._epoch_done = self._rows_in(self._stream), 0.0
            rows = iter(self._stream)
            while not self._leaving():
                taken = zip(range(self.config.accumulate), rows, strict=False)
                group = [placed(row, self.device) for _, row in taken]
                if not self.ranks.anywhere(bool(group)):
                    break
                yield group
            else:
                return
            if not self._epoch_done:  # on any rank
                raise TrainingError(
                    f"epoch {progress.epoch}",
                    "no packed rows",
                    "at least one",
                    "Check the dataset and the held-out share.",
                )
            self._stream = None
            progress.epoch += 1
            progress.in_epoch = 0
            self._epoch_done = 0.0

    def _gradients(self, group: list[Batch]) -> tuple[Tally, int]:
        """Adds up the gradients of one optimiser step, here and over the ranks; its tally and tokens."""
        config = self.config
        works = [plan_work(batch, self.teacher, config.ttt_steps, config.loss) for batch in group]
        counts = torch.zeros(config.ttt_steps, dtype=torch.float64, device=self.device)
        for work in works:
            counts += torch.tensor(work.scored(), dtype=torch.float64, device=self.device)
        self.ranks.sum(counts)
        weights = config.loss.step_weights([int(n) for n in counts])
        tally = Tally.zeros(config.ttt_steps)
        with self.ranks.summed_gradients(self.drafter):
            for batch, work in zip(group, works, strict=True):
                loss, part = batch_loss(
                    self.drafter, batch, work, self.teacher, weights, config.loss, self.dtype, config.recompute
                )
                tally.add(part)
                if loss.requires_grad:
                    loss.backward()
        sums = torch.cat([tally.flat(), torch.tensor([sum(len(b.input_ids) for b in group)], dtype=torch.float64)])
        sums = sums.to(self.device)
        self.ranks.sum(sums)
        tally.load_flat(sums[:-1].cpu())
        return tally, int(sums[-1])

    def _guard(self, loss: float, norm: float, group: list[Batch]) -> None:
        progress = self.progress
        running = progress.running_loss
        jumped = progress.step >= 20 and loss > self.config.jump * running
        if not (math.isfinite(loss) and math.isfinite(norm)) or jumped:
            samples = ", ".join(sample for batch in group for sample in batch.sample_ids)
            raise TrainingError(
                f"step {progress.step + 1}, samples {samples}",
                f"loss {loss:.4g}, gradient norm {norm:.4g}",
                f"finite values, and a loss below {self.config.jump:g} x its running mean of {running:.4g}",
                "Nothing was updated by this step. Look at these samples (eyas inspect), or lower the learning rate; "
                "the last checkpoint is from before it.",
            )
        if math.isnan(progress.loss_first):
            progress.loss_first = progress.running_loss = loss
        progress.loss_last = loss
        progress.running_loss = 0.95 * progress.running_loss + 0.05 * loss

    def _validate(self) -> Figures | None:
        if self.validation is None:
            return None
        figures = self.evaluate(self.validation())
        progress = self.progress
        if progress.best is None or figures.acceptance_length > progress.best:
            progress.best = figures.acceptance_length
            weights = whole_weights(self.drafter) if self.folder else {}
            if self.folder and self.ranks.first:
                self.folder.save_best(weights, {"step": progress.step, **asdict(figures)})
        if self.on_validation:
            self.on_validation(progress.step, figures)
        return figures

    def _course_done(self) -> float:
        """Share of the course that is behind, 0 to 1, by whichever end comes first. Within an epoch it grows only when
        the epoch's length is known; elsewhere a schedule over epochs falls in stairs."""
        config, progress = self.config, self.progress
        by_steps = progress.step / config.max_steps if config.max_steps else 0.0
        by_time = progress.seconds / config.max_seconds if config.max_seconds else 0.0
        by_epochs = 0.0
        if config.epochs:
            within = min(1.0, self._epoch_done / self._epoch_rows) if self._epoch_rows else 0.0
            by_epochs = (progress.epoch + within) / config.epochs
        return min(1.0, max(by_steps, by_time, by_epochs))

    def _rows_in(self, stream: Iterable[Batch]) -> float:
        """Packed rows left in it, on all ranks; 0 when that is not known."""
        return self.ranks.total(len(stream) if isinstance(stream, Sized) else 0)

    def _leaving(self) -> bool:
        self._stopped = self.ranks.anywhere(bool(self.stop and self.stop()))
        return self._stopped or self.ranks.anywhere(self._course_done() >= 1.0)

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to continue this training."""
        return {
            "drafter": json.loads(self.drafter.config.to_json()), "d2t": vocabulary_digest(self.drafter.d2t),
            "ttt_steps": self.config.ttt_steps, "loss": asdict(self.config.loss),
        }  # fmt: skip

    def _save(self) -> None:
        if self.folder is None or self.progress.step in self.folder.steps()[-1:]:
            return
        training: dict[str, Any] = {"random": torch.get_rng_state(), "ranks": self.ranks.count}
        if isinstance(self._stream, Stateful):
            training["stream"] = self._stream.state_dict()
        progress = {**asdict(self.progress), "training": self._identity()}
        self.folder.save(self.progress.step, self.drafter, self.optimiser, Checkpoint(training, progress))

    def _resume(self) -> None:
        found = self.folder.load_newest() if self.folder else None
        if found is None or self.folder is None:
            return
        said = dict(found.progress)
        identity, ours = said.pop("training"), self._identity()
        if identity != ours:
            differing = ", ".join(k for k in ours if ours[k] != identity.get(k))
            raise TrainingError(
                str(self.folder.folder), f"checkpoints of another training ({differing} differ)", "this training's own",
                "Use another checkpoint folder, or remove this one to start over.",
            )  # fmt: skip
        self.progress = Progress(**said)
        best = self.folder.best_figures()  # newer than the checkpoint perhaps, or removed because it was damaged
        self.progress.best = best["acceptance_length"] if best else None
        self.folder.load_state(self.drafter, self.optimiser)
        torch.set_rng_state(found.training["random"])
        stream, ranks_then = self.batches(self.progress.epoch), found.training["ranks"]
        self._epoch_rows = self._rows_in(stream)
        if "stream" in found.training and isinstance(stream, Stateful):
            stream.load_state_dict(found.training["stream"])
            self.progress.in_epoch = round(self.progress.in_epoch * ranks_then / self.ranks.count)
            self._epoch_done = self._epoch_rows - self._rows_in(stream)
            self._stream = stream
            return
        if ranks_then != self.ranks.count:
            raise TrainingError(
                str(self.folder.folder), f"a checkpoint of {ranks_then} ranks", f"{self.ranks.count}, as there are now",
                "These batches do not know their position (no state_dict): only as many ranks as before can go on.",
            )  # fmt: skip
        rows = iter(stream)
        passed = sum(next(rows, None) is not None for _ in range(self.progress.in_epoch))
        self._epoch_done = self.ranks.total(passed)
        self._stream = _Rest(rows)


class _Rest:
    """What is left of an iterator, as an iterable."""

    def __init__(self, rows: Iterator[Batch]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Batch]:
        return self._rows


@torch.no_grad()
def evaluate(
    drafter: Eagle3Drafter, batches: Iterable[Batch], teacher: Teacher, steps: int, loss: LossConfig, dtype: torch.dtype
) -> Figures:
    """Loss, accuracies and simulated acceptance length of a drafter over packed rows, token-weighted."""
    tally, ranks = Tally.zeros(steps), Ranks(drafter.d2t.device)
    with ranks.gathered(drafter):
        for batch in batches:
            batch = placed(batch, drafter.d2t.device)
            work = plan_work(batch, teacher, steps, loss)
            tally.add(batch_loss(drafter, batch, work, teacher, [1.0] * steps, loss, dtype)[1])
    sums = tally.flat().to(drafter.d2t.device)
    ranks.sum(sums)
    tally.load_flat(sums.cpu())
    return tally.figures(loss.decay)


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """A `stop` for `Trainer` that turns True on SIGTERM; main thread only. The process should then end with
    STOPPED_EXIT_CODE."""
    asked = False

    def remember(*_: object) -> None:
        nonlocal asked
        asked = True

    before = signal.signal(signal.SIGTERM, remember)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGTERM, before)
