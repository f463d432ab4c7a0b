"""MLflow, by explicit run ids: tasks run in threads and in retries, where MLflow's active-run stack misleads."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelOutput,
    Metric,
    Param,
    RunTag,
)
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from tasks.saved_view import experiment_tags

MAX_PARAM = 6000  # MLflow refuses longer parameter values
NOTE = "mlflow.note.content"  # what MLflow's pages show as the description
ENDED = "eyas.ended"  # why a run did not go to its end


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


class Tracker:
    """One MLflow run. `child` opens a nested one, whose metrics include the machine's until it is closed.

    The outer run has none of them: they would stand before the figures of the verdict wherever runs are compared.
    """

    def __init__(self, client: MlflowClient, experiment_id: str, run_id: str) -> None:
        self.client, self.experiment_id, self.run_id = client, experiment_id, run_id
        self._machine: SystemMetricsMonitor | None = None

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
        nested = Tracker(self.client, self.experiment_id, run.info.run_id)
        nested._machine = SystemMetricsMonitor(nested.run_id, tracking_uri=self.client.tracking_uri)
        nested._machine.start()
        return nested

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
        """Add to the description on the run's page; what stands there already is not said twice."""
        before = self.client.get_run(self.run_id).data.tags.get(NOTE, "")
        if markdown not in before:
            self.tags({NOTE: f"{before}\n\n{markdown}" if before else markdown})

    def text(self, text: str, name: str) -> None:
        """Keep a small text as an artifact."""
        self.client.log_text(self.run_id, text, name)

    def folder(self, folder: Path, name: str) -> str:
        """Keep a folder as artifacts; returns its `runs:/` address."""
        self.client.log_artifacts(self.run_id, str(folder), name)
        return f"runs:/{self.run_id}/{name}"

    def model(self, name: str, folder: Path, params: Mapping[str, Any], tags: Mapping[str, str]) -> LoggedModel:
        """Keep a drafter's folder as a model that this run has made: listed among the experiment's models."""
        made = self.client.create_logged_model(
            self.experiment_id, name=name, source_run_id=self.run_id, model_type="EAGLE-3 drafter", tags=dict(tags),
            params={key: str(value)[:MAX_PARAM] for key, value in params.items() if value is not None},
        )  # fmt: skip
        try:
            self.client.log_model_artifacts(made.model_id, str(folder))
        except BaseException:
            self.client.finalize_logged_model(made.model_id, "FAILED")
            raise
        made = self.client.finalize_logged_model(made.model_id, "READY")
        self.client.log_outputs(self.run_id, [LoggedModelOutput(made.model_id, step=0)])
        return made

    def model_metrics(self, model: LoggedModel, metrics: Mapping[str, float], name: str, digest: str) -> None:
        """Metrics of a model on one set of prompts, which MLflow shows as the dataset they were measured on."""
        now = int(time.time() * 1000)
        rows = [
            Metric(key, float(value), now, 0, model_id=model.model_id, dataset_name=name, dataset_digest=digest[:32])
            for key, value in metrics.items()
            if _finite(value)
        ]
        self.client.log_batch(self.run_id, metrics=rows)

    def rename(self, name: str) -> None:
        """What the run is called in MLflow's list."""
        self.client.update_run(self.run_id, name=name)

    def dataset(self, name: str, digest: str, uri: str, profile: str, context: str = "training") -> None:
        """Log the dataset this run used. MLflow keeps 36 characters of a digest: 32 here, the whole in a tag."""
        entry = Dataset(name=name, digest=digest[:32], source_type="s3", source=f'{{"uri": "{uri}"}}', profile=profile)
        self.client.log_inputs(self.run_id, datasets=[DatasetInput(entry, [InputTag("mlflow.data.context", context)])])
        self.tags({"manifest.sha256": digest, "dataset.uri": uri})

    def close(self, status: str = "FINISHED") -> None:
        """End the run: FINISHED, FAILED or KILLED."""
        if self._machine is not None:
            self._machine.finish()
        self.client.set_terminated(self.run_id, status)

    def close_after(self, error: BaseException) -> None:
        """End the run as `error` ended it: FAILED, or KILLED by Ctrl-C, SIGTERM or a cancellation; say why in a tag."""
        self.tags({ENDED: (str(error) or repr(error))[:4000]})
        self.close("FAILED" if isinstance(error, Exception) else "KILLED")


def experiment_of(client: MlflowClient, name: str, artifacts: Path | None) -> str:
    """Id of an experiment, made on first use, with a description of what is in it and the columns to look at."""
    known = client.get_experiment_by_name(name)
    if known is None:
        place = (artifacts / name.replace("/", "_")).as_uri() if artifacts else None
        try:
            client.create_experiment(name, artifact_location=place)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run was quicker
                raise
        return experiment_of(client, name, artifacts)
    for key, value in experiment_tags().items():
        if key not in known.tags:
            client.set_experiment_tag(known.experiment_id, key, value.replace("EXPERIMENT", known.experiment_id))
    return str(known.experiment_id)


def register_version(
    tracker: Tracker, model: str, source: LoggedModel, tags: Mapping[str, str], description: str
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
        model,
        source.artifact_location,
        run_id=tracker.run_id,
        model_id=source.model_id,
        tags=dict(tags),
        description=description,
    )
    tracker.client.set_registered_model_alias(model, "candidate", version.version)
    return model, str(version.version)


MODEL_NOTE = (
    "EAGLE-3 drafters, one version a pipeline run. `candidate` is the newest; `champion` is the one in production: it "
    "moves only to a version that served better beside it. A version's tag `decision` says why it is champion or not."
)
