"""A local service: what to start, where it listens, and how to tell that it is ready."""

import contextlib
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx

from hidden_states.errors import ServerError

# Below Linux's range for outgoing connections, so that nothing takes a port between the look and the use; with
# 10,000 added it still is. Below SGLang's ports too, which are bound long after they were chosen.
_PORTS = range(10_000, 20_000)
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
            log = "\n  ".join(process.last_lines(12)) or "(no output)"
            raise ServerError(service.name, f"{state}; its last lines:\n  {log}\n", None, "See its log for more.")
        time.sleep(_LOOK_S)


def unready_http(url: str) -> str | None:
    """Why a GET of this URL is not answered with 200 yet; None when it is."""
    try:
        answer = httpx.get(url, timeout=5.0, trust_env=False)  # a proxy for the outside world must not see it
    except httpx.HTTPError as error:
        return type(error).__name__
    return None if answer.status_code == 200 else f"HTTP {answer.status_code}"


def free_ports(count: int, also_at: int = 0) -> int:
    """The first of `count` free loopback ports in a row; those `also_at` higher are free too."""
    for _ in range(1000):
        first = random.choice(_PORTS)
        wanted = range(first, first + count)
        if wanted.stop <= _PORTS.stop and all(_is_free(port) and _is_free(port + also_at) for port in wanted):
            return first
    raise ServerError("127.0.0.1", f"no {count} free ports in a row", None, "End what listens there.")


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closed connection is no obstacle
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
