"""One run at a time uses a host's GPUs, whoever started it: a person, a schedule, a worker.

The slot is Prefect's: a global concurrency limit `eyas-gpus-<host>`, made on first use with one slot, seen (and raised)
on Prefect's page. A run holds it by a lease of a minute that it renews. A run that dies stops renewing; a later one on
the same host does not even wait for that: it finds in a file, by pid and start time, that the holder is gone, and hands
the lease back itself.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.environment import state_dir
from hidden_states.errors import ServerError
from infra import lifeline
from infra.recipe import Recipe

LEASE_S = 60.0  # the least Prefect takes; a dead holder on another host keeps its slot for so long
RENEW_S = 15.0
ASK_AGAIN_S = 2.0
SAY_S = 60.0  # between two log lines of a run that waits
HOST = "EYAS_GPU_HOST"  # names the host where its own name does not last, as in a container


class GpusBusy(ServerError):
    """Another run holds the GPUs, and the recipe says `schedule.when_busy: skip`."""


def limit_name() -> str:
    """The limit of this host."""
    return f"eyas-gpus-{os.environ.get(HOST) or socket.gethostname()}"


@contextlib.contextmanager
def gpus(recipe: Recipe) -> Iterator[None]:
    """Hold the host's GPUs within the block; wait for them, or not, as the recipe says.

    Raises:
        GpusBusy: they are in use, and the recipe does not wait.
    """
    with get_client(sync_client=True) as client, contextlib.ExitStack() as stack:
        name, records = limit_name(), state_dir() / "gpus"
        records.mkdir(parents=True, exist_ok=True)
        record = records / f"{os.getpid()}.json"
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1, active=True))
        _hand_back_of_the_dead(client, records)
        lease = _acquire(client, name, recipe.schedule.when_busy == "wait", records)
        stack.callback(_release, client, name, lease, record)
        record.write_text(json.dumps({"lease": str(lease), "boot_id": lifeline.boot_id(),
                                      **lifeline.identity(os.getpid())}))  # fmt: skip
        over = threading.Event()
        stack.callback(over.set)
        threading.Thread(target=_renew, args=(lease, over), name="gpu-lease", daemon=True).start()
        yield


def _acquire(client: SyncPrefectClient, name: str, wait: bool, records: Path) -> UUID:
    holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(flow_run.get_id())) if flow_run.get_id() else None
    said = 0.0
    while True:
        try:
            answer = client.increment_concurrency_slots_with_lease([name], 1, "concurrency", LEASE_S, holder)
            return UUID(answer.json()["lease_id"])
        except PrefectHTTPStatusError as error:
            if error.response.status_code != httpx.codes.LOCKED:
                raise
        if not wait:
            raise GpusBusy(
                f"Prefect's concurrency limit {name}", "another run holds this host's GPUs", None,
                "This run was skipped, as schedule.when_busy says; `wait` would have it wait its turn.",
            )  # fmt: skip
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            get_run_logger().info("another run holds this host's GPUs (%s); waiting for it to end", name)
        time.sleep(ASK_AGAIN_S)
        _hand_back_of_the_dead(client, records)


def _renew(lease: UUID, over: threading.Event) -> None:
    """Renew until the block ends. A server that is away is asked again: it may come back before the lease runs out."""
    with get_client(sync_client=True) as client:
        while not over.wait(RENEW_S):
            with contextlib.suppress(httpx.HTTPError):
                client.renew_concurrency_lease(lease, LEASE_S)


def _release(client: SyncPrefectClient, name: str, lease: UUID, record: Path) -> None:
    """Give the slot back. A server that cannot be reached now takes it back by itself when the lease runs out."""
    record.unlink(missing_ok=True)
    try:
        client.release_concurrency_slots_with_lease(lease)
    except PrefectHTTPStatusError:
        # A server that keeps leases in memory forgets them in a restart, but not that the slot is taken.
        with contextlib.suppress(httpx.HTTPError):
            client.release_concurrency_slots([name], 1, 0.0)
    except httpx.HTTPError:
        pass


def _hand_back_of_the_dead(client: SyncPrefectClient, records: Path) -> None:
    """Leases whose holders on this host are gone, by pid *and* start time, go back at once."""
    for record in records.glob("*.json"):
        try:
            held = json.loads(record.read_text())
            lease, pid, since = UUID(held["lease"]), int(held["pid"]), held["start_time"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # being written, or being removed
            continue
        if held.get("boot_id") == lifeline.boot_id() and lifeline.start_time(pid) == since:
            continue
        record.unlink(missing_ok=True)
        with contextlib.suppress(httpx.HTTPError):  # it has run out already
            client.release_concurrency_slots_with_lease(lease)
