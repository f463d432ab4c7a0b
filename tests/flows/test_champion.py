"""A new drafter is served beside the one in production, and takes its place only when it has earned it."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.flows.runs import Place, tiny_recipe


@pytest.mark.slow
def test_the_second_drafter_is_compared_with_the_first_on_the_same_prompts(tmp_path: Path) -> None:
    place = Place(tmp_path)
    served = {"prompts": 8, "max_new_tokens": 12, "control": False}
    recipe = str(
        tiny_recipe(tmp_path, store={"uri": f"file://{tmp_path}/store"}, data={"held_out_share": 0.3}, evaluate=served)
    )
    status, output = place.run("run", recipe)
    assert status == 0, output
    status, output = place.run("run", recipe, "train.steps=8", "register.margin=9")
    assert status == 0, output

    first, second = place.summaries()
    assert first["promoted"] and "the first one" in first["decision"]
    assert second["manifest_digest"] == first["manifest_digest"]  # trained on the same data, captured once
    assert second["champion_version"] == first["model_version"] == "1"
    assert second["champion_acceptance_length"] == first["served_acceptance_length"]  # greedy: the same again
    assert second["champion_outputs_equal"] == second["served_outputs_equal"] == 8
    against = second["versus_champion"]
    assert against["low"] <= against["difference"] <= against["high"]
    lead = second["served_acceptance_length"] - second["champion_acceptance_length"]
    assert against["difference"] == pytest.approx(lead, abs=2e-4)
    assert not second["promoted"] and "does not lie above 9" in second["decision"] and second["decision"] in output

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/.eyas/mlflow/mlflow.db")
    model = second["model_name"]
    assert str(client.get_model_version_by_alias(model, "champion").version) == "1"
    assert str(client.get_model_version_by_alias(model, "candidate").version) == "2"
    assert client.get_model_version(model, "2").tags["decision"] == second["decision"]

    status, output = place.run("compare", f"{model}/2", f"{model}/1", "--json")
    assert status == 0, output
    assert json.loads(output)["difference"] == pytest.approx(lead, abs=2e-4)
    status, output = place.run("champion", model, "--set", "2", "--reason", "wanted")
    assert status == 0 and "version 2 is champion" in output and "by hand: wanted" in output
    status, output = place.run("champion", model, "--back")
    assert status == 0 and "version 1 is champion" in output
    assert not place.wait_empty(10)
