"""The end of a run: its summary, the drafter's papers, and its place among the drafters before it."""

import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlflow.entities import LoggedModel
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from tasks.begin import count_uploads, git_commit
from tasks.champion import model_name
from tasks.evaluation import keep_evaluation
from tasks.job import Job, need
from tasks.lineage import FILE as LINEAGE
from tasks.model_card import model_card
from tasks.stage import numbers, short_name, wall_seconds
from tasks.step import step
from tasks.tracking import register_version


@step("register drafter", retries=2)
def register_drafter(job: Job) -> None:
    """Write the drafter's papers, log them to MLflow, and make it the next version of the registered model."""
    recipe, tracker = job.recipe, need(job.tracker, "MLflow run")
    folder = job.folder / "drafter"
    figures = job.figures
    lineage = {
        "dataset_uri": figures["dataset_uri"],
        "manifest_digest": figures["manifest_digest"],
        "fingerprint": figures["fingerprint"],
        "recipe": recipe.as_dict(),
        "recipe_sha256": recipe.digest,
        "samples": figures["samples_valid"] - figures["samples_held_out"],
        "held_out_samples": figures["samples_held_out"],
        "tokens": figures["tokens"],
        "sglang_version": figures["sglang_version"],
        "git_commit": git_commit(),
        "prefect_flow_run_id": str(flow_run.get_id()),
        "mlflow_run_id": tracker.run_id,
        "predicted_acceptance_length": figures["predicted_acceptance_length"],
        "served_acceptance_length": figures.get("served_acceptance_length"),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    (folder / LINEAGE).write_text(json.dumps(lineage, indent=1, sort_keys=True) + "\n")
    (folder / "README.md").write_text(model_card(job, lineage))
    keep_evaluation(job)
    name = model_name(job)
    tags = {
        "fingerprint": figures["fingerprint"],
        "manifest.sha256": figures["manifest_digest"],
        "served_acceptance_length": str(figures.get("served_acceptance_length")),
        "predicted_acceptance_length": str(figures["predicted_acceptance_length"]),
        "eyas.run": job.run_id,
        **set_tags(job),
    }
    model = log_model(job, folder, tags)
    _, version = register_version(tracker, name, model, tags, in_words(job))
    figures |= {"model_name": name, "model_version": version}
    tracker.tags({"drafter.version": f"{name}/{version}", "sglang.version": figures["sglang_version"]})
    tracker.rename(f"version {version}, {short_name(job)}")
    tracker.text((folder / "README.md").read_text(encoding="utf-8"), "model-card.md")
    get_run_logger().info("registered %s version %s", name, version)


def log_model(job: Job, folder: Path, tags: Mapping[str, str]) -> LoggedModel:
    """The drafter among MLflow's models, with what it was trained by and how it served each set."""
    tracker = need(job.tracker, "MLflow run")
    params = {k: v for k, v in job.recipe.flat().items() if k.startswith(("train.", "capture."))}
    model = tracker.model(f"drafter {job.short_id}", folder, params, tags)
    for key, record in job.evaluation.sets.items() if job.evaluation else ():
        figures = {f"served/{key}/{name}": value for name, value in numbers(record.figures()).items()}
        tracker.model_metrics(model, figures, f"prompts {key}", record.digest)
    return model


def in_words(job: Job) -> str:
    """A model version's description: how good it is, and where it comes from."""
    f = job.figures
    served = "; ".join(
        f"{key} {found['acceptance_length']:.3f} ({found['speed_up']:.2f} times as fast as plain decoding)"
        for key, found in f.get("served_sets", {}).items()
    )
    samples = f["samples_valid"] - f["samples_held_out"]
    return (
        f"Served acceptance length: {served or 'not measured'}. Predicted: {f['predicted_acceptance_length']:.3f}.\n\n"
        f"Trained by run {job.run_id} in {f['train_steps']:,} steps on {samples:,} samples of {f['dataset_uri']}."
    )


def set_tags(job: Job) -> dict[str, str]:
    """Of a model version: what it was served on, and how well, set by set."""
    sets, served = job.figures.get("prompt_sets", []), job.figures.get("served_sets", {})
    tags = {f"prompt_set.{found['name']}": f"{found['version']} {found['digest']}" for found in sets}
    tags["prediction.cause"] = str(job.figures.get("prediction", {}).get("cause"))
    return tags | {
        f"served/{name}/acceptance_length": str(found["acceptance_length"]) for name, found in served.items()
    }


def finish(job: Job) -> dict[str, Any]:
    """The end of a whole run: close the dataset's version too, and remove what is no longer needed."""
    summary = summarise(job, {"drafter_path": str(job.folder / "drafter")})
    need(job.ledger, "ledger").close(job.run_id, summary)
    need(job.tracker, "MLflow run").close("FINISHED")
    clean_up(job)
    return summary


def finish_training(job: Job) -> dict[str, Any]:
    """The end of a training alone: the dataset's version stays open, as other trainings may follow."""
    summary = summarise(job, {"drafter_path": str(job.folder / "drafter")})
    need(job.tracker, "MLflow run").close("FINISHED")
    clean_up(job)
    return summary


def finish_extraction(job: Job) -> dict[str, Any]:
    """The end of an extraction: the dataset's version stays open for the run that trains on it."""
    summary = summarise(job, {})
    need(job.tracker, "MLflow run").close("FINISHED")
    clean_up(job)
    return summary


def summarise(job: Job, more: dict[str, Any]) -> dict[str, Any]:
    """Write `summary.json` and log it."""
    tracker = need(job.tracker, "MLflow run")
    count_uploads(job)
    wall = job.wall
    figures = {key: value for key, value in job.figures.items() if key not in ("teacher_agreed", "teacher_strict")}
    summary: dict[str, Any] = {
        "warmup_dumps_removed": 0,  # a run that found its dataset complete starts no capture server
        **figures,
        **agreement(job),
        "run": job.run_id,
        "recipe": job.recipe.name,
        "mlflow_run_id": tracker.run_id,
        "prefect_flow_run_id": str(flow_run.get_id()),
        "summary_path": str(job.folder / "summary.json"),
        **more,
        "wall_s": wall,
    }
    text = json.dumps(summary, indent=1, sort_keys=True) + "\n"
    (job.folder / "summary.json").write_text(text)
    tracker.metrics({**numbers(summary), **wall_seconds(wall)})
    tracker.text(text, "summary.json")
    return summary


def agreement(job: Job) -> dict[str, float]:
    """Shares of the positions the teacher was asked about, over all batches; nothing where it was not asked."""
    figures = job.figures
    if "teacher_positions" not in figures:
        return {}
    names = {"teacher_agreement": "teacher_agreed", "teacher_agreement_strict": "teacher_strict"}
    return {name: round(figures[key] / figures["teacher_positions"], 6) for name, key in names.items()}


def clean_up(job: Job) -> None:
    """Remove checkpoints, the other drafters and the empty dump folder of a run that went to its end."""
    if job.trained is not None:
        shutil.rmtree(job.trained.checkpoints, ignore_errors=True)
    for served in ("control", "champion"):
        shutil.rmtree(job.folder / served, ignore_errors=True)
    for dumps in job.folder.glob("dumps*"):
        if not any(dumps.glob("*/req_*")):
            shutil.rmtree(dumps)
