"""What every step of a pipeline shares: timed, named, never cached, retried only where another try can help."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from hidden_states.errors import Refusal, ServerError, StoreError
from tasks.job import Job

P = ParamSpec("P")
R = TypeVar("R")


def worth_another_try(_: Task[Any, Any], __: TaskRun, state: State[Any]) -> bool:
    """A server or a store may come back; a bad recipe, bad data or a failed gate will not."""
    try:
        state.result()
    except (ServerError, StoreError):
        return True
    except Refusal:
        return False
    except Exception:  # whatever it was, it is no refusal of ours: one of Prefect's retries may pass it
        return True
    return False


def step(
    name: str, *, retries: int = 0, run_name: str | None = None, clocked: bool = True
) -> Callable[[Callable[Concatenate[Job, P], R]], Task[Concatenate[Job, P], R]]:
    """Make a function of a job a Prefect task whose wall time is added to the job's clock under `name`.

    Args:
        clocked: False for steps that run side by side: their seconds would add up to more than the clock's.

    Nothing is cached or persisted: the bucket says what is done, so no stale success can be reused.
    """

    def decorate(function: Callable[Concatenate[Job, P], R]) -> Task[Concatenate[Job, P], R]:
        @functools.wraps(function)
        def timed(job: Job, *args: P.args, **kwargs: P.kwargs) -> R:
            with job.clock(name) if clocked else contextlib.nullcontext():
                return function(job, *args, **kwargs)

        return task(
            name=name,
            task_run_name=run_name or name,
            retries=retries,
            retry_delay_seconds=[2.0 * 2**n for n in range(retries)] or 0,
            retry_jitter_factor=0.5 if retries else None,
            retry_condition_fn=worth_another_try if retries else None,
            cache_policy=NO_CACHE,
            persist_result=False,
        )(timed)

    return decorate
