"""`eyas run`: the pipeline's flow with whatever services the user has not named, alive for as long as it runs."""

import contextlib
import logging
import os
from typing import Any

from flows.environment import state_dir
from hidden_states.errors import Refusal
from infra.recipe_file import load_recipe


class NoTraceback(logging.Filter):
    """A refusal says all there is to say; Prefect's engine would print its traceback above it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], Refusal):
            record.exc_info, record.exc_text = None, None
        return True


def quiet_refusals() -> None:
    """Keep the tracebacks of refusals out of the terminal and of Prefect's pages."""
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(NoTraceback())


def run_pipeline(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Check the recipe, start what is missing, run the flow.

    Returns:
        The run's summary, as written to `runs/<run>/summary.json`.
    """
    load_recipe(recipe, overrides)  # a bad recipe ends here, before anything starts
    with contextlib.ExitStack() as services:
        if "PREFECT_API_URL" not in os.environ:
            from infra.services import embedded_prefect

            print("starting Prefect (SQLite, loopback); 10 to 20 seconds ...", flush=True)
            os.environ["PREFECT_API_URL"] = services.enter_context(embedded_prefect(state_dir()))
            services.callback(os.environ.pop, "PREFECT_API_URL", None)
        from flows.pipeline import drafter_pipeline

        quiet_refusals()
        return drafter_pipeline(recipe, overrides)
