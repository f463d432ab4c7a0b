"""The drafter that `eyas evaluate` measures: a folder, a registered version, or the champion; and what comes of it."""

import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from prefect.logging import get_run_logger

from drafter.config import read_target_config
from drafter.inspect import DRAFTERS
from hidden_states.errors import DatasetError
from tasks.begin import tracking_uri
from tasks.champion import Champions, model_name
from tasks.job import Job, need
from tasks.lineage import read_lineage
from tasks.registry import clean_up, summarise
from tasks.stale import keep_measurement, staleness
from tasks.step import step

NAME, DOWNLOAD = "drafter", "download"  # in the run's folder: a link to the drafter, and what was fetched of it


@dataclass(frozen=True)
class Candidate:
    """Attributes:
    name: as the user wrote it, or `MODEL/VERSION` of the champion.
    known: its registered model; None for a folder.
    version: None for a folder.
    lineage: `lineage.json` of its folder; empty for a drafter from elsewhere.
    is_champion: it is the version in production.
    """

    name: str
    known: Champions | None
    version: str | None
    lineage: dict[str, Any]
    is_champion: bool

    @property
    def dataset(self) -> str | None:
        """Name of the dataset it was trained on; None = not known, the recipe's newest takes its place."""
        uri = self.lineage.get("dataset_uri")
        return None if uri is None else str(uri).rstrip("/").rpartition("/")[2]


@step("find drafter", retries=2)
def find_drafter(job: Job, name: str | None) -> Candidate:
    """Put a link to the drafter at `runs/<run>/drafter`.

    Args:
        name: `MODEL/VERSION`, `MODEL@ALIAS`, a folder, or None = the champion of the recipe's model.

    Raises:
        DatasetError: there is no such drafter, or the folder holds none.
        TrainingError: the folder has no config.json that can be read.
    """
    place = job.folder / NAME
    if name is not None and os.path.isdir(name):  # False, too, for a name no file can have
        _refuse_what_is_no_drafter(name)
        place.symlink_to(Path(name).resolve(), target_is_directory=True)
        return Candidate(name, None, None, read_lineage(place), False)
    model, at, version = (name or "").rpartition("@" if "@" in (name or "") else "/")
    if name is not None and not model:
        raise DatasetError(
            name,
            "neither a folder nor MODEL/VERSION nor MODEL@ALIAS",
            "a drafter",
            "MLflow's page lists the versions: `eyas up`.",
        )
    known = Champions(MlflowClient(tracking_uri=tracking_uri(job.state)), model or model_name(job))
    champion = known.version
    if name is None and champion is None:
        raise DatasetError(known.model, "no champion", "one to measure", "Name a drafter: --drafter MODEL/VERSION.")
    if model and model != model_name(job):
        raise DatasetError(
            str(name), "a version of another model", f"one of {model_name(job)}, whose champion it is held against",
            f"Add register.model_name={model} to the command.",
        )  # fmt: skip
    version = known.named(version) if at == "@" else version or str(champion)
    found = known.download(version, job.folder / DOWNLOAD)
    place.symlink_to(found, target_is_directory=True)
    return Candidate(f"{known.model}/{version}", known, version, read_lineage(place), version == champion)


def _refuse_what_is_no_drafter(folder: str) -> None:
    """Before a server starts: SGLang would load the target's folder, say, and end long after."""
    found = read_target_config(folder).get("architectures")
    if not isinstance(found, list) or not any(name in DRAFTERS for name in found):
        raise DatasetError(
            folder, f"architectures is {found}", f"a drafter that SGLang serves: {' or '.join(DRAFTERS)}",
            f"`eyas inspect {folder}` says what is there.",
        )  # fmt: skip


@step("open its dataset", retries=2)
def open_its_dataset(job: Job, candidate: Candidate) -> None:
    """The dataset that the drafter was trained on: its held-out prompts, and what no prompt may be in.

    The target need not be the one it was captured from: that is what a stale evaluation is measured again for.
    """
    dataset = job.dataset = need(job.ledger, "dataset").dataset()
    lineage = candidate.lineage
    said = lineage.get("manifest_digest")
    if said not in (None, dataset.digest):
        raise DatasetError(
            dataset.uri, f"manifest {dataset.digest[:16]}", f"{str(said)[:16]}, which {candidate.name} was trained on",
            "It was made anew since: put the old one back, or train again.",
        )  # fmt: skip
    job.figures |= {
        "drafter": candidate.name,
        "dataset_uri": dataset.uri,
        "manifest_digest": dataset.digest if said else None,
        "fingerprint": lineage.get("fingerprint"),
        "predicted_acceptance_length": lineage.get("predicted_acceptance_length"),
    }
    if said is None:
        get_run_logger().warning(
            "%s has no lineage: its prompts were checked against %s, which it may not have been trained on",
            candidate.name, dataset.uri,
        )  # fmt: skip


@step("keep evaluation", retries=1)
def keep(job: Job, candidate: Candidate) -> None:
    """Write `evaluation.json` into the drafter's folder, log it to MLflow, and bring a registered version's tags up to
    date; says whether its last evaluation was stale."""
    found, figures = need(job.evaluation, "evaluation"), job.figures
    tracker = need(job.tracker, "MLflow run")
    folder = job.folder / NAME
    if candidate.is_champion:
        figures["decision"] = f"version {candidate.version} is the champion; it was measured again"
    if candidate.known is not None and candidate.version is not None:
        figures["stale"] = staleness(job, folder, candidate.known.model, candidate.version)
        keep_measurement(job, candidate.known, candidate.version, found, figures["stale"])
        tracker.tags({"drafter.version": candidate.name})
        figures |= {"model_name": candidate.known.model, "model_version": candidate.version}
    else:
        found.write(folder)
    path = found.write(job.folder)
    figures["evaluation_path"] = str(path)
    tracker.text(path.read_text(encoding="utf-8"), path.name)
    tracker.tags({"drafter": candidate.name, "eyas.evaluated": datetime.now(UTC).isoformat(timespec="seconds")})


def finish_evaluation(job: Job) -> dict[str, Any]:
    """The end of an evaluation: its summary. Nothing of the dataset is closed, nothing is registered."""
    summary = summarise(job, {})
    need(job.tracker, "MLflow run").close("FINISHED")
    clean_up(job)
    (job.folder / NAME).unlink()
    shutil.rmtree(job.folder / DOWNLOAD, ignore_errors=True)
    return summary
