"""What a run shows on its page in Prefect: how far it is, tables. A server that is away costs a table, not the run."""

from collections.abc import Callable
from typing import TypeVar, cast
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

T = TypeVar("T")


def shown(make: Callable[[], T]) -> T | None:
    """What making it returns; None, and a line in the log, when Prefect's server does not answer."""
    try:
        return make()
    except httpx.HTTPError as error:
        get_run_logger().warning("not shown on the run's page, Prefect's server does not answer: %s", error)
        return None


class Progress:
    """A bar on the run's page."""

    def __init__(self, key: str, percent: float, words: str) -> None:
        self._key = key
        self._artifact = self._create(percent, words)

    def update(self, percent: float, words: str) -> None:
        """Move it."""
        artifact = self._artifact
        if artifact is None:
            self._artifact = self._create(percent, words)
        else:
            shown(lambda: update_progress_artifact(artifact, percent, words))

    def _create(self, percent: float, words: str) -> UUID | None:
        made = shown(lambda: create_progress_artifact(percent, key=self._key, description=words))
        return cast("UUID | None", made)  # it is a coroutine only inside an event loop
