"""Runs that MLflow shows as running though nobody runs them: their process was killed before it could end them.

Each pipeline run says in a tag which process it is. The next run of the same experiment, or `eyas up`, looks at those
that still count as running, and ends the ones whose process is gone; where that cannot be seen from here (another
machine, another container), Prefect is asked whether the flow run is over. What nobody can tell is left alone.
"""

import json
import os
import socket
from uuid import UUID

from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from infra import lifeline
from tasks.tracking import ENDED

PROCESS = "eyas.process"
HEARTBEAT = "system/cpu_utilization_percentage"  # logged every 10 s while the process lives
OVER = {"COMPLETED": "KILLED", "FAILED": "FAILED", "CRASHED": "KILLED", "CANCELLED": "KILLED"}  # Prefect -> MLflow


def this_process() -> str:
    """The tag's value: where process ids mean something, and which one this is."""
    return json.dumps({"host": socket.gethostname(), "boot": lifeline.boot_id(), "pids": _namespace(),
                       **lifeline.identity(os.getpid())})  # fmt: skip


def end_abandoned(client: MlflowClient, experiment_id: str, found_by: str) -> list[str]:
    """End what no living process runs, with the nested runs below, as of the last sign of life; names of these runs."""
    running = client.search_runs([experiment_id], "attributes.status = 'RUNNING'", max_results=1000)
    ended = []
    for run in running:
        if "mlflow.parentRunId" in run.data.tags or PROCESS not in run.data.tags:
            continue
        status = _fate(run)
        if status is None:
            continue
        nested = client.search_runs([experiment_id], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
        signs = {member.info.run_id: _last_sign(client, member) for member in nested}
        signs[run.info.run_id] = max([int(run.info.start_time), *signs.values()])  # the nested ones end first
        for member in [*nested, run]:
            if member.info.status == "RUNNING":
                client.set_tag(member.info.run_id, ENDED, f"its process ended without a word; found by {found_by}")
                client.set_terminated(member.info.run_id, status, end_time=signs[member.info.run_id])
        ended.append(str(run.info.run_name))
    return ended


def end_all_abandoned(tracking_uri: str, found_by: str) -> list[str]:
    """The same in every experiment: what `eyas up` does before a person looks at the pages."""
    client = MlflowClient(tracking_uri=tracking_uri)
    experiments = [found.experiment_id for found in client.search_experiments()]
    return [name for experiment in experiments for name in end_abandoned(client, experiment, found_by)]


def _fate(run: Run) -> str | None:
    """How a run that counts as running has ended; None while it may still run."""
    tags = run.data.tags
    process = json.loads(tags[PROCESS])
    if (process["boot"], process["pids"]) == (lifeline.boot_id(), _namespace()):
        return None if lifeline.start_time(process["pid"]) == process["start_time"] else "KILLED"
    try:
        with get_client(sync_client=True) as prefect:
            state = prefect.read_flow_run(UUID(tags["prefect.flow_run_id"])).state
    except ObjectNotFound:  # of another Prefect server
        return None
    return OVER.get(str(state.type.value)) if state else None


def _last_sign(client: MlflowClient, run: Run) -> int:
    """Milliseconds of a nested run's end; of one that did not come to it, of the last figure of its machine."""
    if run.info.end_time is not None:
        return int(run.info.end_time)
    history = client.get_metric_history(run.info.run_id, HEARTBEAT)
    return max([metric.timestamp for metric in history], default=int(run.info.start_time))


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
