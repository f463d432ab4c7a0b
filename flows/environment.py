"""The process' environment, settled before Prefect or MLflow is imported: both read it at import.

A user's own PREFECT_API_URL, MLFLOW_TRACKING_URI and AWS_ENDPOINT_URL always win. What is left out falls back to the
local stack (`eyas up`) when that runs, else to services that live as long as this command.
"""

import contextlib
import os
from pathlib import Path

from hidden_states.errors import RecipeError
from infra.folders import nearest

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LEVEL": "INFO",
    "PREFECT_CLIENT_MAX_RETRIES": "8",  # with waits that double: a Prefect server may be away for four minutes
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # infra/automations.yaml: a run that stops sending them is gone
    "PREFECT_LOGGING_FORMATTERS_STANDARD_DATEFMT": "%H:%M:%S",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": "%(asctime)s | %(flow_run_name)s | %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": "%(asctime)s | %(task_run_name)s | %(message)s",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def state_dir() -> Path:
    """Where Eyas keeps what outlives a run: services' data, checkpoints, demo assets. `EYAS_HOME`, else ./.eyas

    Raises:
        RecipeError: there is a file of that name, or it can be none.
    """
    folder = Path(os.environ.get("EYAS_HOME") or ".eyas").resolve()
    try:
        there = nearest(folder)
    except OSError as error:
        raise RecipeError(
            "EYAS_HOME", f"it cannot be looked up ({error.strerror})", "a folder", "Name another."
        ) from error
    if not there.is_dir():
        raise RecipeError(f"EYAS_HOME, {there}", "a file", "a folder, or a name that is free", "Name another.")
    return folder


def settle() -> None:
    """Telemetry off, nothing written to the user's home. Call before importing Prefect or MLflow."""
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    if "PREFECT_API_URL" not in os.environ:
        os.environ.setdefault("PREFECT_HOME", str(state_dir() / "prefect"))
        with contextlib.suppress(OSError):  # Prefect makes the last folder only, and warns
            Path(os.environ["PREFECT_HOME"]).parent.mkdir(parents=True, exist_ok=True)
