"""What the verdict keeps in MLflow is the same on SQLite and on PostgreSQL with artifacts in S3."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.compare import compare_drafters
from infra.package_stack import package_stack, postgres_programs
from tasks.abandoned import PROCESS, end_all_abandoned, this_process
from tasks.champion import HISTORY, LONGEST_TAG, Champions
from tasks.lineage import drafters_of
from tasks.tracking import ENDED, Tracker
from tests.tasks.registered import DOMAINS, MODEL, registered

POSTGRESQL = pytest.param(
    "PostgreSQL",
    marks=[pytest.mark.slow, pytest.mark.skipif(postgres_programs() is None, reason="PostgreSQL is not installed")],
)


@pytest.fixture(scope="module", params=["SQLite", POSTGRESQL])
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "SQLite":
        yield f"sqlite:///{tmp_path_factory.mktemp('sqlite')}/mlflow.db"
        return
    with package_stack(pages=["mlflow"]) as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            if not name.startswith("PREFECT"):
                patch.setenv(name, value)
        yield env["MLFLOW_TRACKING_URI"]


@pytest.fixture(scope="module")
def versions(uri: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two registered versions, of which the first is champion."""
    folder = tmp_path_factory.mktemp("drafters")
    _, one = registered(uri, folder, 0.4, 100, steps=20)
    _, other = registered(uri, folder, 0.6, 400, steps=30)
    Champions(MlflowClient(tracking_uri=uri), MODEL).move(one, "run-1", "the first one")
    return one, other


def test_versions_have_their_tags_their_run_and_their_model(uri: str, versions: tuple[str, str]) -> None:
    client = MlflowClient(tracking_uri=uri)
    version = client.get_model_version(MODEL, versions[1])
    assert version.tags.keys() >= {"fingerprint", "manifest.sha256"} | {
        f"served/{key}/acceptance_length" for key in DOMAINS
    }
    assert "on 400 samples" in version.description
    run = client.get_run(version.run_id)
    assert run.info.run_name.startswith(f"version {versions[1]}, ") and run.info.status == "FINISHED"
    (model,) = [m.model_id for m in run.outputs.model_outputs]
    found = client.get_logged_model(model)
    on = {(metric.dataset_name, metric.key) for metric in found.metrics}
    assert on >= {(f"prompts {key}", f"served/{key}/speed_up") for key in DOMAINS}
    assert found.params["train.lr"] == run.data.params["train.lr"]
    children = client.search_runs([run.info.experiment_id], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
    assert {child.info.status for child in children} == {"FINISHED"} and len(children) == 2
    assert drafters_of(f"{400:064x}", uri) == [f"{MODEL}/{versions[1]}"]


def test_two_versions_are_compared_with_their_loss_curves(uri: str, versions: tuple[str, str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    client = MlflowClient(tracking_uri=uri)
    answer = compare_drafters(f"{MODEL}@candidate", f"{MODEL}@champion", html=page, client=client)
    assert answer["overall"]["verdict"] == "better"
    assert answer["differs"]["data"] == ["samples: 400 / 100"]
    assert [len(side["train/loss"]) for side in answer["curves"]] == [30, 20]
    assert 'id="losses"' in page.read_text()


def test_a_champion_moves_goes_back_and_can_be_fetched(uri: str, versions: tuple[str, str], tmp_path: Path) -> None:
    known = Champions(MlflowClient(tracking_uri=uri), MODEL)
    before = known.version
    known.move(versions[1], "run-2", "better")
    assert known.version == versions[1]
    assert json.loads((known.download(versions[1], tmp_path) / "lineage.json").read_text())["samples"] == 400
    assert known.back("slow") == before == versions[0]
    assert [move.version for move in known.history()] == [versions[0], versions[1], versions[0]]


@pytest.mark.parametrize("why", ["better by +0.147, " * 28, "日\n\a" * 500, "x" * 200_000])
def test_every_move_of_a_champion_is_remembered_however_many(uri: str, versions: tuple[str, str], why: str) -> None:
    client = MlflowClient(tracking_uri=uri)
    known = Champions(client, MODEL)
    before = known.history()
    moves = [(versions[n % 2], f"run-{n}") for n in range(12 if len(why) < 600 else 4)]
    for version, by in moves:
        known.move(version, by, why)
    assert [(move.version, move.by) for move in known.history()] == [(m.version, m.by) for m in before] + moves
    assert all(why.startswith(move.why) and len(move.why) > 40 for move in known.history()[len(before) :])
    tags = client.get_registered_model(MODEL).tags
    assert all(len(value) <= LONGEST_TAG for name, value in tags.items() if name.startswith(HISTORY))
    assert (known.version, known.back("")) == (versions[1], versions[0])


def test_what_a_kill_left_running_is_ended(uri: str) -> None:
    gone = json.dumps(json.loads(this_process()) | {"start_time": 1})
    run = Tracker.open("eyas/made-up", "killed", {PROCESS: gone, "prefect.flow_run_id": "none"}, uri, None)
    child = run.child("training killed")
    assert end_all_abandoned(uri, "the next") == ["killed"]
    for tracker in (run, child):
        found = run.client.get_run(tracker.run_id)
        assert found.info.status == "KILLED" and "found by the next" in found.data.tags[ENDED]
        tracker.close("KILLED")


def test_an_experiment_opens_on_its_runs_with_the_columns_that_matter(uri: str, versions: tuple[str, str]) -> None:
    tags = MlflowClient(tracking_uri=uri).get_experiment_by_name("eyas/made-up").tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    assert json.loads(tags["mlflow.sharedViewState.eyas-verdict"])["name"] == "Verdict"
