"""Do the intervals of a comparison cover the truth as often as they say? Run: .venv/bin/python -m benchmarks.intervals

Simulated pairs of drafters whose true difference is known: every prompt has its own difficulty, shared by both, and a
length of its own; each drafted token is accepted by chance. Per simulation a set of prompts is drawn, `tasks.intervals`
compares the two, and the 95% interval covers the true difference or not. Prints one JSON object: `simulations`,
`coverage`, and per setting the same; `mean_width`; and how often a drafter that is no better would have been promoted
(the interval's lower end above 0; 2.5% is what a 95% interval allows).
"""

import argparse
import json

import numpy as np

from tasks.intervals import paired

STEPS = 3  # drafted tokens a verification
TRUTH_PROMPTS = 400_000


class Pair:
    """Two drafters: the chance that a drafted token is accepted, per prompt; the second leads by `gain` in log-odds."""

    def __init__(self, gain: float, spread: float) -> None:
        self.gain, self.spread = gain, spread

    def draw(self, prompts: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Acceptance chances of both, and verifications, per prompt."""
        base = rng.normal(0.0, self.spread, prompts)
        own = rng.normal(0.0, self.spread / 3, (2, prompts))  # what each finds hard by itself
        verifications = rng.integers(8, 60, prompts)
        return _odds(base + own[0]), _odds(base + self.gain + own[1]), verifications

    def truth(self, rng: np.random.Generator) -> float:
        """The difference over all prompts there are: expected accepted tokens over verifications, each."""
        one, other, verifications = self.draw(TRUTH_PROMPTS, rng)
        return float(((_expected(other) - _expected(one)) * verifications).sum() / verifications.sum())


def _odds(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _expected(chance: np.ndarray) -> np.ndarray:
    """Expected accepted tokens of a verification: the first refusal ends it."""
    return sum(chance**k for k in range(1, STEPS + 1))  # type: ignore[return-value]


def histograms(chances: np.ndarray, verifications: np.ndarray, rng: np.random.Generator) -> list[list[int]]:
    """Verifications by accepted tokens, per prompt, as a server would report them."""
    made = []
    for chance, times in zip(chances, verifications, strict=True):
        accepted = np.cumprod(rng.random((times, STEPS)) < chance, axis=1).sum(axis=1)
        made.append(np.bincount(accepted, minlength=STEPS + 1).tolist())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=400, help="of each setting")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    settings = [(prompts, gain) for prompts in (24, 64, 128) for gain in (0.0, 0.2)]
    covered = promoted = equal = 0
    width = 0.0
    by_setting = {}
    for prompts, gain in settings:
        pair = Pair(gain, spread=0.8)
        truth = pair.truth(rng)
        hits = 0
        for number in range(options.simulations):
            one, other, verifications = pair.draw(prompts, rng)
            found = paired(
                histograms(other, verifications, rng), histograms(one, verifications, rng), seed=number
            )  # fmt: skip
            hits += found.low <= truth <= found.high
            width += found.high - found.low
            if gain == 0:
                equal += 1
                promoted += found.low > 0
        covered += hits
        by_setting[f"{prompts} prompts, difference {truth:.3f}"] = round(hits / options.simulations, 4)
    total = len(settings) * options.simulations
    print(json.dumps({
        "simulations": total, "coverage": round(covered / total, 4), "by_setting": by_setting,
        "mean_width": round(width / total, 4), "promoted_without_reason": round(promoted / equal, 4),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
