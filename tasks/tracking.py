"""MLflow, by explicit run ids: tasks run in threads and in retries, where MLflow's active-run stack misleads."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

MAX_PARAM = 6000  # MLflow refuses longer parameter values


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


class Tracker:
    """One MLflow run. `child` opens a nested one; `close` ends it."""

    def __init__(self, client: MlflowClient, experiment_id: str, run_id: str) -> None:
        self.client, self.experiment_id, self.run_id = client, experiment_id, run_id

    @classmethod
    def open(
        cls, experiment: str, name: str, tags: Mapping[str, str], tracking_uri: str, artifacts: Path | None
    ) -> "Tracker":
        """Start a run in `experiment`, made on first use.

        Args:
            artifacts: folder for the artifacts of a new experiment; None leaves the place to the tracking server.
        """
        client = MlflowClient(tracking_uri=tracking_uri)
        known = client.get_experiment_by_name(experiment)
        if known is None:
            place = (artifacts / experiment.replace("/", "_")).as_uri() if artifacts else None
            experiment_id = client.create_experiment(experiment, artifact_location=place)
        else:
            experiment_id = known.experiment_id
        run = client.create_run(experiment_id, run_name=name, tags=dict(tags))
        return cls(client, experiment_id, run.info.run_id)

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> "Tracker":
        """A nested run, shown under this one in MLflow's list."""
        run = self.client.create_run(
            self.experiment_id, run_name=name, tags={**(tags or {}), "mlflow.parentRunId": self.run_id}
        )
        return Tracker(self.client, self.experiment_id, run.info.run_id)

    def params(self, params: Mapping[str, Any]) -> None:
        """Log parameters; MLflow never lets one change afterwards."""
        rows = [Param(key, str(value)[:MAX_PARAM]) for key, value in params.items()]
        for start in range(0, len(rows), 100):  # MLflow takes 100 a call
            self.client.log_batch(self.run_id, params=rows[start : start + 100])

    def metrics(self, metrics: Mapping[str, float | int], step: int = 0) -> None:
        """Log metrics at a step, in one call; values that are not finite are left out, MLflow's plots break on them."""
        now = int(time.time() * 1000)
        rows = [Metric(key, float(value), now, step) for key, value in metrics.items() if _finite(value)]
        self.client.log_batch(self.run_id, metrics=rows)

    def tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags; later values replace earlier ones."""
        self.client.log_batch(self.run_id, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    def text(self, text: str, name: str) -> None:
        """Keep a small text as an artifact."""
        self.client.log_text(self.run_id, text, name)

    def folder(self, folder: Path, name: str) -> str:
        """Keep a folder as artifacts; returns its `runs:/` address."""
        self.client.log_artifacts(self.run_id, str(folder), name)
        return f"runs:/{self.run_id}/{name}"

    def dataset(self, name: str, digest: str, uri: str, profile: str) -> None:
        """Log the dataset this run used. MLflow keeps 36 characters of a digest: 32 here, the whole in a tag."""
        entry = Dataset(name=name, digest=digest[:32], source_type="s3", source=f'{{"uri": "{uri}"}}', profile=profile)
        self.client.log_inputs(
            self.run_id, datasets=[DatasetInput(entry, [InputTag("mlflow.data.context", "training")])]
        )
        self.tags({"manifest.sha256": digest, "dataset.uri": uri})

    def close(self, status: str = "FINISHED") -> None:
        """End the run: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.run_id, status)


def register_version(
    tracker: Tracker, model: str, source: str, tags: Mapping[str, str], description: str
) -> tuple[str, str]:
    """Make `source` the next version of a registered model and point the alias `candidate` at it.

    Returns:
        (registered model's name, version).
    """
    try:
        tracker.client.create_registered_model(model, description="EAGLE-3 drafters, one version a pipeline run")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = tracker.client.create_model_version(
        model, source, run_id=tracker.run_id, tags=dict(tags), description=description
    )
    tracker.client.set_registered_model_alias(model, "candidate", version.version)
    return model, str(version.version)
