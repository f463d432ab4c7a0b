"""Training the drafter from the bucket, and the folders SGLang loads."""

import copy
import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prefect.logging import get_run_logger

from drafter.acceptance import Figures, simulated_acceptance_length
from drafter.checkpoint import CheckpointFolder
from drafter.export import export_drafter
from drafter.inspect import inspect_drafter
from drafter.loss import LossConfig
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.schedule import Schedule
from drafter.start import first_drafter
from drafter.trainer import StepMetrics, TrainConfig, Trainer
from hidden_states.errors import TrainingError
from hidden_states.final_norm import FinalNorm
from hidden_states.manifest import HELD_OUT, TRAIN
from hidden_states.stream import SampleStream
from tasks.dataset import log_dataset
from tasks.job import Job, need
from tasks.page import Progress
from tasks.stage import current
from tasks.step import step
from tasks.tracking import Tracker

REPORT_EVERY_S = 15.0
PROGRESS = "training-progress"


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Attributes:
        drafter: the best weights by simulated acceptance on the held-out split.
        control: the same drafter before its first step.
        checkpoints: the training's folder, removed once the run is registered.
    """

    drafter: Eagle3Drafter
    control: Eagle3Drafter
    figures: Figures
    checkpoints: Path


def train_config(recipe: Any) -> TrainConfig:
    """The trainer's configuration, from a recipe."""
    t = recipe.train
    return TrainConfig(
        ttt_steps=t.ttt_steps,
        loss=LossConfig(decay=t.step_decay),
        schedule=Schedule(lr=t.lr, kind=t.schedule, warmup_steps=t.warmup_steps),
        betas=(0.9, t.beta2),
        weight_decay=t.weight_decay,
        clip=t.clip,
        max_steps=t.steps,
        max_seconds=t.max_seconds,
        epochs=t.epochs,
        checkpoint_every=t.checkpoint_every,
        validate_every=t.eval_every,
        dtype=t.dtype,
    )


def training_id(dataset_digest: str, train: Any, first: Eagle3Drafter) -> str:
    """Name of a training's checkpoint folder: equal where going on from the other's checkpoints is right.

    Args:
        train: the recipe's section. A drafter to start from counts by its weights, not by where it lies.
        first: the drafter before its first step.
    """
    unset = {name for name in ("start_from", "drafter") if not getattr(train, name)}
    said = train.model_dump(mode="json", exclude=unset)  # so that trainings of before these keys go on
    if train.start_from is not None:
        digest = hashlib.sha256()
        for name, weight in sorted(first.state_dict().items()):
            digest.update(name.encode())
            digest.update(weight.detach().contiguous().view(torch.uint8).numpy())
        said["start_from"] = digest.hexdigest()
    return hashlib.sha256(json.dumps([dataset_digest, said], sort_keys=True).encode()).hexdigest()[:16]


@step("train drafter", retries=1)
def train_drafter(job: Job) -> None:
    """Train on the bucket's shards, from the newest checkpoint of this very training if there is one."""
    recipe, dataset = job.recipe, need(job.dataset, "dataset")
    target = TargetWeights.load(recipe.target.model_path)
    vocab = dataset.vocab_map()
    drafter = first_drafter(
        recipe.target.model_path, target.head, dataset.manifest.after_block, vocab.d2t, recipe.train.seed,
        recipe.train.start_from, recipe.train.drafter,
    )  # fmt: skip
    control = copy.deepcopy(drafter)
    checkpoints = job.state / "checkpoints" / training_id(dataset.digest, recipe.train, drafter)
    cache = job.state / "cache"
    norm = FinalNorm.load(recipe.target.model_path) if dataset.manifest.final_norm == "pre" else None

    def stream(split: str) -> Callable[[int], SampleStream]:
        return lambda epoch: SampleStream(
            dataset,
            split=split,
            seed=recipe.train.seed,
            epoch=epoch,
            batch_tokens=recipe.train.batch_tokens,
            cache_dir=cache,
            norm=norm,
            top_logits=True,
        )

    tracker = current(job)
    log_dataset(job, tracker, "training")
    course = train_config(recipe)
    watch, result = TrainingWatch(tracker, get_run_logger().info, course), None
    try:
        trainer = Trainer(
            course, drafter, target, stream(TRAIN), checkpoints,
            validation=lambda: stream(HELD_OUT)(0), on_step=watch.step, on_validation=watch.validation,
        )  # fmt: skip
        result = trainer.run()
    finally:
        watch.end(result is not None)
    best = CheckpointFolder(checkpoints).load_best()
    if best is None or result.validation is None:
        raise TrainingError(
            "training", "it ended without a validation", "held-out samples", "Raise data.held_out_share."
        )
    drafter.load_state_dict(best[0])
    figures = trainer.evaluate(stream(HELD_OUT)(0))
    conditional = figures.conditional_acceptance[: recipe.evaluate.num_steps]
    job.trained = Trained(drafter, control, figures, checkpoints)
    job.figures |= {
        "draft_vocab_size": drafter.config.draft_vocab_size,
        "train_steps": result.steps,
        "train_tokens": result.tokens,
        "train_tokens_per_s": round(result.tokens / result.seconds, 1),
        "loss_first": round(result.loss_first, 4),
        "loss_last": round(result.loss_last, 4),
        "held_out_top1": [round(x, 4) for x in figures.top1],
        "predicted_acceptance_length": round(simulated_acceptance_length(conditional), 4),
        "replayed_acceptance_length": round(figures.replayed_acceptance_length[len(conditional) - 1], 4),
    }


class TrainingWatch:
    """Passes a training's figures on: every step to MLflow, a line now and then to the log and to the run's page.

    MLflow is told from a thread of its own: while it is away the figures wait and the training goes on.
    """

    def __init__(self, tracker: Tracker, say: Callable[[str], None], config: TrainConfig) -> None:
        self.tracker, self.say, self.config = tracker, say, config
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="figures")
        self._sending: Future[None] | None = None
        self._said = time.monotonic()
        self._bar = Progress(PROGRESS, 0.0, "training begins")

    def step(self, m: StepMetrics) -> None:
        """One optimiser step."""
        figures = {f"train/{name}": value for name, value in m.figures.flat().items()}
        figures |= {"train/lr": m.lr, "train/grad_norm": m.grad_norm, "train/tokens_per_s": m.tokens_per_s}
        self._waiting.append((m.step, figures))
        if m.step == 1 or time.monotonic() - self._said >= REPORT_EVERY_S:
            self._said = time.monotonic()
            top1 = ", ".join(f"{x:.2f}" for x in m.figures.top1)
            words = f"step {m.step}: loss {m.loss:.3f}, top-1 {top1}, {m.tokens_per_s:,.0f} tokens/s"
            self.say(words)
            self._bar.update(self._percent(m), words)
            self._send_on()

    def validation(self, step: int, figures: Figures) -> None:
        """Figures of the held-out split."""
        self._waiting.append((step, {f"held_out/{name}": value for name, value in figures.flat().items()}))
        self.say(
            f"step {step}: held out: loss {figures.loss:.3f}, simulated acceptance {figures.acceptance_length:.3f}"
        )

    def end(self, trained: bool) -> None:
        """Send what waits, however the training ended; MLflow's own client asks again for some minutes."""
        self._sender.shutdown(wait=True)
        self._send()
        if trained:
            self._bar.update(100.0, "trained")

    def _percent(self, m: StepMetrics) -> float:
        c = self.config
        parts = [m.step / c.max_steps if c.max_steps else 0.0, m.seconds / c.max_seconds if c.max_seconds else 0.0]
        parts.append(m.epoch / c.epochs if c.epochs else 0.0)
        return round(100 * min(1.0, max(parts)), 1)

    def _send_on(self) -> None:
        if self._sending is not None:
            if not self._sending.done():
                return
            if error := self._sending.exception():
                self.say(f"MLflow does not take the figures, {len(self._waiting)} steps of them wait: {error}")
        self._sending = self._sender.submit(self._send)

    def _send(self) -> None:
        while self._waiting:
            at, figures = self._waiting[0]
            self.tracker.metrics(figures, at)
            self._waiting.popleft()


@step("export drafter")
def export_drafters(job: Job) -> None:
    """Write the drafter, and the control (as it was before training), as folders SGLang loads; check them."""
    trained, recipe = need(job.trained, "trained drafter"), job.recipe
    dtype: torch.dtype = getattr(torch, need(job.plan, "plan").shape.dtype, torch.float32)
    for name, model in (("drafter", trained.drafter), ("control", trained.control)):
        if name == "control" and not recipe.evaluate.control:
            continue
        folder = job.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        export_drafter(model, folder, dtype=dtype)
        problems = inspect_drafter(folder, recipe.target.model_path).problems
        if problems:
            raise TrainingError(str(folder), "; ".join(problems), "a drafter that fits the target", "This is a defect.")
