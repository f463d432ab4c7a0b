"""Services the user names are used; nothing is started beside them."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient

from infra.services import LocalStack
from tests.flows.runs import Place, tiny_recipe

pytestmark = pytest.mark.slow


def artifacts(api: str, flow_run_id: str) -> dict[str, Any]:
    """The newest artifact of each key that a flow run made."""
    asked = {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}, "sort": "CREATED_DESC"}
    found = httpx.post(f"{api}/artifacts/filter", json=asked).raise_for_status().json()
    return {artifact["key"]: artifact for artifact in reversed(found)}


def test_a_run_uses_the_services_it_is_given_and_up_and_down_own_the_local_ones(tmp_path: Path) -> None:
    stack_folder, run_folder = tmp_path / "stack", tmp_path / "run"
    stack_folder.mkdir()
    run_folder.mkdir()
    stack = Place(stack_folder)
    try:
        status, output = stack.run("up", "--json")
        assert status == 0, output
        services = json.loads(output)["services"]
        assert all(service["running"] for service in services.values())
        given = LocalStack(stack_folder / ".eyas").environment()
        pages = given["PREFECT_API_URL"].removesuffix("/api")
        assert httpx.get(f"{pages}/ui-settings").json()["api_url"] == given["PREFECT_API_URL"]
        place = Place(run_folder, env=given)
        recipe = tiny_recipe(
            run_folder, store={"uri": "s3://eyas/given"}, evaluate={"enabled": False}, extract={"in_flight": 2},
            server={"flags": {"chunked-prefill-size": 64}},
        )  # fmt: skip
        status, output = place.run("run", str(recipe), "--json")
        assert status == 0, output
        (summary,) = place.summaries()

        assert not list((run_folder / ".eyas").glob("services/*"))
        flow_run = httpx.get(f"{given['PREFECT_API_URL']}/flow_runs/{summary['prefect_flow_run_id']}").json()
        assert flow_run["state"]["type"] == "COMPLETED"
        shown = artifacts(given["PREFECT_API_URL"], summary["prefect_flow_run_id"])
        assert shown["extraction-progress"]["type"] == "progress" and shown["extraction-progress"]["data"] == 100
        assert "40 of 40 samples" in shown["extraction-progress"]["description"]
        table = json.loads(shown["extraction-report"]["data"])
        assert (table[0]["state"], table[0]["count"]) == ("stored and proved", 40)
        # every server was asked: golden samples in chunks, after a cached prefix, at every position, by a reference
        gate = summary["gate"]
        assert gate["chunked_samples"] > 0 and gate["prefix_rows"] > 30 and gate["reference_tensors"] == 12
        assert gate["positions_agreed"] == gate["positions"] > 60

        client = MlflowClient(tracking_uri=given["MLFLOW_TRACKING_URI"])
        assert client.get_run(summary["mlflow_run_id"]).info.status == "FINISHED"
        version = client.get_model_version(summary["model_name"], summary["model_version"])
        assert version.tags["manifest.sha256"] == summary["manifest_digest"]
        status, output = place.run("inspect", summary["dataset_uri"], "--json")
        assert status == 0, output
        assert json.loads(output)["facts"]["manifest sha256"] == summary["manifest_digest"]

        said = output + "".join(path.read_text(errors="replace") for path in run_folder.rglob("*.json"))
        assert given["AWS_SECRET_ACCESS_KEY"] not in said
    finally:
        status, output = stack.run("down")
    assert status == 0, output
    assert not stack.wait_empty(20)
