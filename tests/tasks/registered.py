"""Pipeline runs in MLflow without the pipeline: the same runs, models and versions, from figures made up here."""

import json
import random
from pathlib import Path
from typing import Any

from infra.recipe_file import load_recipe
from tasks.evaluation import GREEDY, Answer, Evaluation, SetRecord
from tasks.job import Job
from tasks.registry import in_words, log_model, set_tags
from tasks.stage import short_name, stage
from tasks.tracking import Tracker, register_version

MODEL = "eagle3-made-up"
DOMAINS = {"held-out": "held-out", "humaneval": "code", "repos": "code"}
LINEAGE: dict[str, Any] = {
    "dataset_uri": "s3://b/demo-v1", "manifest_digest": "a" * 64, "fingerprint": "f" * 64, "samples": 1000,
    "git_commit": "abc", "sglang_version": "0.5.23",
    "recipe": {"name": "demo", "train": {"lr": 0.001, "steps": 100}, "store": {"uri": "s3://b"}},
}  # fmt: skip


def served(name: str, luck: float, prompts: int = 12, seed: int = 0) -> Evaluation:
    """Three sets of two domains; a drafted token is accepted with a probability of about `luck`."""
    draw, records = random.Random(f"{seed}{name}"), []
    for key, domain in DOMAINS.items():
        answers = []
        for n in range(prompts):
            histogram = [0, 0, 0, 0]
            for _ in range(40):
                histogram[next((k for k in range(3) if draw.random() > luck), 3)] += 1
            tokens = sum((k + 1) * times for k, times in enumerate(histogram))
            answers.append(Answer(f"{key}{n:04}" * 4, f"{key}.jsonl:{n}", 9, histogram, tokens, 1.0, tokens, 1.5))
        records.append(SetRecord(key, "1", "d" * 64, domain, GREEDY, 0, answers))
    settings = {"target": "tiny", "sglang_version": "0.5.23", "num_steps": 3, "max_new_tokens": 64, "concurrency": 1}
    return Evaluation.of(name, settings, records)


def registered(uri: str, folder: Path, luck: float, samples: int, steps: int = 60) -> tuple[Job, str]:
    """A pipeline run with its nested runs, and the version it registered.

    Args:
        folder: for the drafter's folder; artifacts go where the tracking server puts them, or below it.
    """
    run_id = f"20261130-120000-demo-smollm2-{samples:04x}"
    job = Job(load_recipe("demo-smollm2", []), run_id, folder / run_id, folder, None)  # type: ignore[arg-type]
    drafter = job.folder / "drafter"
    drafter.mkdir(parents=True)
    artifacts = folder / "artifacts" if uri.startswith("sqlite:") else None
    tags = {"eyas.run": run_id, "mlflow.source.name": "eyas demo-smollm2", "mlflow.source.type": "JOB"}
    job.tracker = Tracker.open("eyas/made-up", short_name(job), tags, uri, artifacts)
    job.tracker.params(job.recipe.flat())
    with stage(job, "training") as training:
        training.curve("train/loss", [2 + 8 * luck / (1 + step / 20) for step in range(steps)])
        job.figures |= {"loss_last": 2.1, "train_steps": steps, "predicted_acceptance_length": 1 + 2 * luck}
    job.evaluation = served(run_id, luck)
    with stage(job, "evaluation"):
        job.figures |= {
            "samples_valid": samples + 50, "samples_held_out": 50, "dataset_uri": f"s3://b/demo-{samples}",
            "served_sets": {key: record.figures() for key, record in job.evaluation.sets.items()},
            "served_acceptance_length": job.evaluation.sets["held-out"].acceptance_length,
            "served_speed_up": job.evaluation.sets["held-out"].speed_up,
        }  # fmt: skip
    job.evaluation.write(drafter)
    lineage = LINEAGE | {"mlflow_run_id": job.tracker.run_id, "samples": samples}
    (drafter / "lineage.json").write_text(json.dumps(lineage))
    (drafter / "config.json").write_text("{}")
    known = {"manifest.sha256": f"{samples:064x}", "fingerprint": "f" * 64, **set_tags(job)}
    model = log_model(job, drafter, known)
    _, version = register_version(job.tracker, MODEL, model, known, in_words(job))
    job.tracker.rename(f"version {version}, {short_name(job)}")
    job.tracker.tags({"decision": f"version {version} is made up"})
    job.tracker.metrics({key: value for key, value in job.figures.items() if isinstance(value, int | float)})
    job.tracker.close()
    return job, version
