"""The flows as deployments of a Prefect server: started from its pages, by schedules, by programs; retried there.

`eyas serve` registers and runs them from this machine and this folder. For work pools `prefect.yaml` registers them.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import httpx
from prefect import Flow
from prefect import serve as prefect_serve
from prefect.client.orchestration import get_client
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.flows import EntrypointType
from prefect.runner import _scheduled_run_poller
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.services import critical_service_loop

from flows.automations import declare
from flows.environment import state_dir
from hidden_states.errors import RecipeError, ServerError
from infra.recipe import Recipe
from infra.recipe_file import load_recipe
from infra.services import PREFECT, LocalStack
from tasks.schedule import schedule

FLOWS: Mapping[str, str] = MappingProxyType(
    {
        "drafter_pipeline": "flows.pipeline",
        "extract": "flows.pipeline",
        "train": "flows.train",
        "evaluate": "flows.evaluate",
    }
)
SCHEDULED = "drafter_pipeline"
WORKER_BACKOFF = 4
WITHOUT_RECIPE = "any-recipe"


def load(name: str) -> Flow[..., Any]:
    """A flow by its name."""
    found: Flow[..., Any] = getattr(importlib.import_module(FLOWS[name]), name)
    return found


def deployments(recipes: Sequence[str]) -> list[RunnerDeployment]:
    """Every flow once per recipe, named after it; the pipeline with the recipe's schedule. And every flow once for a
    recipe that the form asks for.

    Raises:
        RecipeError: a recipe or its schedule cannot be used.
    """
    made = [_deployment(name, WITHOUT_RECIPE) for name in FLOWS]
    for path in recipes:
        recipe = load_recipe(path)
        made += [_deployment(name, recipe.name, path, recipe) for name in FLOWS]
    names = [deployment.full_name for deployment in made]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError("eyas serve", f"two recipes are called alike: {', '.join(twice)}", None, "Rename one.")
    return made


def _deployment(flow: str, name: str, path: str | None = None, recipe: Recipe | None = None) -> RunnerDeployment:
    due = schedule(recipe) if recipe is not None and flow == SCHEDULED else None
    made = load(flow).to_deployment(
        name,
        parameters={"recipe": path} if path else {},
        schedules=[due] if due is not None else [],
        paused=False,
        tags=["eyas"],
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    return cast(RunnerDeployment, made)  # it is a coroutine only inside an event loop


def serve_recipes(recipes: Sequence[str], notify: str | None, keep_schedules: bool = False) -> None:
    """Register the deployments and the automations, then run what is due until Ctrl-C or SIGTERM.

    Args:
        notify: `type/name` of a notification block.
        keep_schedules: leave them on at the end, for another host serves the same deployments.

    Raises:
        ServerError: no Prefect server is named and none is up.
    """
    offered = deployments(recipes)
    url = os.environ.get("PREFECT_API_URL") or LocalStack(state_dir()).url(PREFECT)
    if url is None:
        raise ServerError(
            "Prefect", "no server is named, and none is up", "PREFECT_API_URL, or the local stack",
            "Run `eyas up` first.",
        )  # fmt: skip
    os.environ |= LocalStack(state_dir()).environment() | {"PREFECT_API_URL": url}
    with temporary_settings({PREFECT_API_URL: url}):
        declare(notify)
        # Prefect's runner gives up, and ends its runs, after three failed polls: 30 s. This is what its worker does:
        # four rounds with waits that double, so that a server may be away for seven minutes.
        _scheduled_run_poller.critical_service_loop = partial(critical_service_loop, backoff=WORKER_BACKOFF)
        try:
            prefect_serve(*offered, pause_on_shutdown=False)
        finally:
            if not keep_schedules:
                _pause(offered)


def _pause(offered: Sequence[RunnerDeployment]) -> None:
    """What comes due while nobody serves shall not pile up; the next `eyas serve` resumes the schedules.

    Prefect's runner would do it, but without its server it would ask again for a minute for every deployment.
    """
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
        try:
            for made in offered:
                if made.schedules:
                    with contextlib.suppress(ObjectNotFound):  # removed on its page meanwhile
                        client.pause_deployment(client.read_deployment_by_name(made.full_name).id)
        except (httpx.HTTPError, PrefectException) as error:
            print(
                f"eyas serve: Prefect did not answer ({type(error).__name__}), so the schedules are not paused: what "
                "comes due until the next `eyas serve` waits for it, as Late.",
                file=sys.stderr,
            )
