"""Plain figures of each captured tensor, and whether they are in line with those of the same run so far.

Cheap enough for every batch, and the only judge that needs nothing of the model: a server that goes wrong half-way (a
worker lost, another model behind the same address) shows here first.
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from hidden_states.dump import Dump
from hidden_states.errors import GateError

_ENOUGH = 8  # dumps before a history judges
_NORM_FACTOR = 2.0
_LARGEST_FACTOR = 8.0
_ZEROS = 0.05


@dataclass(frozen=True)
class TensorFigures:
    """Of one tensor: median over rows of the row's norm, share of exact zeros, largest absolute value."""

    norm: float
    zeros: float
    largest: float


def figures(dump: Dump) -> dict[str, TensorFigures]:
    """The figures of each state of a dump, by tensor name."""
    made = {}
    for name in list(dump.states.tensors)[1:]:
        rows = dump.tensor(name).float()
        norms = torch.linalg.vector_norm(rows, dim=-1)
        made[name] = TensorFigures(
            norm=float(norms.median()), zeros=float((rows == 0).float().mean()), largest=float(rows.abs().max())
        )
    return made


@dataclass
class History:
    """The figures of the last dumps of a run, at most `length` of them."""

    length: int = 256
    _seen: dict[str, deque[TensorFigures]] = field(default_factory=dict)

    def check(self, dump: Dump) -> dict[str, TensorFigures]:
        """Compare a dump with the run's own medians, then add it to them.

        Raises:
            GateError: a figure is out of line: the median row norm by a factor of 2, the largest value by 8, or 5% more
                zeros than usual. Judged from the ninth dump on; a dump that fails is not added.
        """
        found = figures(dump)
        for name, now in found.items():
            before = self._seen.get(name, deque())
            if len(before) < _ENOUGH:
                continue
            usual = TensorFigures(*(_median([getattr(f, key) for f in before]) for key in ("norm", "zeros", "largest")))
            for words, value, normal, out in (
                ("median row norm", now.norm, usual.norm, _factor(now.norm, usual.norm) > _NORM_FACTOR),
                ("largest value", now.largest, usual.largest, _factor(now.largest, usual.largest) > _LARGEST_FACTOR),
                ("share of zeros", now.zeros, usual.zeros, now.zeros > usual.zeros + _ZEROS),
            ):
                if out:
                    raise GateError(
                        str(dump.ref),
                        f"the {words} of {name} is {value:.3g}",
                        f"about {normal:.3g}, as in the {len(before)} dumps before",
                        "Did the server change in mid-run? The dump is kept as evidence.",
                    )
        for name, now in found.items():
            self._seen.setdefault(name, deque(maxlen=self.length)).append(now)
        return found


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _factor(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return high / low if low > 0 else float("inf") if high > 0 else 1.0
