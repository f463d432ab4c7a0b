"""The whole road on real parts: real SGLang, a real object store, the real Prefect API, real MLflow."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.flows.runs import CHECKOUT, SGLANG, Place, tiny_recipe, wait_for

pytestmark = pytest.mark.slow

KEYS = {
    "sglang_version", "target", "samples_planned", "samples_valid", "samples_quarantined", "tokens",
    "warmup_dumps_removed", "objects_uploaded", "bytes_uploaded", "dataset_uri", "manifest_digest", "teacher_agreement",
    "train_steps", "loss_first", "loss_last", "predicted_acceptance_length", "served_acceptance_length",
    "control_acceptance_length", "mlflow_run_id", "model_version", "prefect_flow_run_id", "wall_s",
}  # fmt: skip
SHORT = [
    "data.max_conversations=30", "data.held_out_share=0.15", "regenerate.max_new_tokens=32", "evaluate.prompts=2",
    "evaluate.sets=[]", "evaluate.max_new_tokens=24", "evaluate.min_acceptance_length=null", "train.max_seconds=25",
    "train.eval_every=20", "train.draft_vocab_size=2048",
]  # fmt: skip


def task_runs(place: Place, flow_run_id: str) -> tuple[str, dict[str, str]]:
    """The flow run's state and its task runs' states, as Prefect's database has them."""
    with sqlite3.connect(place.folder / ".eyas" / "prefect" / "prefect.db") as db:
        compact = flow_run_id.replace("-", "")
        where = "replace(id, '-', '') = ?"
        (state,) = db.execute(f"select state_type from flow_run where {where}", [compact]).fetchone()
        rows = db.execute(
            "select name, state_type from task_run where replace(flow_run_id, '-', '') = ?", [compact]
        ).fetchall()
    return state, dict(rows)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, dict[str, Any], str]:
    """The demo, shortened, run once."""
    place = Place(tmp_path_factory.mktemp("demo"))
    (place.folder / ".eyas").mkdir()
    (place.folder / ".eyas" / "assets").symlink_to(CHECKOUT / ".eyas" / "assets")
    status, output = place.run("run", "demo-smollm2", f"server.python={SGLANG}", *SHORT)
    assert status == 0, output
    (summary,) = place.summaries()
    return place, summary, output


def test_the_demo_measures_every_figure_of_its_summary(demo: tuple[Place, dict[str, Any], str]) -> None:
    _, summary, _ = demo
    assert summary.keys() >= KEYS
    assert summary["sglang_version"] == "0.5.23"
    assert summary["samples_planned"] == 30
    assert summary["samples_valid"] + summary["samples_quarantined"] + summary["replies_empty"] == 30
    assert summary["samples_quarantined"] == 0
    assert summary["warmup_dumps_removed"] == 1
    assert summary["teacher_agreement"] >= 0.99
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["bytes_uploaded"] > summary["tokens"] * 9216
    assert summary["served_outputs_equal"] == summary["served_prompts"] == 2
    control = summary["control_acceptance_length"]
    # It learns: chats it was not trained on, after some 30 steps (1.19 and 1.28 over 1.00 on a busy machine).
    assert 1 <= control < summary["served_acceptance_length"]
    assert summary["predicted_acceptance_length"] > control + 0.05
    # every verification makes its accepted tokens and one of the target's own; the first token comes from the prefill
    made = sum((accepted + 1) * times for accepted, times in enumerate(summary["served_histogram"]))
    assert made >= summary["served_tokens"] - summary["served_prompts"]
    lengths = summary["served_by_prompt"]
    assert min(lengths) <= summary["served_acceptance_length"] <= max(lengths)
    assert sum(v for k, v in summary["wall_s"].items() if k != "total") <= summary["wall_s"]["total"] + 0.1


def test_the_demo_says_what_it_did_in_words(demo: tuple[Place, dict[str, Any], str]) -> None:
    _, summary, output = demo
    for said in ("What was done", "How long it took", "Acceptance length", "Where to look", "eyas up"):
        assert said in output
    assert summary["mlflow_run_id"] in output
    assert "Traceback" not in output


def test_the_demo_leaves_no_process_and_no_hidden_states_on_the_disk(demo: tuple[Place, dict[str, Any], str]) -> None:
    place, summary, _ = demo
    assert not place.wait_empty(10)
    run = Path(summary["summary_path"]).parent
    assert {path.name for path in run.iterdir() if path.is_dir()} == {"drafter"}


def test_every_step_of_the_demo_is_a_completed_task_run_in_prefect(demo: tuple[Place, dict[str, Any], str]) -> None:
    place, summary, _ = demo
    state, tasks = task_runs(place, summary["prefect_flow_run_id"])
    assert state == "COMPLETED"
    assert set(tasks.values()) == {"COMPLETED"}
    steps = {name.removesuffix(f" {name.split()[-1]}") if name.startswith("extract batch ") else name for name in tasks}
    assert steps >= {
        "plan", "launch server", "remove warm-up dumps", "regenerate replies", "open dataset", "prove states",
        "extract batch", "stop server", "commit dataset", "train drafter", "export drafter",
        "serve and measure drafter", "serve and measure control", "register drafter",
    }  # fmt: skip


def test_the_drafter_is_a_model_version_with_its_lineage(demo: tuple[Place, dict[str, Any], str]) -> None:
    place, summary, _ = demo
    client = MlflowClient(tracking_uri=f"sqlite:///{place.folder}/.eyas/mlflow/mlflow.db")
    run = client.get_run(summary["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["prefect.flow_run_id"] == summary["prefect_flow_run_id"]
    assert run.data.metrics["served_acceptance_length"] == pytest.approx(summary["served_acceptance_length"])
    assert [i.dataset.digest for i in run.inputs.dataset_inputs] == [summary["manifest_digest"][:32]]
    version = client.get_model_version(summary["model_name"], summary["model_version"])
    assert version.run_id == summary["mlflow_run_id"]
    assert version.tags["manifest.sha256"] == summary["manifest_digest"]
    lineage = json.loads((Path(summary["drafter_path"]) / "lineage.json").read_text())
    assert lineage["manifest_digest"] == summary["manifest_digest"]
    assert lineage["served_acceptance_length"] == summary["served_acceptance_length"]
    children = client.search_runs([run.info.experiment_id], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
    stages = {child.data.tags["eyas.stage"]: child for child in children}
    assert stages.keys() == {"extraction", "training", "evaluation"}
    assert {child.info.status for child in children} == {"FINISHED"}
    assert len(client.get_metric_history(stages["training"].info.run_id, "train/loss")) == summary["train_steps"]
    digests = [[i.dataset.digest for i in stages[name].inputs.dataset_inputs] for name in ("extraction", "training")]
    assert digests == [[summary["manifest_digest"][:32]]] * 2
    batches = client.get_metric_history(stages["extraction"].info.run_id, "extraction/tokens")
    assert batches[-1].value == summary["tokens"] and batches[-1].step == len(batches)
    # each lasts longer than the ten seconds between two looks at the machine
    assert all("system/cpu_utilization_percentage" in child.data.metrics for child in children)
    assert not [name for name in run.data.metrics if name.startswith("system/")]


def test_prefect_and_mlflow_point_at_each_other(demo: tuple[Place, dict[str, Any], str]) -> None:
    place, summary, _ = demo
    client = MlflowClient(tracking_uri=f"sqlite:///{place.folder}/.eyas/mlflow/mlflow.db")
    note = client.get_run(summary["mlflow_run_id"]).data.tags["mlflow.note.content"]
    assert f"/runs/flow-run/{summary['prefect_flow_run_id']}" in note
    with sqlite3.connect(place.folder / ".eyas" / "prefect" / "prefect.db") as db:
        ((said,),) = db.execute("select data from artifact where key = 'mlflow-run'").fetchall()
    assert summary["mlflow_run_id"] in said


def test_no_trace_of_the_run_holds_a_credential(demo: tuple[Place, dict[str, Any], str]) -> None:
    """Its logs, its database in Prefect (parameters, results, log lines) and in MLflow (tags, parameters, artifacts),
    its objects in the bucket, its summary and its papers: nowhere are the bucket's keys but in their own file."""
    place, _, output = demo
    own = place.folder / ".eyas" / "object-store" / "credentials.json"
    access, secret = (value.encode() for value in json.loads(own.read_text()).values())
    assert min(len(access), len(secret)) >= 16
    files = [path for path in place.folder.rglob("*") if path.is_file() and path != own and "assets" not in path.parts]
    kinds = {"prefect.db", "mlflow.db", "summary.json", "lineage.json", "recipe.json", "sglang-capture.log"}
    assert kinds <= {path.name for path in files}
    leaking = {str(path.relative_to(place.folder)) for path in files if secret in path.read_bytes()}
    # The local object server itself logs which access key it was given (not the secret); nobody else does.
    leaking |= {str(path) for path in files if access in path.read_bytes() and path.name != "object-store.log"}
    assert not leaking
    assert access.decode() not in output and secret.decode() not in output


def test_the_objects_are_in_the_bucket_and_verify(demo: tuple[Place, dict[str, Any], str]) -> None:
    place, summary, _ = demo
    status, output = place.run("inspect", summary["dataset_uri"], "--json")
    assert status == 0, output
    report = json.loads(output)
    assert report["ok"] and report["kind"] == "dataset"
    assert report["facts"]["manifest sha256"] == summary["manifest_digest"]


def test_a_run_killed_at_any_step_is_finished_by_the_same_command(tmp_path: Path) -> None:
    """kill -9 in mid-extraction and in mid-training: nothing stays behind, nothing is done twice."""
    place = Place(tmp_path)
    less = {"aux": "int8", "final": "top_k", "top_k": 16, "final_rows": "taught"}  # the demo keeps all as captured
    recipe = str(tiny_recipe(tmp_path, store={"uri": f"file://{tmp_path}/store"}, dataset=less))
    store = tmp_path / "store" / "tiny-v1"

    def shards() -> list[Path]:
        return sorted(store.glob("shards/*.json"))

    kill_when(place, recipe, lambda: len(shards()) >= 2)
    kept = {path: path.stat().st_mtime_ns for path in shards()}
    kill_when(place, recipe, lambda: any((tmp_path / ".eyas" / "checkpoints").glob("*/step-*")), "train.steps=4000")
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items()), "a finished batch was done again"
    manifest = (store / "manifest.json").read_bytes()

    status, output = place.run("run", recipe)
    assert status == 0, output
    assert (store / "manifest.json").read_bytes() == manifest
    (summary,) = place.summaries()
    assert summary["samples_valid"] == summary["samples_planned"] == 40
    # MLflow: each killed run was ended by the one after it, with the part that was at work
    ends = sorted((run.data.tags.get("eyas.stage", "run"), run.info.status) for run in mlflow_runs(place))
    killed = [("extraction", "FINISHED"), ("extraction", "KILLED"), ("run", "KILLED"), ("run", "KILLED"),
              ("training", "KILLED")]  # fmt: skip
    whole = [(part, "FINISHED") for part in ("evaluation", "extraction", "run", "training")]
    assert ends == sorted(killed + whole)
    assert not place.wait_empty(10)


def kill_when(place: Place, recipe: str, happened: Any, *overrides: str) -> None:
    """Start the run, kill -9 its process as soon as something has happened, and see that nothing outlives it."""
    process = place.start("run", recipe, *overrides)
    output: list[str] = []
    try:
        reached = wait_for(lambda: happened() or process.poll() is not None, 300) and process.poll() is None
    finally:
        process.kill()
        output.append(process.communicate(timeout=60)[0])
    assert reached, output[0]
    assert not place.wait_empty(30), "processes outlived the kill of their owner"


def test_a_server_killed_in_the_middle_costs_at_most_its_batch(tmp_path: Path) -> None:
    place = Place(tmp_path)
    recipe = str(tiny_recipe(tmp_path, store={"uri": f"file://{tmp_path}/store"}, evaluate={"enabled": False}))
    process = place.start("run", recipe)
    try:
        assert wait_for(lambda: len(list((tmp_path / "store").glob("*/shards/*.json"))) >= 1, 300)
        for server in place.processes():
            if "sglang::scheduler" in " ".join(server.cmdline()):
                server.kill()
        output = process.communicate(timeout=400)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "starting it again" in output
    (summary,) = place.summaries()
    assert summary["samples_valid"] == 40
    assert summary["samples_quarantined"] == 0
    assert not place.wait_empty(10)


def test_ctrl_c_ends_everything_and_says_that_nothing_is_lost(tmp_path: Path) -> None:
    place = Place(tmp_path)
    recipe = str(tiny_recipe(tmp_path, store={"uri": f"file://{tmp_path}/store"}))
    process = place.start("run", recipe)
    assert wait_for(lambda: any("launch_server" in " ".join(cmdline(p)) for p in place.processes()), 120)
    process.send_signal(2)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Nothing is lost" in output
    assert not place.wait_empty(30)
    assert [run.info.status for run in mlflow_runs(place)] == ["KILLED", "KILLED"]  # the run, and its extraction


def mlflow_runs(place: Place) -> list[Run]:
    """Every run of the tiny target, nested ones too."""
    client = MlflowClient(tracking_uri=f"sqlite:///{place.folder}/.eyas/mlflow/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "eyas/tiny-deepseek-v3"]
    return list(client.search_runs([experiment.experiment_id]))


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
