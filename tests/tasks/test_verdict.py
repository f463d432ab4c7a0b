"""Comparing drafters, and the champion that is earned."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient

from hidden_states.errors import DatasetError
from tasks import champion
from tasks.champion import Champions, reasons_against
from tasks.evaluation import FILE, GREEDY, Answer, Evaluation, SetRecord, compare
from tasks.intervals import FEWEST, paired
from tasks.serving import first_difference

HISTOGRAM = st.lists(st.integers(0, 30), min_size=1, max_size=4)
SETS = st.integers(FEWEST, 20).flatmap(
    lambda n: st.tuples(st.lists(HISTOGRAM, min_size=n, max_size=n), st.lists(HISTOGRAM, min_size=n, max_size=n))
)


@settings(max_examples=40)
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


def record(name: str, prompts: range, histogram: list[int], sampling: dict[str, Any] = GREEDY) -> SetRecord:
    """A set as somebody served it: 10 tokens in 2 s with the drafter, in 3 s without."""
    answers = [Answer(f"{name}{n}", f"{name}:{n}", 5, histogram, 10, 2.0, 10, 3.0) for n in prompts]
    return SetRecord(name, "1", "d" * 64, name, sampling, 0, answers)


def evaluation(folder: Path, name: str, *records: SetRecord, **settings: Any) -> Evaluation:
    """Written, and read again."""
    folder.mkdir(exist_ok=True)
    Evaluation.of(name, {"target": "t", "num_steps": 3, **settings}, records).write(folder)
    return Evaluation.read(folder, name)


def test_an_evaluation_keeps_every_prompt_of_every_set(tmp_path: Path) -> None:
    sampled = record("code", range(3), [2, 0, 4], {"temperature": 0.7, "top_p": 0.9, "top_k": -1})
    made = evaluation(
        tmp_path / "a", "a", record("held-out", range(9), [4, 3, 1]), record("code", range(4), [2, 2]), sampled
    )
    assert list(made.sets) == ["held-out", "code", "code/production"]
    assert made.sets["code/production"] == sampled
    assert made.sets["held-out"].figures() == {
        "acceptance_length": 1.625, "by_position": [0.5, 0.125], "prompts": 9, "tokens": 90, "tokens_per_s": 5.0,
        "plain_tokens_per_s": 3.33, "speed_up": 1.5, "outputs_equal": 9,
    }  # fmt: skip
    assert "outputs_equal" not in sampled.figures()


def test_a_difference_from_plain_decoding_names_set_prompt_and_position(tmp_path: Path) -> None:
    differing = record("code", range(4), [2, 2])
    differing.answers[2] = dataclasses.replace(differing.answers[2], differs_at=7)
    made = evaluation(tmp_path / "a", "a", record("held-out", range(9), [4, 3]), differing)
    assert made.sets["code"].outputs_equal == 3
    (line,) = made.differences
    assert "set code, prompt code:2" in line and "output position 7" in line
    assert [first_difference(*pair) for pair in (([1, 2], [1, 2]), ([1, 2], [1, 3]), ([1], [1, 2]))] == [None, 1, 1]


def test_drafters_are_compared_set_by_set_on_the_prompts_they_share(tmp_path: Path) -> None:
    one = evaluation(
        tmp_path / "a", "a", record("held-out", range(12), [4, 3, 1]), record("chat", range(9), [4, 4]),
        record("code", range(3), [1, 1]),
    )  # fmt: skip
    other = evaluation(
        tmp_path / "b", "b", record("held-out", range(2, 20), [4, 3, 2]), record("chat", range(9), [4, 3]),
        record("code", range(3), [1, 2]),
    )  # fmt: skip
    found = compare(one, other)
    assert {key: result.prompts for key, result in found.sets.items()} == {"held-out": 10, "chat": 9}
    assert found.too_few == {"code": 3}
    assert found.overall is not None and found.overall.prompts == 22
    assert found.sets["held-out"].difference < 0 < found.sets["chat"].difference
    assert list(compare(one, other, ["chat"]).sets) == ["chat"]
    with pytest.raises(DatasetError, match="no set maths in both"):
        compare(one, other, ["maths"])
    with pytest.raises(DatasetError, match=r"no set chat in both\.$"):
        compare(one, evaluation(tmp_path / "d", "d", record("else", range(9), [1])), ["chat"])
    with pytest.raises(DatasetError, match="2 prompts in common"):
        compare(one, evaluation(tmp_path / "c", "c", record("held-out", range(10, 30), [1])))


def test_a_set_whose_content_changed_is_named_and_one_sampled_otherwise_is_left_out(tmp_path: Path) -> None:
    hot, cold = ({"temperature": t, "top_p": 1.0, "top_k": -1} for t in (1.0, 0.5))
    one = evaluation(tmp_path / "a", "a", record("chat", range(9), [4, 4]), record("code", range(9), [4, 4], hot))
    changed = dataclasses.replace(record("chat", range(9), [4, 4]), digest="e" * 64)
    other = evaluation(tmp_path / "b", "b", changed, record("code", range(9), [4, 4], cold))
    found = compare(one, other)
    assert list(found.sets) == ["chat"]
    assert [note.split(" was")[0].split(" has")[0] for note in found.notes] == ["set chat", "set code/production"]


@pytest.mark.parametrize("setting", [{"num_steps": 5}, {"target": "another"}, {"template": "sha"}])
def test_drafters_served_differently_are_not_compared(tmp_path: Path, setting: dict[str, Any]) -> None:
    answered = record("held-out", range(FEWEST), [4, 3])
    with pytest.raises(DatasetError, match=next(iter(setting))):
        compare(evaluation(tmp_path / "a", "a", answered), evaluation(tmp_path / "b", "b", answered, **setting))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"settings": {}, "histograms": {"p": [1]}, "tokens_per_s": 1}', "before there were prompt sets"),
        ('{"format": "eyas-evaluation/9"}', "format eyas-evaluation/9"),
        ('{"format": "eyas-evaluation/2", "settings": {}, "sets": [{"name": "x"}]}', "unusable"),
        ("[]", "unusable"), ("no json", "unusable"), (None, "no evaluation.json"),
    ],
)  # fmt: skip
def test_an_evaluation_that_cannot_be_used_is_refused_with_what_to_do(
    tmp_path: Path, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(DatasetError, match=says):
        Evaluation.read(tmp_path, "model/3")


WRONG: dict[str, dict[str, list[Any]]] = {
    "": {"settings": [None, [1], "x"], "prediction": [[1], "x"], "sets": [None, 3, [3]]},
    "set": {"name": [None, 3], "domain": [None, [1]], "digest": [None], "sampling": [None, "x"], "answers": [None, []]},
    "answer": {
        "histogram": [None, "12", ["a"], [[1]], [1.5], [-1, 3], [math.nan], [math.inf], [10**30], {"0": 1}],
        "prompt": [None, 3, [3]], "tokens": [None, "x", -1], "differs_at": ["x", -1],
        "latency_s": [None, "x", -1.0, math.nan, math.inf], "plain_latency_s": [math.nan],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [(place, key, value) for place, keys in WRONG.items() for key, values in keys.items() for value in values],
)
def test_an_evaluation_with_a_value_of_another_kind_is_refused(
    tmp_path: Path, place: str, key: str, value: Any
) -> None:
    evaluation(tmp_path, "a", record("held-out", range(FEWEST), [4, 3]))
    content = json.loads((tmp_path / FILE).read_text())
    entry = content if not place else content["sets"][0] if place == "set" else content["sets"][0]["answers"][0]
    entry[key] = value
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=r"unusable .*eyas evaluate RECIPE --drafter model/3"):
        Evaluation.read(tmp_path, "model/3")


EQUAL = {"prompts": 12, "outputs_equal": 12}
GOOD: dict[str, Any] = {
    "served_acceptance_length": 1.8, "control_acceptance_length": 1.0,
    "served_sets": {"held-out": EQUAL, "code": EQUAL, "code/production": {"prompts": 12}},
    "manifest_digest": "m", "fingerprint": "f", "dataset_uri": "u",
}  # fmt: skip
LEAD = {"low": 0.05, "high": 0.2, "difference": 0.1}
EVEN = {"low": -0.01, "high": 0.2, "difference": 0.1}
UNKNOWN = {"low": float("nan"), "high": float("nan"), "difference": 0.1}
LEADING: dict[str, Any] = {
    **GOOD, "champion_version": "1", "versus_champion_sets": {"held-out": LEAD, "code": LEAD},
}  # fmt: skip


def against(
    figures: dict[str, Any], *, promote: bool = True, margin: float = 0.0, least: float | None = 1.5,
    required: list[str] | None = None,
) -> list[str]:  # fmt: skip
    recipe = SimpleNamespace(
        register_=SimpleNamespace(promote=promote, margin=margin),
        evaluate=SimpleNamespace(min_acceptance_length=least, required=required),
    )
    return reasons_against(SimpleNamespace(recipe=recipe, figures=figures))  # type: ignore[arg-type]


def test_the_first_good_drafter_and_a_better_one_become_champion() -> None:
    assert against(GOOD) == []
    assert against(LEADING) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"served_sets": {"held-out": EQUAL, "code": {"prompts": 12, "outputs_equal": 11}}},
            "code: 1 of 12 outputs dif",
        ),
        ({"served_acceptance_length": 1.4}, "below evaluate.min_acceptance_length"),
        ({"served_acceptance_length": 1.6, "control_acceptance_length": 1.7}, "no better than before training"),
        ({"fingerprint": None}, "lineage lacks fingerprint"),
        ({"champion_not_served": "died"}, "could not be served beside it"),
        ({"versus_champion_sets": {"held-out": LEAD}}, "set code: 12 prompts are too few to compare"),
        ({"versus_champion_sets": {"held-out": LEAD, "code": EVEN}}, "set code: .* does not lie above 0"),
        ({"versus_champion_sets": {"held-out": UNKNOWN, "code": LEAD}}, "set held-out: .* does not lie above 0"),
    ],
)
def test_a_drafter_is_not_promoted_without_every_condition(change: dict[str, Any], says: str) -> None:
    (reason,) = against({**LEADING, **change})
    assert re.search(says, reason)


def test_margin_and_switch_are_the_recipes() -> None:
    assert ["does not lie above 0.06" in reason for reason in against(LEADING, margin=0.06)] == [True, True]
    behind = {**LEADING, "versus_champion_sets": {"held-out": LEAD, "code": EVEN}}
    assert against(behind, required=["held-out"]) == []
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


def test_a_champion_moves_goes_back_and_remembers_why(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[Any, ...]] = []
    monkeypatch.setattr(champion, "emit", lambda *event, **payload: heard.append((*event, payload["version"])))
    known = Champions(client, "drafter")
    assert known.version is None and known.history() == []
    with pytest.raises(DatasetError, match="no champion before"):
        known.back("")
    known.move("1", "run-1", "the first one")
    known.move("3", "run-3", "better")
    assert known.version == "3"
    assert known.back("slow in production") == "1"
    assert known.version == "1"
    assert heard == [("eyas.champion.moved", "model/drafter", version) for version in "131"]
    assert [(move.version, move.by) for move in known.history()] == [("1", "run-1"), ("3", "run-3"), ("1", "hand")]
    assert (known.download("3", tmp_path) / "config.json").read_text() == "3"
    known.move(" 1 ", "hand", "")
    assert known.history()[-1].version == "1" and known.back("") == "3" and known.back("") == "1"
    for wrong in ("7", "x", ""):
        with pytest.raises(DatasetError, match="no such version"):
            known.move(wrong, "hand", "")
    assert known.version == "1"


def test_a_model_that_is_not_registered_has_no_champion_and_is_named(client: MlflowClient) -> None:
    assert Champions(client, "nobody").version is None
    with pytest.raises(DatasetError, match="no registered model"):
        Champions(client, "nobody").history()
