"""MLflow tells the truth about a run: what it measured, on what machine, and how it ended, whatever ended it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.exceptions import ObjectNotFound

from infra.recipe import Recipe
from infra.recipe_file import load_recipe
from tasks import abandoned
from tasks.abandoned import PROCESS, end_abandoned, this_process
from tasks.job import Job
from tasks.stage import current, stage
from tasks.tracking import ENDED, Tracker
from tests.flows.runs import CHECKOUT, wait_for

KILLED = """
import os, signal, sys
from tasks.abandoned import PROCESS, this_process
from tasks.tracking import Tracker
run = Tracker.open("killed", "mine", {PROCESS: this_process(), "prefect.flow_run_id": "none"}, sys.argv[1], None)
child = run.child("training mine")
print("begun", flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mlflow")
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("demo-smollm2", [])


@pytest.fixture
def job(uri: str, recipe: Recipe, tmp_path: Path) -> Iterator[Job]:
    made = Job(recipe, f"run-{uuid4().hex[:4]}", tmp_path, tmp_path, None)  # type: ignore[arg-type]  # no store is used
    made.tracker = Tracker.open("stages", made.run_id, {}, uri, tmp_path / "artifacts")
    yield made
    made.tracker.close()


def nested(job: Job) -> list[Run]:
    assert job.tracker is not None
    tracker = job.tracker
    return list(tracker.client.search_runs([tracker.experiment_id], f"tags.mlflow.parentRunId = '{tracker.run_id}'"))


def test_a_stage_is_a_nested_run_with_its_own_parameters_and_figures(job: Job) -> None:
    job.figures["tokens"] = 100
    job.seconds["plan"] = 2.0
    with stage(job, "training") as tracker:
        assert current(job) is tracker
        job.figures |= {"loss_last": 0.5, "held_out_top1": [0.7]}
        job.seconds["train drafter"] = 7.04
        tracker.curve("held_out/top1", [0.7, 0.6, 0.5])
    (run,) = nested(job)
    assert (run.info.status, run.info.run_name) == ("FINISHED", f"training {job.run_id[-4:]}")
    assert run.data.metrics == {"loss_last": 0.5, "wall_s/train_drafter": 7.0, "held_out/top1": 0.5}
    assert run.data.params["train.lr"] == str(job.recipe.train.lr)
    assert not [key for key in run.data.params if key.startswith(("evaluate.", "regenerate."))]
    assert "None" not in run.data.params.values()
    history = tracker.client.get_metric_history(run.info.run_id, "held_out/top1")
    assert [(m.step, m.value) for m in history] == [(1, 0.7), (2, 0.6), (3, 0.5)]
    assert current(job) is job.tracker


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("the gate says no"), "FAILED"),
        (KeyboardInterrupt("Ctrl-C"), "KILLED"),
        (SystemExit("term"), "KILLED"),
    ],
)
def test_a_stage_ends_as_its_block_ends(job: Job, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)), stage(job, "extraction"):
        raise error
    (run,) = nested(job)
    assert run.info.status == status
    assert run.data.tags[ENDED] == str(error)
    assert current(job) is job.tracker


def test_the_machine_is_measured_as_long_as_the_run_lasts(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    whole = Tracker.open("machine", "measured", {}, uri, None)
    run = whole.child("training")

    def measured() -> list[Any]:
        return list(run.client.get_metric_history(run.run_id, abandoned.HEARTBEAT))

    assert wait_for(lambda: len(measured()) >= 2, 30)
    run.close()
    count = len(measured())
    metrics = run.client.get_run(run.run_id).data.metrics
    assert {"system/system_memory_usage_megabytes", "system/disk_usage_percentage"} <= metrics.keys()
    assert not wait_for(lambda: len(measured()) > count, 1)
    assert not whole.client.get_run(whole.run_id).data.metrics  # the verdict's figures stand there alone
    whole.close()


@contextmanager
def killed_run(uri: str, interval: str = "0.2") -> Iterator[subprocess.Popen[str]]:
    """A process with a run and a nested run in MLflow, alive until the block ends it."""
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": interval}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, uri], env=env, text=True, stdout=subprocess.PIPE, cwd=CHECKOUT
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_killed_processs_runs_are_ended_when_they_last_gave_a_sign_and_a_living_ones_are_not(uri: str) -> None:
    client = MlflowClient(tracking_uri=uri)
    with killed_run(uri) as process:
        experiment = client.get_experiment_by_name("killed").experiment_id
        child, parent = sorted(client.search_runs([experiment]), key=lambda r: r.info.run_name == "mine")

        def signs() -> list[int]:
            return [m.timestamp for m in client.get_metric_history(child.info.run_id, abandoned.HEARTBEAT)]

        assert wait_for(lambda: len(signs()) >= 2, 30)
        assert end_abandoned(client, experiment, "next") == []
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert end_abandoned(client, experiment, "next") == ["mine"]
        runs = client.search_runs([experiment])
        assert len(runs) == 2 and {run.info.status for run in runs} == {"KILLED"}
        assert all("found by next" in run.data.tags[ENDED] for run in runs)
        ends = {client.get_run(run.info.run_id).info.end_time for run in (child, parent)}
        assert ends == {signs()[-1]}
        assert end_abandoned(client, experiment, "again") == []


class Elsewhere:
    """Stands in for Prefect's client: what it knows of a flow run of another machine."""

    def __init__(self, state: str | None) -> None:
        self.state = state

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_flow_run(self, _: object) -> Any:
        if self.state is None:
            raise ObjectNotFound(Exception())
        return SimpleNamespace(state=SimpleNamespace(type=SimpleNamespace(value=self.state)))


@pytest.mark.parametrize(
    ("state", "status"),
    [("RUNNING", "RUNNING"), ("CRASHED", "KILLED"), ("CANCELLED", "KILLED"), ("FAILED", "FAILED"), (None, "RUNNING")],
)
def test_of_a_run_of_another_machine_prefect_is_asked_and_what_nobody_knows_is_left_alone(
    uri: str, monkeypatch: pytest.MonkeyPatch, state: str | None, status: str
) -> None:
    monkeypatch.setattr(abandoned, "get_client", lambda sync_client: Elsewhere(state))
    there = json.dumps(json.loads(this_process()) | {"boot": "another", "host": "another"})
    run = Tracker.open("elsewhere", "theirs", {PROCESS: there, "prefect.flow_run_id": str(uuid4())}, uri, None)
    end_abandoned(run.client, run.experiment_id, "next")
    assert run.client.get_run(run.run_id).info.status == status
    run.close()


def test_only_what_a_browser_can_open_is_called_a_link(uri: str) -> None:
    known = SimpleNamespace(experiment_id="3", run_id="abc", client=SimpleNamespace(tracking_uri="http://127.0.0.1:5/"))
    page: Callable[[Any], str | None] = Tracker.url.fget  # type: ignore[attr-defined]
    assert page(known) == "http://127.0.0.1:5/#/experiments/3/runs/abc"
    known.client.tracking_uri = uri
    assert page(known) is None
