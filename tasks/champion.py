"""Which drafter is in production: the alias `champion` of the registered model, earned by serving beside the last one.

    candidate    the version the last run made
    champion     moves only when the new version is better than the last champion on the same prompts, answered in the
                 same run: on every required set the lower end of the 95% interval of the paired difference must be
                 above `register.margin`

Every move is kept in the registered model's tag `champion.history`, so that one command goes back. On PostgreSQL and
MySQL such a tag holds 5,000 characters: what would no longer fit moves on to `champion.history.0`, `.1`, ...
"""

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from prefect.logging import get_run_logger

from drafter.diagnosis import DTYPE
from hidden_states.errors import DatasetError, Refusal, ServerError
from tasks.comparison import Side
from tasks.evaluation import compare
from tasks.events import CHAMPION_MOVED, emit
from tasks.intervals import FEWEST, Paired
from tasks.job import Job, need
from tasks.mlflow_client import asking
from tasks.serving import evaluate, put_figures
from tasks.stale import keep_measurement, staleness
from tasks.step import step

CHAMPION, HISTORY = "champion", "champion.history"
LONGEST_TAG, LONGEST_REASON = 5000, 700  # characters; a reason's may take six each in JSON


@dataclass(frozen=True)
class Move:
    """One entry of the history. `by` is a run, or `hand`; `version` None = no champion."""

    version: str | None
    at: str
    by: str
    why: str


class Champions:
    """The champion of one registered model."""

    def __init__(self, client: MlflowClient, model: str) -> None:
        self.client, self.model = client, model

    @property
    def version(self) -> str | None:
        """The champion's version; None when there is none."""
        try:
            return self.named(CHAMPION)
        except DatasetError:
            return None

    def named(self, alias: str) -> str:
        """The version an alias points at.

        Raises:
            DatasetError: there is no such alias.
        """
        with self._asking(f"{self.model}@{alias}", "no such alias"):
            return str(self.client.get_model_version_by_alias(self.model, alias).version)

    def history(self) -> list[Move]:
        """Every move so far, oldest first.

        Raises:
            DatasetError: there is no such model, or its tag was written by hand.
        """
        with self._asking(self.model, "no registered model of this name"):
            tags = self.client.get_registered_model(self.model).tags
        try:
            return [Move(**entry) for name in self._pages(tags) for entry in json.loads(tags.get(name, "[]"))]
        except (ValueError, TypeError) as error:
            raise DatasetError(
                f"{self.model}, tag {HISTORY}", f"not a history ({error})", "a JSON list of moves", "Delete the tag."
            ) from error

    def move(self, version: str, by: str, why: str) -> None:
        """Make a version the champion; Prefect hears of it.

        Raises:
            DatasetError: there is no such version.
        """
        self.history()  # a tag that cannot be read is said before anything moves
        before, why = self.version, why[:LONGEST_REASON]
        with self._asking(f"{self.model} version {version}", "no such version"):
            version = str(self.client.get_model_version(self.model, version).version)
            self.client.set_registered_model_alias(self.model, CHAMPION, version)
        self._remember(Move(version, datetime.now(UTC).isoformat(timespec="seconds"), by, why))
        emit(CHAMPION_MOVED, f"model/{self.model}", version=version, before=before, by=by, why=why)

    def _remember(self, move: Move) -> None:
        with self._asking(self.model, "no registered model of this name"):
            tags = self.client.get_registered_model(self.model).tags
            newest = tags.get(HISTORY, "[]")
            text = json.dumps([*json.loads(newest), asdict(move)])
            if len(text) > LONGEST_TAG:
                older = f"{HISTORY}.{len(self._pages(tags)) - 1}"
                self.client.set_registered_model_tag(self.model, older, newest)
                text = json.dumps([asdict(move)])
            self.client.set_registered_model_tag(self.model, HISTORY, text)

    @staticmethod
    def _pages(tags: dict[str, str]) -> list[str]:
        """Names of the tags of the history, oldest first."""
        return [*takewhile(tags.__contains__, (f"{HISTORY}.{n}" for n in count())), HISTORY]

    def back(self, why: str) -> str:
        """Go back to the champion before this one; its version.

        Raises:
            DatasetError: there was none before.
        """
        now, before = self.version, [m.version for m in self.history()]
        earlier = [version for version in before if version is not None and version != now]
        if not earlier:
            raise DatasetError(self.model, "no champion before this one", None, "Choose a version with --set.")
        self.move(earlier[-1], "hand", why)
        return earlier[-1]

    def download(self, version: str, folder: Path) -> Path:
        """The drafter's folder, for SGLang, with its newest evaluation.

        Raises:
            DatasetError: there is no such version.
        """
        client, tracking = self.client, self.client.tracking_uri
        with self._asking(f"{self.model} version {version}", "no such version"):
            source = client.get_model_version_download_uri(self.model, version)
            newest = client.get_model_version(self.model, version).tags.get("evaluation.source")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with self._asking(f"{self.model} version {version}", "its files are not there"):
                found = Path(download_artifacts(artifact_uri=source, dst_path=str(folder), tracking_uri=tracking))
                if newest is not None:
                    download_artifacts(artifact_uri=newest, dst_path=str(found), tracking_uri=tracking)
        except ServerError as error:  # MLflow has just answered: it is the files
            raise DatasetError(
                f"{self.model} version {version}", f"its files cannot be fetched: {error.found}", f"them in {source}",
                "Was the folder of MLflow's artifacts moved?",
            ) from error  # fmt: skip
        return found

    def _asking(self, where: str, found: str) -> AbstractContextManager[None]:
        do = "MLflow's page lists what there is: `eyas up`."
        return asking(self.client.tracking_uri, DatasetError(where, found, None, do))


def model_name(job: Job) -> str:
    """The registered model of this run's drafters."""
    return job.recipe.register_.model_name or f"eagle3-{job.target_name}"


def champions(job: Job) -> Champions:
    """Of the model this run registers its drafter under."""
    return Champions(need(job.tracker, "MLflow run").client, model_name(job))


@step("serve and measure champion", retries=1)
def measure_champion(job: Job) -> None:
    """Serve the champion on this run's prompts, and compare; nothing to do without one.

    Its figures of before are stale when target, template or engine have changed since: that is said, and what is
    measured now takes their place.
    """
    known = champions(job)
    version = known.version
    if version is None:
        return
    figures, log = job.figures, get_run_logger()
    figures["champion_version"] = version
    try:
        folder = known.download(version, job.folder / "champion")
        stale = figures["champion_stale"] = staleness(job, folder, known.model, version)
        served = evaluate(job, "champion", folder)
    except Refusal as error:  # no reason to lose the new drafter; the decision says it
        figures["champion_not_served"] = str(error)
        log.warning("version %s, the champion, could not be served: %s", version, error)
        return
    put_figures(job, "champion", served)
    job.champion = Side.of(replace(served, name=f"{known.model}/{version}"), folder, known.client)
    if stale:
        keep_measurement(job, known, version, served, stale)
    try:
        result = compare(need(job.evaluation, "evaluation"), served)
    except DatasetError as error:  # too few prompts: the decision says it, set by set
        log.warning("the champion, version %s, was served, but not compared: %s", version, error)
        return
    figures["versus_champion_sets"] = {key: _rounded(found) for key, found in result.sets.items()}
    if result.overall is not None:
        figures["versus_champion"] = _rounded(result.overall)
    for key, found in result.sets.items():
        log.info("%s, against the champion, version %s: %.3f / %.3f; difference %+.3f, 95%% interval [%+.3f, %+.3f]",
                 key, version, found.one, found.other, found.difference, found.low, found.high)  # fmt: skip


def _rounded(result: Paired) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(result).items()}


@step("decide")
def decide(job: Job) -> None:
    """Make the new version the champion, or say why not. No reason to fail: a drafter that is no better is a result."""
    against = reasons_against(job)
    known, figures = champions(job), job.figures
    before = figures.get("champion_version")
    version = figures["model_version"]
    if against:
        figures |= {"promoted": False, "decision": f"version {version} is not made champion: {'; '.join(against)}"}
    else:
        leads = [figures["versus_champion_sets"][name]["low"] for name in required_sets(job)] if before else []
        why = "the first one"
        if leads:
            why = f"better than version {before} by {min(leads):+.3f} at least on every required set"
        known.move(version, job.run_id, why)
        figures |= {"promoted": True, "decision": f"version {version} is the champion now: {why}"}
    known.client.set_model_version_tag(known.model, version, "decision", figures["decision"])
    get_run_logger().info("%s", figures["decision"])


@step("decide")
def decide_unregistered(job: Job) -> None:
    """Say of a drafter that is only a folder what the gate would say."""
    against = "; ".join(reasons_against(job))
    verdict = f"it would not be made champion either: {against}" if against else "on these figures it could be champion"
    job.figures |= {"promoted": False, "decision": f"the drafter is not registered; {verdict}"}
    get_run_logger().info("%s", job.figures["decision"])


def reasons_against(job: Job) -> list[str]:
    """Why the new version may not become the champion; none = it may."""
    recipe, figures = job.recipe, job.figures
    if not recipe.register_.promote:
        return ["register.promote is false"]
    if "served_acceptance_length" not in figures:
        return ["it was not served"]
    reasons = []
    served, least = figures["served_acceptance_length"], recipe.evaluate.min_acceptance_length
    for name, found in figures["served_sets"].items():
        if "outputs_equal" in found and (differing := found["prompts"] - found["outputs_equal"]):
            reasons.append(f"set {name}: {differing} of {found['prompts']} outputs differ from plain decoding")
    if least is not None and served < least:
        reasons.append(f"served acceptance {served:.3f} is below evaluate.min_acceptance_length, {least:g}")
    control = figures.get("control_acceptance_length")
    if control is not None and served <= control:
        reasons.append(f"served acceptance {served:.3f} is no better than before training, {control:.3f}")
    prediction = figures.get("prediction", {})
    if prediction.get("gap", 0.0) > prediction.get("bound", 0.0):
        found = prediction["cause"] or "no cause was found"
        reasons.append(
            f"it serves worse than it was predicted to (replayed {prediction['replayed']:.3f}, served "
            f"{prediction['served']:.3f}): {found}"
        )
    elif spoiled := [name for name in prediction.get("differs", []) if name != DTYPE]:
        reasons.append(f"it is served otherwise than it was trained: {', '.join(spoiled)}")
    missing = [key for key in ("manifest_digest", "fingerprint", "dataset_uri") if not figures.get(key)]
    if missing:
        reasons.append(f"its lineage lacks {', '.join(missing)}")
    return reasons + _against_champion(job)


def required_sets(job: Job) -> list[str]:
    """Sets on which a drafter must lead: the recipe's choice, else every one that was answered greedily."""
    chosen = job.recipe.evaluate.required
    if chosen is not None:
        return chosen
    return [name for name, found in job.figures["served_sets"].items() if "outputs_equal" in found]


def _against_champion(job: Job) -> list[str]:
    figures, margin = job.figures, job.recipe.register_.margin
    version = figures.get("champion_version")
    if version is None:
        return []
    if "champion_not_served" in figures:
        return [f"the champion, version {version}, could not be served beside it"]
    reasons = []
    for name in required_sets(job):
        result = figures.get("versus_champion_sets", {}).get(name)
        if result is None:
            count = figures["served_sets"].get(name, {}).get("prompts", 0)
            reasons.append(
                f"set {name}: {count} prompts are too few to compare it with version {version}; {FEWEST} at least"
            )
        elif not result["low"] > margin:  # an interval that cannot be had is no lead either
            interval = f"[{result['low']:+.3f}, {result['high']:+.3f}]"
            reasons.append(
                f"set {name}: against version {version} the difference is {result['difference']:+.3f}, 95% interval "
                f"{interval}, which does not lie above {margin:g}"
            )
    return reasons
