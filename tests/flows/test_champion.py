"""A new drafter is served beside the one in production, and takes its place only when it has earned it."""

import json
import sqlite3
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.champion import Champions
from tasks.evaluation import Evaluation
from tests.flows.runs import Place, tiny_recipe


@pytest.mark.slow
def test_the_second_drafter_is_compared_with_the_first_on_the_same_prompts(tmp_path: Path) -> None:
    place = Place(tmp_path)
    tasks = [{"task_id": f"HumanEval/{n}", "prompt": f"def g{n}(y):", "test": "assert True"} for n in range(8)]
    known = [
        {"messages": [{"role": "user", "content": f"def f{n}(x): return x + {n * 7}  # explain"}]} for n in range(5)
    ]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*tasks, *known]))
    code = {"name": "code", "path": str(tmp_path / "code.jsonl"), "version": "2", "prompts": 9}
    served = {"prompts": 8, "max_new_tokens": 12, "control": False, "sets": [code]}
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
    assert second["served_differences"] == []
    sets = {found["name"]: found for found in second["prompt_sets"]}
    assert sets["code"]["version"] == "2" and sets["code"]["prompts"] + sets["code"]["in_training"] >= 9
    assert sets["code"]["in_training"] > 0  # of the five that are in the conversations, those that were trained on
    assert second["champion_sets"]["code"]["acceptance_length"] == first["served_sets"]["code"]["acceptance_length"]
    assert second["served_sets"]["code"]["plain_tokens_per_s"] > 0
    against = second["versus_champion_sets"]["held-out"]
    assert against["low"] <= against["difference"] <= against["high"]
    lead = second["served_acceptance_length"] - second["champion_acceptance_length"]
    assert against["difference"] == pytest.approx(lead, abs=2e-4)
    assert second["versus_champion"]["prompts"] == 8 + sets["code"]["prompts"]
    assert not second["promoted"] and second["decision"].count("does not lie above 9") == 2
    assert second["decision"][:60] in output

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/.eyas/mlflow/mlflow.db")
    model = second["model_name"]
    assert str(client.get_model_version_by_alias(model, "champion").version) == "1"
    assert str(client.get_model_version_by_alias(model, "candidate").version) == "2"
    tags = client.get_model_version(model, "2").tags
    assert tags["decision"] == second["decision"]
    assert tags["prompt_set.code"] == f"2 {sets['code']['digest']}"
    assert tags["served/code/acceptance_length"] == str(second["served_sets"]["code"]["acceptance_length"])

    kept = [{f.path for f in client.list_artifacts(s["mlflow_run_id"])} for s in (first, second)]
    assert kept[1] - kept[0] == {"comparison.html", "comparison.json"}
    assert kept[0] >= {"recipe.json", "summary.json", "plots"}
    plots = [{f.path for f in client.list_artifacts(s["mlflow_run_id"], "plots")} for s in (first, second)]
    assert plots[0] == {f"plots/{name}.svg" for name in ("by_position", "throughput", "losses")}
    assert plots[1] == plots[0] | {"plots/differences.svg"}
    with sqlite3.connect(place.folder / ".eyas" / "prefect" / "prefect.db") as db:
        ((told,),) = db.execute("select data from artifact where key = 'comparison'").fetchall()
    note = client.get_run(second["mlflow_run_id"]).data.tags["mlflow.note.content"]
    assert all(second["decision"] in text and "| held-out |" in text for text in (json.loads(told), note))

    page = tmp_path / "comparison.html"
    status, output = place.run("compare", f"{model}/2", f"{model}@champion", "--html", str(page), "--json")
    assert status == 0, output
    compared = json.loads(output)
    assert (compared["differs"]["data"], compared["differs"]["recipe"]) == ([], ["train.steps: 8 / 6"])
    assert 'id="losses"' in page.read_text()
    assert compared["sets"]["held-out"]["difference"] == pytest.approx(lead, abs=2e-4)
    assert compared["sets"].keys() == {"held-out", "code"}
    status, output = place.run("champion", model, "--set", "2", "--reason", "wanted")
    assert status == 0 and "version 2 is champion" in output and "by hand: wanted" in output
    status, output = place.run("champion", model, "--back")
    assert status == 0 and "version 1 is champion" in output

    # Somebody changes the target's chat template: what the champion was measured with is gone.
    template = tmp_path / "tiny-deepseek-v3" / "chat_template.jinja"
    template.write_text(template.read_text().replace("'</s>'", "' </s>'"))
    status, output = place.run("evaluate", recipe)
    assert status == 0, output
    assert "is the champion; it was measured again" in output and "replayed" in output
    again = place.summaries()[-1]
    assert again["drafter"] == f"{model}/1" and "served_sets" in again and "champion_version" not in again
    (change,) = again["stale"]
    assert change.startswith("template: ") and "is stale (template" in output
    tags = client.get_model_version(model, "1").tags
    assert tags["evaluation.run"] == again["run"] and tags["evaluation.stale"] == change
    (before,) = json.loads(tags["evaluation.history"])
    assert before["run"] == first["run"]
    assert before["served"]["held-out"] == first["served_sets"]["held-out"]["acceptance_length"]
    # `held-out` are the dataset's own tokens; `code` is rendered anew, so that its figure may be another
    assert (
        again["served_sets"]["held-out"]["acceptance_length"] == first["served_sets"]["held-out"]["acceptance_length"]
    )
    assert again["served_sets"]["code"]["prompts"] == 9
    found = Evaluation.read(Champions(client, model).download("1", tmp_path / "now"), "now")
    assert found.settings["template"][:16] in change and found.prediction == again["prediction"]
    status, output = place.run("compare", f"{model}/2", f"{model}/1")
    assert status != 0 and "served differently (template" in output
    assert not place.wait_empty(10)
