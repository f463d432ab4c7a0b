"""A local service: what to start, where it listens, and how to tell that it is ready."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx

from hidden_states.errors import ServerError

_LOOK_S = 0.1


@dataclass(frozen=True)
class Service:
    """One local server.

    Attributes:
        env: added to the process' environment; None takes a variable out.
        unready: why it is not ready yet, or None when it is; looked at again and again.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str | None]
    url: str
    unready: Callable[[], str | None]
    deadline_s: float


class Started(Protocol):
    """A started service: an OwnedProcess, or one that outlives the command."""

    def alive(self) -> bool: ...
    def last_lines(self, count: int = 20) -> list[str]: ...


def wait_ready(service: Service, process: Started) -> None:
    """Returns once the service is ready.

    Raises:
        ServerError: it ended, or its deadline passed; with the last lines of its log.
    """
    deadline = time.monotonic() + service.deadline_s
    while True:
        alive = process.alive()
        reason = service.unready() if alive else "it ended"
        if reason is None:
            return
        if not alive or time.monotonic() > deadline:
            state = "ended while starting" if not alive else f"not ready after {service.deadline_s:g} s ({reason})"
            log = "\n  ".join(process.last_lines(30)) or "(no output)"
            raise ServerError(service.name, f"{state}; its last lines:\n  {log}\n", None, "See its log for more.")
        time.sleep(_LOOK_S)


def unready_http(url: str) -> str | None:
    """Why a GET of this URL is not answered with 200 yet; None when it is."""
    try:
        answer = httpx.get(url, timeout=5.0, trust_env=False)  # a proxy for the outside world must not see it
    except httpx.HTTPError as error:
        return type(error).__name__
    return None if answer.status_code == 200 else f"HTTP {answer.status_code}"
