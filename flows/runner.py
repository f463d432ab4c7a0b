"""`eyas run` and `eyas extract`: a flow with whatever services the user has not named, alive for as long as it runs."""

import contextlib
import logging
import os
import sys
import time
from typing import Any, Literal
from uuid import UUID

from flows.environment import state_dir
from hidden_states.errors import Refusal, ServerError
from infra.recipe_file import load_recipe

RECORD_DEADLINE_S = 20.0


class NoTraceback(logging.Filter):
    """A refusal says all there is to say; Prefect's engine would print its traceback above it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], Refusal):
            record.exc_info, record.exc_text = None, None
        return True


NO_TRACEBACK = NoTraceback()


def quiet_refusals() -> None:
    """Keep the tracebacks of refusals out of the terminal and of Prefect's pages."""
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(NO_TRACEBACK)


def send_last_words() -> None:
    """Prefect sends logs and task states from threads: what waits there goes out before our own server ends."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    APILogHandler().flush()
    EventsWorker.drain_all(timeout=RECORD_DEADLINE_S)


def wait_recorded(flow_run_id: UUID | None) -> None:
    """Return once the server knows the end of every task run; it takes them in a little later than they happen."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    if flow_run_id is None:
        return
    send_last_words()
    only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    deadline, known = time.monotonic() + RECORD_DEADLINE_S, -1
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            runs = client.read_task_runs(flow_run_filter=only, limit=200)
            if len(runs) == known and all(run.state is not None and run.state.is_final() for run in runs):
                return
            known = len(runs)
            time.sleep(0.5)


def run_flow(
    name: Literal["drafter_pipeline", "extract", "train", "evaluate"], recipe: str, overrides: list[str], **more: Any
) -> dict[str, Any]:
    """Check the recipe, start what is missing, run one of the flows.

    Args:
        more: what this flow takes besides.

    Returns:
        The run's summary, as written to `runs/<run>/summary.json`.
    """
    load_recipe(recipe, overrides)  # a bad recipe ends here, before anything starts
    with contextlib.ExitStack() as services:
        if "PREFECT_API_URL" not in os.environ:
            from infra.services import embedded_prefect

            print("starting Prefect (SQLite, loopback); 10 to 20 seconds ...", file=sys.stderr, flush=True)
            os.environ["PREFECT_API_URL"] = services.enter_context(embedded_prefect(state_dir()))
            services.callback(os.environ.pop, "PREFECT_API_URL", None)
            services.callback(send_last_words)
        from flows.deployments import load

        quiet_refusals()
        state: Any = load(name)(recipe, overrides, **more, return_state=True)
        wait_recorded(state.state_details.flow_run_id)
        if state.is_cancelled():  # the recipe says not to wait
            raise ServerError("GPUs of this host", str(state.message), None, "")
        return state.result()
