"""What a champion was measured with: when that has changed its figures are stale, and both measurements are kept."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient

from hidden_states.errors import DatasetError, ServerError, TrainingError
from infra.recipe_file import load_recipe
from tasks import events, stale
from tasks.candidate import find_drafter
from tasks.champion import Champions
from tasks.engine import ENVIRONMENT, SHOWN, engine_settings, refuse_other_server
from tasks.evaluation import FILE, GREEDY, Answer, Evaluation, SetRecord
from tasks.stale import keep_measurement, staleness
from tests.flows.runs import tiny_recipe

INFO = {"version": "0.5.23", "dtype": "float32", "quantization": None, "kv_cache_dtype": "auto"}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return engine_settings(load_recipe(str(tiny_recipe(tmp_path))), INFO)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Events sent to Prefect; log lines go nowhere."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(stale, "get_run_logger", lambda: SimpleNamespace(warning=lambda *a: None))
    context = SimpleNamespace(flow_run=SimpleNamespace(id="1234"))
    monkeypatch.setattr(events, "FlowRunContext", SimpleNamespace(get=lambda: context))
    monkeypatch.setattr(events, "emit_event", lambda **event: sent.append(event))
    return sent


def measured(settings: dict[str, Any], histogram: list[int]) -> Evaluation:
    answers = [Answer("p", "s", 3, histogram, 10, 1.0, 10, 2.0)]
    record = SetRecord("held-out", "v1", "d", "held-out", GREEDY, 0, answers)
    return Evaluation.of("champion", settings, [record])


def job_with(settings: dict[str, Any], **more: Any) -> Any:
    return SimpleNamespace(plain=SimpleNamespace(settings=settings), run_id="run-2", **more)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_change_of_target_template_or_engine_makes_an_evaluation_stale(
    tmp_path: Path, settings: dict[str, Any], heard: list[dict[str, Any]], name: str
) -> None:
    assert name in settings
    measured({**settings, name: "then"}, [3, 2]).write(tmp_path)
    (change,) = staleness(job_with(settings), tmp_path, "drafter", "4")
    assert change == f"{name}: then / {str(settings[name])[:SHOWN]}"
    (event,) = heard
    assert event["event"] == "eyas.evaluation.stale"
    assert event["payload"] == {"version": "4", "changed": [change], "run": "run-2"}
    assert event["resource"]["prefect.resource.id"] == "eyas.model.drafter"


def test_what_the_recipe_chooses_makes_nothing_stale(
    tmp_path: Path, settings: dict[str, Any], heard: list[dict[str, Any]]
) -> None:
    measured({**settings, "num_steps": 5, "max_new_tokens": 9}, [3, 2]).write(tmp_path)
    assert staleness(job_with(settings), tmp_path, "drafter", "4") == [] == heard


def test_an_evaluation_that_cannot_be_read_is_stale(
    tmp_path: Path, settings: dict[str, Any], heard: list[dict[str, Any]]
) -> None:
    (tmp_path / FILE).write_text('{"histograms": {}}')
    assert "before there were prompt sets" in staleness(job_with(settings), tmp_path, "drafter", "4")[0]
    assert len(heard) == 1


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowClient]:
    folder = tmp_path_factory.mktemp("mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    client.create_experiment("e", artifact_location=(folder / "artifacts").as_uri())
    yield client


def test_a_new_measurement_takes_the_place_of_the_old_one_and_both_stay_on_record(
    tmp_path: Path, settings: dict[str, Any], client: MlflowClient
) -> None:
    experiment = client.get_experiment_by_name("e").experiment_id
    run, later = (client.create_run(experiment).info.run_id for _ in range(2))
    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text("{}")
    measured({**settings, "weights": "then"}, [3, 2]).write(made)
    client.log_artifacts(run, str(made), "drafter")
    client.create_registered_model("drafter")
    tags = {"eyas.run": "run-1", "served/held-out/acceptance_length": "1.4"}
    client.create_model_version("drafter", f"runs:/{run}/drafter", run_id=run, tags=tags)
    known = Champions(client, "drafter")

    def folder(path: Path, name: str) -> None:
        client.log_artifacts(later, str(path), name)

    job = job_with(settings, folder=tmp_path, tracker=SimpleNamespace(run_id=later, folder=folder))
    new = measured(settings, [1, 4])
    new.prediction["cause"] = "rope"
    keep_measurement(job, known, "1", new, ["weights: then / now"])

    kept = client.get_model_version("drafter", "1").tags
    assert kept["evaluation.stale"] == "weights: then / now" and kept["evaluation.run"] == "run-2"
    assert kept["served/held-out/acceptance_length"] == "1.8" and kept["prediction.cause"] == "rope"
    assert json.loads(kept["evaluation.history"]) == [{"run": "run-1", "served": {"held-out": 1.4}}]
    downloaded = known.download("1", tmp_path / "again")
    assert (downloaded / "config.json").is_file()
    assert Evaluation.read(downloaded, "again").sets == new.sets
    keep_measurement(job, known, "1", new, [])
    kept = client.get_model_version("drafter", "1").tags
    assert kept["evaluation.stale"] == "no" and len(json.loads(kept["evaluation.history"])) == 2


def test_without_a_run_there_is_nobody_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(events, "emit_event", lambda **event: pytest.fail("sent"))
    events.emit(events.CHAMPION_MOVED, "model/drafter", version="1")


SERVED = {
    "model_path": "/elsewhere/tiny-deepseek-v3", "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3,
    "speculative_draft_model_path": "/not/on/this/machine",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "plain", "says"),
    [
        ({}, False, None),
        ({"speculative_algorithm": None}, True, None),
        ({"model_path": "/m/another"}, False, "model: another, not tiny-deepseek-v3"),
        ({"speculative_algorithm": None}, False, "speculation: NONE, not EAGLE3"),
        ({}, True, "speculation: EAGLE3, not NONE"),
        ({"speculative_num_steps": 5}, False, "drafted tokens: 5, not 3"),
        ({"speculative_draft_model_path": "other"}, False, "drafter: "),
    ],
)
def test_a_server_that_runs_already_must_be_the_one_that_is_meant(
    tmp_path: Path, change: dict[str, Any], plain: bool, says: str | None
) -> None:
    recipe = load_recipe(str(tiny_recipe(tmp_path)))
    for name in ("drafter", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"of": name}))
    info = SERVED | change
    if info["speculative_draft_model_path"] == "other":
        info["speculative_draft_model_path"] = str(tmp_path / "other")
    drafter = None if plain else tmp_path / "drafter"
    if says is None:
        refuse_other_server(recipe, "http://h:1", info, drafter)
    else:
        with pytest.raises(ServerError, match=says):
            refuse_other_server(recipe, "http://h:1", info, drafter)


NO_DRAFTERS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "a target": ({"architectures": ["DeepseekV3ForCausalLM"]}, r"architectures is \['DeepseekV3ForCausalLM'\]"),
    "no architecture": ({"hidden_size": 8}, "architectures is None"), "a word": ({"architectures": "x"}, "is x"),
    "empty": (None, r"config\.json: no such file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_DRAFTERS)
def test_a_folder_that_is_no_drafter_is_refused_before_a_server_starts(tmp_path: Path, kind: str) -> None:
    config, says = NO_DRAFTERS[kind]
    (tmp_path / "given").mkdir()
    if config is not None:
        (tmp_path / "given" / "config.json").write_text(json.dumps(config))
    job: Any = SimpleNamespace(folder=tmp_path, clock=lambda name: contextlib.nullcontext())
    with pytest.raises((DatasetError, TrainingError), match=says):
        find_drafter.fn(job, str(tmp_path / "given"))
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("name", ["", "nothing", "/nowhere", "@", "/", "a\0b", "x" * 5000])
def test_a_name_that_is_no_drafters_is_refused(tmp_path: Path, name: str) -> None:
    job: Any = SimpleNamespace(folder=tmp_path, clock=lambda name: contextlib.nullcontext())
    with pytest.raises((DatasetError, TrainingError), match=r"neither a folder nor|no such file"):
        find_drafter.fn(job, name)
