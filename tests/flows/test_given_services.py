"""Services the user names are used; nothing is started beside them. Here: those of the shared stack, on PostgreSQL."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlflow import MlflowClient

from infra.package_stack import package_stack, postgres_programs
from infra.services import LocalStack
from tests.flows.runs import Place, tiny_recipe

pytestmark = pytest.mark.slow
needs_postgres = pytest.mark.skipif(postgres_programs() is None, reason="PostgreSQL is not installed")


@pytest.fixture(scope="module")
def stack() -> Iterator[dict[str, str]]:
    """The stack's client environment; everything it started is gone afterwards."""
    before = set(psutil.Process().children(recursive=True))
    with package_stack() as env:
        started = set(psutil.Process().children(recursive=True)) - before
        yield env
    assert not [process for process in started if process.is_running() and process.status() != "zombie"]


class Api:
    """Prefect's, behind its password."""

    def __init__(self, env: dict[str, str]) -> None:
        user, _, password = env["PREFECT_API_AUTH_STRING"].partition(":")
        self.http = httpx.Client(base_url=env["PREFECT_API_URL"], auth=(user, password), timeout=30)

    def artifacts(self, flow_run_id: str) -> dict[str, Any]:
        """The newest artifact of each key that a flow run made."""
        asked = {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}, "sort": "CREATED_DESC"}
        found = self.http.post("/artifacts/filter", json=asked).raise_for_status().json()
        return {artifact["key"]: artifact for artifact in reversed(found)}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of this name."""
        asked = {"filter": {"event": {"name": [name]}}, "limit": 50}
        return list(self.http.post("/events/filter", json=asked).raise_for_status().json()["events"])


@needs_postgres
def test_the_stacks_prefect_and_mlflow_answer_nobody_without_a_password(stack: dict[str, str]) -> None:
    prefect = f"{stack['PREFECT_API_URL']}/admin/version"
    mlflow = f"{stack['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/experiments/search?max_results=1"
    user, _, password = stack["PREFECT_API_AUTH_STRING"].partition(":")
    assert (httpx.get(prefect).status_code, httpx.get(mlflow).status_code) == (401, 401)
    assert httpx.get(prefect, auth=(user, password)).status_code == 200
    assert httpx.get(mlflow, auth=(user, stack["MLFLOW_TRACKING_PASSWORD"])).status_code == 200
    assert httpx.get(mlflow, auth=(user, "password")).status_code == 401
    drawn = {password, stack["MLFLOW_TRACKING_PASSWORD"], stack["AWS_SECRET_ACCESS_KEY"]}
    processes = psutil.Process().children(recursive=True)
    postgres = [process for process in processes if process.name() == "postgres"]
    assert postgres and "root" not in {process.username() for process in postgres}
    for process in processes:
        assert not [word for word in cmdline(process) for secret in drawn if secret in word]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@needs_postgres
def test_a_run_uses_the_services_it_is_given(stack: dict[str, str], tmp_path: Path) -> None:
    """The whole road on PostgreSQL; what it shows, what it registers, and that no password is anywhere."""
    place, api = Place(tmp_path, env=stack), Api(stack)
    recipe = tiny_recipe(
        tmp_path, store={"uri": "s3://eyas/given"}, evaluate={"enabled": False}, extract={"in_flight": 2},
        server={"flags": {"chunked-prefill-size": 16}},  # below one prompt: in chunks whoever comes at once
    )  # fmt: skip
    status, output = place.run("run", str(recipe), "--json")
    assert status == 0, output
    (summary,) = place.summaries()

    assert not list((tmp_path / ".eyas").glob("services/*"))
    flow_run = api.http.get(f"/flow_runs/{summary['prefect_flow_run_id']}").json()
    assert flow_run["state"]["type"] == "COMPLETED"
    assert flow_run["name"] == "tiny-deepseek-v3 tiny-v1"
    shown = api.artifacts(summary["prefect_flow_run_id"])
    for key in ("extraction-progress", "training-progress"):
        assert shown[key]["type"] == "progress" and shown[key]["data"] == 100
    assert "40 of 40 samples" in shown["extraction-progress"]["description"]
    assert "max_new_tokens: 12" in shown["recipe"]["data"]
    table = json.loads(shown["extraction-report"]["data"])
    assert (table[0]["state"], table[0]["count"]) == ("stored and proved", 40)
    # every server was asked: golden samples in chunks, after a cached prefix, at every position, by a reference
    gate = summary["gate"]
    assert gate["chunked_samples"] > 0 and gate["prefix_rows"] > 30 and gate["reference_tensors"] == 12
    assert gate["positions_agreed"] == gate["positions"] > 60
    made = {event["resource"]["prefect.resource.id"] for event in api.events("prefect.asset.materialization.succeeded")}
    drafter = f"mlflow://models/{summary['model_name']}/{summary['model_version']}"
    assert made == {summary["dataset_uri"], drafter}

    credentials = {name: stack[name] for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in credentials.items():
            patch.setenv(name, value)
        client = MlflowClient(tracking_uri=stack["MLFLOW_TRACKING_URI"])
        assert client.get_run(summary["mlflow_run_id"]).info.status == "FINISHED"
        version = client.get_model_version(summary["model_name"], summary["model_version"])
        assert version.tags["manifest.sha256"] == summary["manifest_digest"]
        assert "summary.json" in {found.path for found in client.list_artifacts(summary["mlflow_run_id"])}
    status, output = place.run("inspect", summary["dataset_uri"], "--json")
    assert status == 0, output
    assert json.loads(output)["facts"]["manifest sha256"] == summary["manifest_digest"]

    said = output + "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.json"))
    secrets = [stack["AWS_SECRET_ACCESS_KEY"], stack["MLFLOW_TRACKING_PASSWORD"], stack["PREFECT_API_AUTH_STRING"]]
    assert not [secret for secret in secrets if secret in said]
    assert not place.wait_empty(20)


def test_up_and_down_own_the_local_services(tmp_path: Path) -> None:
    place = Place(tmp_path)
    try:
        status, output = place.run("up", "--json")
        assert status == 0, output
        services = json.loads(output)["services"]
        assert all(service["running"] for service in services.values())
        given = LocalStack(tmp_path / ".eyas").environment()
        pages = given["PREFECT_API_URL"].removesuffix("/api")
        assert httpx.get(f"{pages}/ui-settings").json()["api_url"] == given["PREFECT_API_URL"]
    finally:
        status, output = place.run("down")
    assert status == 0, output
    assert not place.wait_empty(20)
