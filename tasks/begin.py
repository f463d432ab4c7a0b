"""The first step of a run: plan it, look into the bucket, open its MLflow run. Refuses before anything starts."""

import getpass
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from infra.services import MLFLOW, LocalStack
from tasks.abandoned import PROCESS, end_abandoned, this_process
from tasks.job import Job, need
from tasks.ledger import Ledger, plan_identity
from tasks.mlflow_client import without_password
from tasks.page import shown
from tasks.planning import make_plan
from tasks.stage import short_name
from tasks.step import step
from tasks.tracking import Tracker

LINK = "mlflow-run"


@step("plan")
def plan_run(job: Job) -> None:
    """Count, refuse what cannot work, choose the dataset's version, open the MLflow run."""
    recipe, log = job.recipe, get_run_logger()
    job.plan = make_plan(recipe)
    job.store.require_conditional_put()  # every shard is put so; asking is a round trip through the store
    identity = plan_identity(recipe, job.plan.prompts, job.plan.samples)
    job.ledger = Ledger.choose(job.store, recipe.dataset.name or recipe.name, identity, recipe.dataset.on_complete)
    job.objects_before = set(job.ledger.objects())
    job.figures |= {"target": job.target_name, "samples_planned": job.plan.count, "tokens_planned": job.plan.tokens}
    job.tracker = open_run(job)
    for name in end_abandoned(job.tracker.client, job.tracker.experiment_id, job.run_id):
        log.warning("MLflow showed run %s as running though its process is gone; it is marked as killed", name)
    log.info("%d samples, at most %d tokens, %d bytes a token; dataset %s (%s)", job.plan.count, job.plan.tokens,
             job.plan.bytes_per_token, job.ledger.uri, job.ledger.state)  # fmt: skip
    for difference in job.ledger.differs:
        log.info("a new version, because the last one was made of something else: %s", difference)
    for reason, rows in (job.plan.report.dropped if job.plan.report else {}).items():
        log.info("%d rows left out: %s (%s)", rows.count, reason, rows.examples[0])


def open_run(job: Job) -> Tracker:
    """The run in MLflow, with the recipe as parameters; it and the flow run in Prefect point at each other."""
    recipe = job.recipe
    uri = tracking_uri(job.state)
    own_artifacts = job.state / "mlflow" / "artifacts" if uri.startswith("sqlite:") else None
    commit = git_commit()
    tags: dict[str, Any] = {
        "eyas.run": job.run_id,
        "eyas.recipe": recipe.name,
        PROCESS: this_process(),
        "recipe.sha256": recipe.digest,
        "prefect.flow_run_id": str(flow_run.get_id()),
        "prefect.url": str(url_for("flow-run", obj_id=flow_run.get_id())),
        "git.sha": commit,
        # what fills MLflow's own columns
        "mlflow.source.type": "JOB",
        "mlflow.source.name": f"eyas {recipe.name}",
        "mlflow.source.git.commit": commit.removesuffix("+changes"),
        "mlflow.user": getpass.getuser(),
    }
    tracker = Tracker.open(
        recipe.register_.experiment or f"eyas/{job.target_name}", short_name(job), tags, uri, own_artifacts
    )
    tracker.params(recipe.flat())
    tracker.text(json.dumps(recipe.as_dict(), indent=1), "recipe.json")
    tracker.describe(
        f"Recipe `{recipe.name}`, [flow run in Prefect]({tags['prefect.url']}) (while that server runs; `eyas up` "
        f"brings the pages back, flow run `{tags['prefect.flow_run_id']}`). Files: `{job.folder}`."
    )
    _point_at(tracker, job.run_id)
    return tracker


def _point_at(tracker: Tracker, name: str) -> None:
    """Prefect's link to the run in MLflow; where no server shows MLflow's pages, the words to find it."""
    if tracker.url:
        url, text = tracker.url, f"MLflow: {name}"
        shown(lambda: create_link_artifact(url, link_text=text, key=LINK, description="The run in MLflow"))
    else:
        store = without_password(tracker.client.tracking_uri)
        where = f"Run `{tracker.run_id}` ({name}) in `{store}`; `eyas up` shows its page."
        shown(lambda: create_markdown_artifact(where, key=LINK, description="The run in MLflow"))


def tracking_uri(state: Path) -> str:
    """MLFLOW_TRACKING_URI, else the local stack's server if that is up, else its SQLite file."""
    given = os.environ.get("MLFLOW_TRACKING_URI") or LocalStack(state).url(MLFLOW)
    if given:
        return given
    (state / "mlflow").mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{state / 'mlflow' / 'mlflow.db'}"


def git_commit() -> str:
    """Commit of the checkout this code runs from, `+changes` where it was edited; `unknown` outside a checkout."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def count_uploads(job: Job) -> None:
    """What this run added to the bucket: objects of the dataset that were not there when it began."""
    now = need(job.ledger, "ledger").objects()
    added = now.keys() - job.objects_before
    job.figures |= {"objects_uploaded": len(added), "bytes_uploaded": sum(now[key] for key in added)}
