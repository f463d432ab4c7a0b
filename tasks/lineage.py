"""Where a drafter comes from: the record in its folder, and which registered ones were trained on a dataset."""

import json
from pathlib import Path
from typing import Any

from hidden_states.errors import DatasetError, ServerError
from tasks.mlflow_client import asking, mlflow_client

FILE = "lineage.json"


def read_lineage(folder: Path) -> dict[str, Any]:
    """Of a drafter's folder; empty for a drafter from elsewhere.

    Raises:
        DatasetError: the record is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        lineage = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(str(path), f"it cannot be read ({error})", "a JSON object", "Export it again.") from error
    if not isinstance(lineage, dict):
        raise DatasetError(
            str(path), f"no object ({type(lineage).__name__})", "a JSON object", "Export the drafter again."
        )
    return lineage


def drafters_of(manifest_digest: str, tracking_uri: str) -> list[str]:
    """`model/version` of every registered drafter whose lineage names this manifest.

    Raises:
        DatasetError: MLflow does not answer, so nobody can say.
    """
    found, token = [], None
    try:
        client = mlflow_client(tracking_uri, ask=False)
        with asking(tracking_uri):
            while True:
                page = client.search_model_versions(max_results=200, page_token=token)
                found += [f"{v.name}/{v.version}" for v in page if v.tags.get("manifest.sha256") == manifest_digest]
                token = page.token
                if not token:
                    return sorted(found)
    except ServerError as error:
        raise DatasetError(
            error.where,
            f"does not say which drafters were trained on this dataset ({error.found})",
            "an answer",
            "Start it (`eyas up`, or MLFLOW_TRACKING_URI), or use --force.",
        ) from error
