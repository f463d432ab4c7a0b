"""MLflow, by explicit run ids: tasks run in threads and in retries, where MLflow's active-run stack misleads."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

MAX_PARAM = 6000  # MLflow refuses longer parameter values
NOTE = "mlflow.note.content"  # what MLflow's pages show as the description
ENDED = "eyas.ended"  # why a run did not go to its end


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


class Tracker:
    """One MLflow run, with the machine's figures logged beside it until `close`. `child` opens a nested one."""

    def __init__(self, client: MlflowClient, experiment_id: str, run_id: str) -> None:
        self.client, self.experiment_id, self.run_id = client, experiment_id, run_id
        self._machine = SystemMetricsMonitor(run_id, tracking_uri=client.tracking_uri)
        self._machine.start()

    @classmethod
    def open(
        cls, experiment: str, name: str, tags: Mapping[str, str], tracking_uri: str, artifacts: Path | None
    ) -> "Tracker":
        """Start a run in `experiment`, made on first use.

        Args:
            artifacts: folder for the artifacts of a new experiment; None leaves the place to the tracking server.
        """
        client = MlflowClient(tracking_uri=tracking_uri)
        run = client.create_run(experiment_of(client, experiment, artifacts), run_name=name, tags=dict(tags))
        return cls(client, run.info.experiment_id, run.info.run_id)

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> "Tracker":
        """A nested run, shown under this one in MLflow's list."""
        run = self.client.create_run(
            self.experiment_id, run_name=name, tags={**(tags or {}), "mlflow.parentRunId": self.run_id}
        )
        return Tracker(self.client, self.experiment_id, run.info.run_id)

    @property
    def url(self) -> str | None:
        """Its page in MLflow; None where no server shows one (a bare SQLite file)."""
        uri = self.client.tracking_uri
        return (
            f"{uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.run_id}"
            if uri.startswith("http")
            else None
        )

    def params(self, params: Mapping[str, Any]) -> None:
        """Log parameters; MLflow never lets one change afterwards. What is None was left out, and is left out here."""
        rows = [Param(key, str(value)[:MAX_PARAM]) for key, value in params.items() if value is not None]
        for start in range(0, len(rows), 100):  # MLflow takes 100 a call
            self.client.log_batch(self.run_id, params=rows[start : start + 100])

    def metrics(self, metrics: Mapping[str, float | int], step: int = 0) -> None:
        """Log metrics at a step, in one call; values that are not finite are left out, MLflow's plots break on them."""
        now = int(time.time() * 1000)
        rows = [Metric(key, float(value), now, step) for key, value in metrics.items() if _finite(value)]
        self.client.log_batch(self.run_id, metrics=rows)

    def curve(self, name: str, values: Sequence[float], first: int = 1) -> None:
        """Log a row of values as one metric whose steps are their places: acceptance by position, say."""
        now = int(time.time() * 1000)
        rows = [Metric(name, float(value), now, first + n) for n, value in enumerate(values) if _finite(value)]
        self.client.log_batch(self.run_id, metrics=rows)

    def tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags; later values replace earlier ones."""
        self.client.log_batch(self.run_id, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    def describe(self, markdown: str) -> None:
        """Add to the description on the run's page."""
        before = self.client.get_run(self.run_id).data.tags.get(NOTE)
        self.tags({NOTE: f"{before}\n\n{markdown}" if before else markdown})

    def text(self, text: str, name: str) -> None:
        """Keep a small text as an artifact."""
        self.client.log_text(self.run_id, text, name)

    def folder(self, folder: Path, name: str) -> str:
        """Keep a folder as artifacts; returns its `runs:/` address."""
        self.client.log_artifacts(self.run_id, str(folder), name)
        return f"runs:/{self.run_id}/{name}"

    def dataset(self, name: str, digest: str, uri: str, profile: str, context: str = "training") -> None:
        """Log the dataset this run used. MLflow keeps 36 characters of a digest: 32 here, the whole in a tag."""
        entry = Dataset(name=name, digest=digest[:32], source_type="s3", source=f'{{"uri": "{uri}"}}', profile=profile)
        self.client.log_inputs(self.run_id, datasets=[DatasetInput(entry, [InputTag("mlflow.data.context", context)])])
        self.tags({"manifest.sha256": digest, "dataset.uri": uri})

    def close(self, status: str = "FINISHED") -> None:
        """End the run: FINISHED, FAILED or KILLED."""
        self._machine.finish()
        self.client.set_terminated(self.run_id, status)

    def close_after(self, error: BaseException) -> None:
        """End the run as `error` ended it: FAILED, or KILLED by Ctrl-C, SIGTERM or a cancellation; say why in a tag."""
        self.tags({ENDED: (str(error) or repr(error))[:4000]})
        self.close("FAILED" if isinstance(error, Exception) else "KILLED")


def experiment_of(client: MlflowClient, name: str, artifacts: Path | None) -> str:
    """Id of an experiment, made on first use, with a description of what is in it."""
    known = client.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    place = (artifacts / name.replace("/", "_")).as_uri() if artifacts else None
    note = (
        "EAGLE-3 drafters of one target. A run is one pipeline run; below it are its extraction, training and "
        "evaluation, with their own parameters and metrics. `served/<set>/acceptance_length` is the verdict; "
        "`predicted_acceptance_length` is a training metric."
    )
    try:
        return str(client.create_experiment(name, artifact_location=place, tags={NOTE: note}))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run was quicker
            raise
        return experiment_of(client, name, artifacts)


def register_version(
    tracker: Tracker, model: str, source: str, tags: Mapping[str, str], description: str
) -> tuple[str, str]:
    """Make `source` the next version of a registered model and point the alias `candidate` at it.

    Returns:
        (registered model's name, version).
    """
    try:
        tracker.client.create_registered_model(model, description=MODEL_NOTE)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = tracker.client.create_model_version(
        model, source, run_id=tracker.run_id, tags=dict(tags), description=description
    )
    tracker.client.set_registered_model_alias(model, "candidate", version.version)
    return model, str(version.version)


MODEL_NOTE = (
    "EAGLE-3 drafters, one version a pipeline run. `candidate` is the newest; `champion` is the one in production: it "
    "moves only to a version that served better beside it. A version's tag `decision` says why it is champion or not."
)
