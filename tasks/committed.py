"""A dataset that is committed already: what a training alone begins with. Its conversations need not be at hand."""

from pathlib import Path

from prefect.logging import get_run_logger

from hidden_states.dataset_writer import MANIFEST
from hidden_states.errors import DatasetError
from hidden_states.plan import bytes_per_token
from infra.recipe import Recipe
from tasks.begin import open_run
from tasks.job import Job
from tasks.ledger import Ledger, versions_with
from tasks.planning import Plan, TargetShape
from tasks.step import step


@step("find dataset", retries=2)
def find_dataset(job: Job, name: str | None) -> None:
    """Take the dataset of this name, or the newest committed version of the recipe's; open the MLflow run.

    Raises:
        DatasetError: there is no such committed dataset.
    """
    recipe = job.recipe
    found = name or newest(job)
    if job.store.head(f"{found}/{MANIFEST}") is None:
        raise DatasetError(
            job.store.object_uri(found), "no committed dataset", "a dataset with its manifest",
            "`eyas datasets list` shows what is there; `eyas extract` makes one.",
        )  # fmt: skip
    job.ledger = Ledger(job.store, found, "complete")
    job.objects_before = set(job.ledger.objects())
    job.plan = plan_of_target(recipe)
    job.figures |= {"target": job.target_name}
    job.tracker = open_run(job)
    get_run_logger().info("training on %s", job.ledger.uri)


def newest(job: Job) -> str:
    """Name of the newest committed version of the recipe's dataset.

    Raises:
        DatasetError: none is committed.
    """
    base = job.recipe.dataset.name or job.recipe.name
    versions = versions_with(MANIFEST, job.store, base)
    if not versions:
        raise DatasetError(
            job.store.object_uri(base), "no committed version of this dataset", "one that `eyas extract` has made",
            "Run `eyas extract` with this recipe first, or name a dataset.",
        )  # fmt: skip
    return f"{base}-v{max(versions)}"


def plan_of_target(recipe: Recipe) -> Plan:
    """A plan without samples: the target's shape is all a training needs of it."""
    shape = TargetShape.read(Path(recipe.target.model_path), recipe.target.dtype)
    size = bytes_per_token(shape.hidden_size, len(recipe.capture.blocks), shape.dtype)
    return Plan(shape, size, [], [], frozenset(), None, (), recipe, 0)
