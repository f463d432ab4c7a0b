"""What every flow of Eyas shares: its name in the list, one run at a time on a host's GPUs, never a stale success."""

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from uuid import UUID

from prefect import Flow, flow
from prefect.client.orchestration import get_client
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled

from flows.gpus import GpusBusy
from hidden_states.errors import Refusal
from infra.recipe_file import load_recipe
from tasks.job import Job

F = TypeVar("F", bound=Callable[..., Any])
LOOK_S = 2.0


def run_name() -> str:
    """What a run is called in Prefect's list until its dataset's version is known: target and dataset."""
    asked = flow_run.parameters
    try:
        recipe = load_recipe(str(asked.get("recipe")), list(asked.get("overrides") or ()))
    except Refusal:  # the run itself says what is wrong with it
        return str(asked.get("recipe"))
    return f"{os.path.basename(recipe.target.model_path.rstrip('/'))} {recipe.dataset.name or recipe.name}"


def name_run(job: Job) -> None:
    """Call the run after its target and the version of its dataset, now that it is known."""
    if job.ledger is not None and flow_run.get_id() is not None:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run.get_id()), name=f"{job.target_name} {job.ledger.name}")


def eyas_flow(name: str) -> Callable[[F], Flow[..., Any]]:
    """A function as a flow. Nothing is persisted or retried as a whole: steps retry, and the bucket says what is done.

    A run that was skipped because the GPUs are in use ends Cancelled, which is no failure.
    """

    def decorate(function: F) -> Flow[..., Any]:
        @functools.wraps(function)
        def skipping(*args: Any, **kwargs: Any) -> Any:
            end_with_the_worker()
            try:
                return function(*args, **kwargs)
            except GpusBusy as busy:
                return Cancelled(message=str(busy))

        return flow(name=name, flow_run_name=run_name, persist_result=False, retries=0)(skipping)

    return decorate


def end_with_the_worker() -> None:
    """A run of a deployment ends in good order when the process that runs it for Prefect is gone.

    Nobody could cancel it any more, and it would keep the GPUs. A run from a terminal does not depend on its parent.
    """
    if deployment.get_id() is None:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)  # Prefect's engine makes an orderly crash of it

    threading.Thread(target=watch, name="worker-watch", daemon=True).start()
