"""What a run needs around it: its folder, its store, and an honest end in MLflow however it goes."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from flows.environment import state_dir
from flows.gpus import gpus
from flows.runner import quiet_refusals
from flows.snapshot import keep_or_compare
from hidden_states.errors import GateError, RecipeError
from hidden_states.store import Store, open_store
from infra.recipe import Recipe
from infra.recipe import Store as StoreSection
from tasks.events import GATE_FAILED, emit
from tasks.job import Job, new_run_id

_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")  # what boto3 sends


def split_uri(uri: str) -> tuple[str, str]:
    """The store's URI and the name of the dataset that a URI leads to.

    Raises:
        RecipeError: it leads to none.
    """
    scheme, _, rest = uri.partition("://")
    prefix, slash, name = rest.rstrip("/").rpartition("/")
    if scheme not in ("s3", "file") or not slash or not name or (scheme == "s3" and not prefix):
        raise RecipeError(
            uri, "no dataset's URI", "s3://bucket/prefix/dataset or file:///folder/dataset",
            "`eyas datasets list` shows those of a store.",
        )  # fmt: skip
    return f"{scheme}://{prefix or '/'}", name


@contextlib.contextmanager
def open_section(section: StoreSection) -> Iterator[Store]:
    """A recipe's store; the embedded one is started when the recipe asks for S3 and nothing names an endpoint."""
    open_store(section.uri)  # asks nobody, and refuses what is no store before one is started for it
    bucket = section.uri.removeprefix("s3://").partition("/")[0]
    endpoint = section.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    in_bucket = section.uri.startswith("s3://") and _BUCKET.fullmatch(bucket)
    if in_bucket and section.embedded and endpoint is None and section.profile is None:
        from infra.services import embedded_store

        with embedded_store(state_dir(), bucket) as url:
            yield open_store(section.uri, endpoint_url=url, region=section.region)
    else:
        yield open_store(section.uri, endpoint_url=endpoint, region=section.region, profile=section.profile)


@contextlib.contextmanager
def workshop(recipe: Recipe) -> Iterator[Job]:
    """A job with its folder `runs/<run>` and its store, and the host's GPUs to itself. Ends the capture server and the
    MLflow run in every case.

    A failed run's folder is kept: logs, stacks and evidence are in it.

    Raises:
        RecipeError: a retry of a run whose recipe has been edited since.
        GpusBusy: another run holds the GPUs, and the recipe does not wait.
    """
    quiet_refusals()
    with contextlib.ExitStack() as stack:
        keep_or_compare(recipe)
        stack.enter_context(gpus(recipe))
        run_id = new_run_id(recipe)
        folder = Path("runs").resolve() / run_id
        folder.mkdir(parents=True)
        store = stack.enter_context(open_section(recipe.store))
        job = Job(recipe, run_id, folder, state_dir(), store)
        try:
            yield job
        except BaseException as error:
            if job.capture is not None:
                job.capture.stop()
            if job.tracker is not None:
                job.tracker.close_after(error)
            if isinstance(error, GateError):
                emit(GATE_FAILED, f"recipe/{recipe.name}", run=run_id, where=error.where, found=error.found)
            if not any(folder.iterdir()):
                shutil.rmtree(folder)
            raise
