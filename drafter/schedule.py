"""Learning rate over the course of a training, as a plain function: nothing to save, nothing to get out of step."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from drafter.values import refuse_values

Kind = Literal["cosine", "linear", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """lr: the peak. warmup_steps: linear from zero. kind: `cosine` or `linear` fall from the peak to `final_share` of
    it; `wsd` stays at the peak and falls linearly over the last `decay_share` of the course."""

    lr: float = 1e-4
    kind: Kind = "cosine"
    warmup_steps: int = 100
    final_share: float = 0.0
    decay_share: float = 0.2

    def __post_init__(self) -> None:
        refuse_values(
            "train.schedule", self,
            lr=0 < self.lr < math.inf, kind=self.kind in get_args(Kind), warmup_steps=self.warmup_steps >= 0,
            final_share=0 <= self.final_share <= 1, decay_share=0 < self.decay_share <= 1,
        )  # fmt: skip

    def at(self, step: int, progress: float) -> float:
        """The rate of optimiser step `step` (from 0) when `progress` (0 to 1) of the course is behind it."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        progress = min(1.0, max(0.0, progress))
        if self.kind == "cosine":
            fall = 0.5 * (1 + math.cos(math.pi * progress))
        elif self.kind == "linear":
            fall = 1 - progress
        else:
            fall = min(1.0, (1 - progress) / self.decay_share)
        return self.lr * warm * (self.final_share + (1 - self.final_share) * fall)
