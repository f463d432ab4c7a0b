"""Comparing drafters, and the champion that is earned."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient

from hidden_states.errors import DatasetError
from tasks.champion import Champions, reasons_against
from tasks.evaluation import FILE, Evaluation, compare
from tasks.intervals import FEWEST, paired

HISTOGRAM = st.lists(st.integers(0, 30), min_size=1, max_size=4)
SETS = st.integers(FEWEST, 20).flatmap(
    lambda n: st.tuples(st.lists(HISTOGRAM, min_size=n, max_size=n), st.lists(HISTOGRAM, min_size=n, max_size=n))
)


@settings(max_examples=40, deadline=None)
@given(SETS)
def test_a_comparison_is_a_ratio_of_sums_and_turns_round_with_its_sides(sets: Any) -> None:
    one, other = sets
    found, turned = paired(one, other), paired(other, one)
    assert found.difference == pytest.approx(-turned.difference)
    assert (found.better, found.worse) == (turned.worse, turned.better)
    accepted = sum(i * times for histogram in one for i, times in enumerate(histogram))
    assert found.one == pytest.approx(1 + accepted / sum(max(1, sum(h)) for h in one))
    assert math.isnan(found.low) or found.low <= found.high


def test_equal_drafters_have_an_interval_of_nothing() -> None:
    same = [[3, 2, n] for n in range(FEWEST)]
    found = paired(same, same)
    assert (found.difference, found.low, found.high, found.better, found.worse) == (0, 0, 0, 0, 0)


def test_a_clear_lead_is_seen_and_a_lead_on_one_prompt_is_not() -> None:
    base = [[10 + n % 3, 5, 2, 1] for n in range(24)]
    ahead = [[8 + n % 3, 5, 3, 2] for n in range(24)]
    assert paired(ahead, base).low > 0
    lucky = [*base[:-1], [0, 0, 0, 60]]
    assert paired(lucky, base).low <= 0.02


@pytest.mark.parametrize("count", [0, 1, FEWEST - 1])
def test_too_few_prompts_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        paired([[1, 1]] * count, [[1, 1]] * count)


def evaluation(folder: Path, name: str, digests: list[str], **settings: Any) -> Evaluation:
    folder.mkdir(exist_ok=True)
    content = {
        "settings": {"target": "t", "num_steps": 3, **settings}, "tokens_per_s": 10.0, "outputs_equal": len(digests),
        "histograms": {digest: [4, 3, len(name)] for digest in digests},
    }  # fmt: skip
    (folder / FILE).write_text(json.dumps(content))
    return Evaluation.read(folder, name)


def test_drafters_are_compared_on_the_prompts_they_share(tmp_path: Path) -> None:
    one = evaluation(tmp_path / "a", "a", [f"p{n}" for n in range(12)])
    other = evaluation(tmp_path / "b", "bb", [f"p{n}" for n in range(2, 20)])
    assert compare(one, other).prompts == 10
    with pytest.raises(DatasetError, match="2 prompts in common"):
        compare(one, evaluation(tmp_path / "c", "c", ["p0", "p1", "q"]))


@pytest.mark.parametrize("setting", [{"num_steps": 5}, {"target": "another"}])
def test_drafters_served_differently_are_not_compared(tmp_path: Path, setting: dict[str, Any]) -> None:
    digests = [f"p{n}" for n in range(FEWEST)]
    with pytest.raises(DatasetError, match=next(iter(setting))):
        compare(evaluation(tmp_path / "a", "a", digests), evaluation(tmp_path / "b", "b", digests, **setting))


GOOD: dict[str, Any] = {
    "served_acceptance_length": 1.8, "served_prompts": 12, "served_outputs_equal": 12, "control_acceptance_length": 1.0,
    "manifest_digest": "m", "fingerprint": "f", "dataset_uri": "u",
}  # fmt: skip
LEAD = {"low": 0.05, "high": 0.2, "difference": 0.1}


def against(
    figures: dict[str, Any], *, promote: bool = True, margin: float = 0.0, least: float | None = 1.5
) -> list[str]:
    recipe = SimpleNamespace(
        register_=SimpleNamespace(promote=promote, margin=margin), evaluate=SimpleNamespace(min_acceptance_length=least)
    )
    return reasons_against(SimpleNamespace(recipe=recipe, figures=figures))  # type: ignore[arg-type]


def test_the_first_good_drafter_and_a_better_one_become_champion() -> None:
    assert against(GOOD) == []
    assert against({**GOOD, "champion_version": "1", "versus_champion": LEAD}) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"served_outputs_equal": 11}, "1 of 12 outputs differ"),
        ({"served_acceptance_length": 1.4}, "below evaluate.min_acceptance_length"),
        ({"served_acceptance_length": 1.6, "control_acceptance_length": 1.7}, "no better than an untrained"),
        ({"fingerprint": None}, "lineage lacks fingerprint"),
        ({"champion_version": "1"}, "too few to compare"),
        ({"champion_version": "1", "champion_not_served": "died"}, "could not be served beside it"),
        ({"champion_version": "1", "versus_champion": {**LEAD, "low": -0.01}}, "does not lie above 0"),
        ({"champion_version": "1", "versus_champion": {**LEAD, "low": float("nan")}}, "does not lie above 0"),
    ],
)
def test_a_drafter_is_not_promoted_without_every_condition(change: dict[str, Any], says: str) -> None:
    (reason,) = against({**GOOD, **change})
    assert says in reason


def test_margin_and_switch_are_the_recipes() -> None:
    lead = {**GOOD, "champion_version": "1", "versus_champion": LEAD}
    assert "does not lie above 0.06" in against(lead, margin=0.06)[0]
    assert against(GOOD, promote=False) == ["register.promote is false"]
    assert against({}) == ["it was not served"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowClient]:
    folder = tmp_path_factory.mktemp("mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment("e", artifact_location=(folder / "artifacts").as_uri())
    run = client.create_run(experiment)
    client.create_registered_model("drafter")
    for version in "123":
        (folder / "made").mkdir(exist_ok=True)
        (folder / "made" / "config.json").write_text(version)
        client.log_artifacts(run.info.run_id, str(folder / "made"), f"drafter-{version}")
        client.create_model_version("drafter", f"runs:/{run.info.run_id}/drafter-{version}", run_id=run.info.run_id)
    yield client


def test_a_champion_moves_goes_back_and_remembers_why(client: MlflowClient, tmp_path: Path) -> None:
    known = Champions(client, "drafter")
    assert known.version is None and known.history() == []
    with pytest.raises(DatasetError, match="no champion before"):
        known.back("")
    known.move("1", "run-1", "the first one")
    known.move("3", "run-3", "better")
    assert known.version == "3"
    assert known.back("slow in production") == "1"
    assert known.version == "1"
    assert [(move.version, move.by) for move in known.history()] == [("1", "run-1"), ("3", "run-3"), ("1", "hand")]
    assert (known.download("3", tmp_path) / "config.json").read_text() == "3"
    for wrong in ("7", "x"):
        with pytest.raises(DatasetError, match="no such version"):
            known.move(wrong, "hand", "")
    assert known.version == "1"


def test_a_model_that_is_not_registered_has_no_champion_and_is_named(client: MlflowClient) -> None:
    assert Champions(client, "nobody").version is None
    with pytest.raises(DatasetError, match="no registered model"):
        Champions(client, "nobody").history()
