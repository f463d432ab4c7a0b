"""Two drafters side by side: where one is better, by how much, how sure that is, and what differs in their making."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from infra.client import acceptance_length
from tasks.differences import differences
from tasks.evaluation import Answer, Evaluation, answered_by_both, compare
from tasks.intervals import FEWEST, Paired, paired
from tasks.lineage import read_lineage

CURVES = ("train/loss", "held_out/loss")
POINTS = 400  # of a curve; more cannot be seen

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Side:
    """One of the two drafters.

    Attributes:
        lineage: `lineage.json` of its folder; empty where there is none.
        curves: its training in MLflow, metric -> (step, value); empty where MLflow does not know the run.
    """

    name: str
    evaluation: Evaluation
    lineage: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)

    @classmethod
    def of(cls, evaluation: Evaluation, folder: Path, client: MlflowClient) -> "Side":
        """An evaluation, with what the drafter's folder and MLflow say of its making."""
        lineage = read_lineage(folder)
        return cls(evaluation.name, evaluation, lineage, training_curves(client, lineage.get("mlflow_run_id")))


def training_curves(client: MlflowClient, run_id: str | None) -> dict[str, Curve]:
    """Losses of the training below a pipeline run, thinned by averaging; empty where MLflow does not know the run."""
    try:
        run = client.get_run(run_id if isinstance(run_id, str) else "")
    except MlflowException:  # another MLflow's run: a comparison has use without its curves
        return {}
    below = f"tags.mlflow.parentRunId = '{run.info.run_id}' and tags.`eyas.stage` = 'training'"
    children = client.search_runs([run.info.experiment_id], below, max_results=1)
    found = {}
    for child in children:
        for name in CURVES:
            history = client.get_metric_history(child.info.run_id, name)
            points = sorted((metric.step, metric.value) for metric in history)
            found[name] = _thinned(points)
    return {name: curve for name, curve in found.items() if curve}


def _thinned(points: Curve) -> Curve:
    size = -(-len(points) // POINTS) or 1
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(chunk[-1][0], sum(value for _, value in chunk) / len(chunk)) for chunk in chunks]


def compare_sides(one: Side, other: Side, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything there is to say, as plain JSON types.

    Args:
        only: names of prompt sets; left out = all that both were served.

    Returns:
        `names`, `settings`, `overall` (all greedy sets together, or None), `sets` and `domains` (by name, see `_row`),
        `too_few` (set -> common prompts), `notes`, `figures` (per drafter, per set), `differs` (`data`, `recipe`,
        `code`), `curves` (per drafter), `prediction` (per drafter).

    Raises:
        DatasetError: served under other settings, no such set, or too few prompts in common in every set.
    """
    result = compare(one.evaluation, other.evaluation, only)
    sets: dict[str, dict[str, Any]] = {}
    domains: dict[str, list[tuple[Answer, Answer]]] = {}
    for key, found in result.sets.items():
        ours, theirs = one.evaluation.sets[key], other.evaluation.sets[key]
        pairs = answered_by_both(ours, theirs)
        sets[key] = _row(found, pairs) | {
            "domain": ours.domain, "version": ours.version, "greedy": ours.greedy,
            "speed_up": [round(ours.speed_up, 3), round(theirs.speed_up, 3)],
        }  # fmt: skip
        if ours.greedy:
            domains.setdefault(ours.domain, []).extend(pairs)
    return {
        "names": [one.name, other.name],
        "settings": one.evaluation.settings,
        "overall": None if result.overall is None else _in_figures(result.overall),
        "sets": sets,
        "domains": {name: _row(_paired(pairs), pairs) for name, pairs in domains.items()},
        "too_few": result.too_few,
        "notes": result.notes,
        "figures": [{key: r.figures() for key, r in side.evaluation.sets.items()} for side in (one, other)],
        "differs": differences(one.lineage, other.lineage),
        "curves": [side.curves for side in (one, other)],
        "prediction": [side.evaluation.prediction for side in (one, other)],
    }


def _row(found: Paired, pairs: list[tuple[Answer, Answer]]) -> dict[str, Any]:
    """A set's figures: `Paired`, its verdict, `positions` with intervals, and every prompt."""
    return _in_figures(found) | {
        "positions": _positions(pairs),
        "each": [
            {"prompt": a.prompt[:16], "source": a.source, "one": _length(a), "other": _length(b)} for a, b in pairs
        ],
    }


def _in_figures(found: Paired) -> dict[str, Any]:
    figures = {key: _rounded(value) if isinstance(value, float) else value for key, value in asdict(found).items()}
    figures["by_position"] = [round(value, 4) for value in found.by_position]
    return {**figures, "verdict": verdict(found.low, found.high)}


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None  # an interval that cannot be had; JSON knows no NaN


def verdict(low: float, high: float) -> str:
    """Of a difference, by its interval: `better`, `worse` or `not told apart`."""
    return "better" if low > 0 else "worse" if high < 0 else "not told apart"


def _positions(pairs: list[tuple[Answer, Answer]]) -> list[dict[str, Any]]:
    """Share of verifications that accept at least 1, 2, ... drafted tokens, of both, and the difference's interval."""
    longest = max(len(answer.histogram) for pair in pairs for answer in pair)
    found = []
    for position in range(1, longest):
        # one bit a verification: accepted so far or not; its ratio of sums is the share
        bits = [[_split(answer.histogram, position) for answer in side] for side in zip(*pairs, strict=True)]
        result = paired(bits[0], bits[1])
        found.append({
            "position": position, "one": _rounded(result.one - 1), "other": _rounded(result.other - 1),
            "difference": _rounded(result.difference), "low": _rounded(result.low), "high": _rounded(result.high),
        })  # fmt: skip
    return found


def _split(histogram: list[int], position: int) -> list[int]:
    return [sum(histogram[:position]), sum(histogram[position:])]


def _paired(pairs: list[tuple[Answer, Answer]]) -> Paired:
    assert len(pairs) >= FEWEST  # every set in it is
    return paired([a.histogram for a, _ in pairs], [b.histogram for _, b in pairs])


def _length(answer: Answer) -> float:
    return round(acceptance_length(answer.histogram), 4)
