"""What MLflow's own pages show of an experiment at first sight: its kind, its description, the columns of the verdict.

MLflow keeps saved views in tags of the experiment (seen in 3.17.2, where its page writes them; it is not documented).
Without it the run list shows no metric at all. A later MLflow that does not know the tag ignores it.
"""

import base64
import json
import time
import zlib

VIEW, NAME = "eyas-verdict", "Verdict"
MODELS = "workflowType=machine_learning"  # of MLflow's two kinds of pages those about models, not about applications
METRICS = (
    "served_acceptance_length", "served_speed_up", "predicted_acceptance_length", "champion_acceptance_length",
    "control_acceptance_length", "samples_valid", "train_steps", "loss_last",
)  # fmt: skip
COLUMNS = [*(f"metrics.`{name}`" for name in METRICS), "tags.`decision`", "attributes.`Models`"]


def experiment_tags() -> dict[str, str]:
    """Tags of a new experiment."""
    return {
        "mlflow.experimentKind": "custom_model_development",  # else it opens on pages for language-model applications
        f"mlflow.sharedViewState.{VIEW}": saved_view(),
        "mlflow.note.content": (
            "EAGLE-3 drafters of one target. A run is one pipeline run; below it are its extraction, training and "
            "evaluation, with their own parameters and metrics. `served_acceptance_length` (held-out prompts; other "
            "sets: `served/<set>/...`) is the verdict; `predicted_acceptance_length` is a training metric. "
            f"[The columns that matter](#/experiments/EXPERIMENT/runs?{MODELS}&viewStateShareKey={VIEW}): also under "
            "*Views*."
        ),
    }


def saved_view() -> str:
    """The view, as MLflow's page would keep it."""
    state = {
        "searchFilter": "", "orderByKey": "attributes.start_time", "orderByAsc": False, "startTime": "ALL",
        "lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs",
        "selectedColumns": COLUMNS, "columnOrder": COLUMNS, "columnWidths": dict.fromkeys(COLUMNS[:8], 190),
        "runsHiddenMode": "FIRST_10_RUNS",
        "viewMaximized": False, "runListHidden": False, "isAccordionReordered": False,
        "useGroupedValuesInCharts": True, "hideEmptyCharts": True, "groupBy": None, "groupsExpanded": {},
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }  # fmt: skip
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    now = int(time.time() * 1000)
    return json.dumps({"name": NAME, "createdAt": now, "updatedAt": now, "state": f"deflate;{packed}"})
