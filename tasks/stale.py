"""A champion's figures are of the target, template and engine they were measured with. When one of these has changed
they are stale: that is said, the champion is measured again, and both measurements stay beside its version in MLflow.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger

from hidden_states.errors import DatasetError
from tasks.engine import changes
from tasks.evaluation import FILE, Evaluation
from tasks.events import EVALUATION_STALE, emit
from tasks.job import Job, need

if TYPE_CHECKING:
    from tasks.champion import Champions


def staleness(job: Job, folder: Path, model: str, version: str) -> list[str]:
    """What has changed since a version was measured, `name: then / now`; empty when nothing has. Tells Prefect.

    Args:
        folder: where the version was downloaded to.
    """
    now = need(job.plain, "plain decoding").settings
    try:
        before = Evaluation.read(folder, f"{model}/{version}")
        found = changes(before.settings, now)
    except DatasetError as error:  # of an older Eyas, or never served: nobody can say what it was measured with
        found = [f"evaluation: {error.found} / measured now"]
    if found:
        get_run_logger().warning("the evaluation of %s version %s is stale (%s); it is measured again", model, version,
                                 "; ".join(found))  # fmt: skip
        emit(EVALUATION_STALE, f"model/{model}", version=version, changed=found, run=job.run_id)
    return found


def keep_measurement(job: Job, known: "Champions", version: str, found: Evaluation, stale: list[str]) -> None:
    """Log a registered version's new evaluation to this run, and point its version at it; figures from before stay in
    the tag `evaluation.history`."""
    tracker = need(job.tracker, "MLflow run")
    place = f"evaluations/{known.model}-{version}"
    folder = job.folder / place
    folder.mkdir(parents=True, exist_ok=True)
    found.write(folder)
    tracker.folder(folder, place)
    tags = known.client.get_model_version(known.model, version).tags
    served = {key: record.figures()["acceptance_length"] for key, record in found.sets.items()}
    history: list[dict[str, Any]] = json.loads(tags.get("evaluation.history", "[]"))
    before = {
        name.removeprefix("served/").removesuffix("/acceptance_length"): float(value)
        for name, value in tags.items()
        if name.startswith("served/")
    }
    history.append({"run": tags.get("evaluation.run", tags.get("eyas.run")), "served": before})
    new = {
        "evaluation.source": f"runs:/{tracker.run_id}/{place}/{FILE}",
        "evaluation.run": job.run_id,
        "evaluation.stale": "; ".join(stale) or "no",
        "evaluation.history": json.dumps(history[-10:]),
        "prediction.cause": str(found.prediction.get("cause")),
        **{f"served/{key}/acceptance_length": str(value) for key, value in served.items()},
    }
    for name, value in new.items():
        known.client.set_model_version_tag(known.model, version, name, value)
