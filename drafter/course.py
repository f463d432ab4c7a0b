"""A course of training in plain data: what was asked for, each step, where it stands, how it ended."""

import math
from dataclasses import dataclass, field
from typing import Literal

from drafter.acceptance import Figures
from drafter.loss import LossConfig
from drafter.schedule import Schedule
from drafter.values import refuse_values
from hidden_states.errors import TrainingError

_BOUNDS = {"ttt_steps": 1, "accumulate": 1, "keep": 1, "max_steps": 1, "epochs": 1, "checkpoint_every": 0,
           "validate_every": 0}  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """ttt_steps: K. The course ends at the first of `max_steps`, `max_seconds` and `epochs` (at least one is given).
    accumulate: packed rows per optimiser step. jump: a loss this many times its running mean stops the training.
    dtype: of the matrix products; weights, optimiser, norms and softmax stay float32."""

    ttt_steps: int = 7
    loss: LossConfig = field(default_factory=LossConfig)
    schedule: Schedule = field(default_factory=Schedule)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    accumulate: int = 1
    max_steps: int | None = None
    max_seconds: float | None = None
    epochs: int | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    validate_every: int | None = None
    jump: float = 5.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.max_steps is None and self.max_seconds is None and self.epochs is None:
            raise TrainingError("train", "no end", "max_steps, max_seconds or epochs", "Set one of them.")
        values = {name: getattr(self, name) for name in _BOUNDS}
        refuse_values(
            "train", self,
            **{name: n is None or n >= _BOUNDS[name] for name, n in values.items()},
            max_seconds=self.max_seconds is None or self.max_seconds > 0, clip=self.clip > 0, jump=self.jump > 1,
            betas=len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            weight_decay=0 <= self.weight_decay < math.inf, dtype=self.dtype in ("float32", "bfloat16"),
        )  # fmt: skip


@dataclass(frozen=True)
class StepMetrics:
    """One optimiser step, over all ranks. seconds: since the training's start, earlier runs of it included."""

    step: int
    epoch: int
    lr: float
    loss: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    seconds: float
    figures: Figures


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. `stopped`: it was asked to, and saved; the same training resumes. validation: the last one."""

    steps: int
    epoch: int
    tokens: int
    seconds: float
    loss_first: float
    loss_last: float
    stopped: bool
    validation: Figures | None
    best_acceptance_length: float | None


@dataclass
class Progress:
    step: int = 0
    epoch: int = 0
    in_epoch: int = 0  # packed rows taken from this epoch
    tokens: int = 0
    seconds: float = 0.0
    loss_first: float = math.nan
    loss_last: float = math.nan
    running_loss: float = math.nan
    best: float | None = None

    def __post_init__(self) -> None:
        counts = (self.step, self.epoch, self.in_epoch, self.tokens)
        best = 0.0 if self.best is None else self.best
        figures = (self.seconds, self.loss_first, self.loss_last, self.running_loss, best)
        whole = all(isinstance(n, int) and n >= 0 for n in counts)
        if not (whole and all(isinstance(x, int | float) for x in figures)):
            raise TypeError(f"no progress: {self}")
