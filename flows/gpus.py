"""One run at a time uses a host's GPUs, whoever started it: a person, a schedule, a worker.

The slot is Prefect's: a global concurrency limit `eyas-gpus-<host>`, made on first use with one slot, seen (and raised)
on Prefect's page. A run holds it by a lease of a minute that it renews. A run that dies stops renewing; a later one on
the same host does not even wait for that: it finds in a file, by pid and start time, that the holder is gone, and hands
the slot back itself.

A server keeps leases in memory unless it is told otherwise, and slots in its database: restarted, it forgets whose a
slot is, but not that it is taken, and takes the end of a lease it does not know for done. So a run takes a second
lease with the first, on no limit and for a day, its witness. A server that knows neither has forgotten: the slot is
still this run's, and goes back by the limit's name. One that knows the witness alone has taken the slot back.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.logging import get_logger, get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.environment import state_dir
from hidden_states.errors import ServerError
from infra import lifeline
from infra.recipe import Recipe

LEASE_S = 60.0  # the least Prefect takes; a dead holder on another host keeps its slot for so long
WITNESS_S = 86400.0  # the most it takes
RENEW_S = 15.0
ASK_AGAIN_S = 2.0
SAY_S = 60.0  # between two log lines of a run that waits
HOST = "EYAS_GPU_HOST"  # names the host where its own name does not last, as in a container


class GpusBusy(ServerError):
    """Another run holds the GPUs, and the recipe says `schedule.when_busy: skip`."""


Log = Logger | LoggerAdapter[Any]


@dataclass
class Slot:
    """What a run holds, as its record in the state folder says it. `lease`: None once the server took the slot back."""

    limit: str
    lease: str | None
    witness: str | None = None
    forgotten: bool = False

    def write(self, record: Path) -> None:
        """The record, with who this process is."""
        who = {"boot_id": lifeline.boot_id(), **lifeline.identity(os.getpid())}
        record.write_text(json.dumps({"slot": asdict(self), **who}))


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
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1, active=True))
        _hand_back_of_the_dead(client, name, records)
        log = get_run_logger() if flow_run.get_id() else get_logger("eyas")
        slot = Slot(name, _acquire(client, name, recipe.schedule.when_busy == "wait", records, log))
        record = records / f"{slot.lease}.json"
        stack.callback(_release, client, slot, record)
        slot.write(record)
        with contextlib.suppress(httpx.HTTPError):
            _witness(client, slot, record)
        over = threading.Event()
        renewing = threading.Thread(target=_renew, args=(slot, record, over, _holder(), log), daemon=True)
        renewing.start()
        stack.callback(renewing.join)
        stack.callback(over.set)
        yield


def _holder() -> ConcurrencyLeaseHolder | None:
    return ConcurrencyLeaseHolder(type="flow_run", id=UUID(flow_run.get_id())) if flow_run.get_id() else None


def _lease(
    client: SyncPrefectClient, name: str, seconds: float, holder: ConcurrencyLeaseHolder | None = None
) -> str | None:
    """A lease on one slot; None if none is free. A limit that does not exist has room for all."""
    try:
        answer = client.increment_concurrency_slots_with_lease([name], 1, "concurrency", seconds, holder)
    except PrefectHTTPStatusError as error:
        if error.response.status_code != httpx.codes.LOCKED:
            raise
        return None
    return str(answer.json()["lease_id"])


def _knows(client: SyncPrefectClient, lease: str, seconds: float) -> bool:
    """Whether the server has this lease; if so, it now lasts for so long."""
    try:
        client.renew_concurrency_lease(UUID(lease), seconds)
    except PrefectHTTPStatusError as error:
        if error.response.status_code != httpx.codes.GONE:
            raise
        return False
    return True


def _acquire(client: SyncPrefectClient, name: str, wait: bool, records: Path, log: Log) -> str:
    said = 0.0
    while True:
        lease = _lease(client, name, LEASE_S, _holder())
        if lease is not None:
            return lease
        if not wait:
            raise GpusBusy(
                f"Prefect's concurrency limit {name}", "another run holds this host's GPUs", None,
                "This run was skipped, as schedule.when_busy says; `wait` would have it wait its turn.",
            )  # fmt: skip
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            log.info("another run holds this host's GPUs (%s); waiting for it to end", name)
        time.sleep(ASK_AGAIN_S)
        _hand_back_of_the_dead(client, name, records)


def _renew(slot: Slot, record: Path, over: threading.Event, holder: ConcurrencyLeaseHolder | None, log: Log) -> None:
    """Renew until the block ends. A server that is away is asked again: it may come back before the lease runs out."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
        while not over.wait(RENEW_S):
            with contextlib.suppress(httpx.HTTPError, OSError):
                _keep(client, slot, record, holder, log)


def _keep(client: SyncPrefectClient, slot: Slot, record: Path, holder: ConcurrencyLeaseHolder | None, log: Log) -> None:
    """Renew the lease; where it is gone, get the slot again, or say that another run has it."""
    if slot.lease is not None and _knows(client, slot.lease, LEASE_S):
        _witness(client, slot, record)
        return
    if slot.lease is not None and _forgotten(client, slot):
        if not slot.forgotten:
            slot.forgotten = True
            log.warning(
                "Prefect's server has forgotten who holds the GPUs; the slot of %s stays taken, and this run gives it "
                "back at its end. A server that keeps its leases: docs/operating.md, Two runs on one host", slot.limit,
            )  # fmt: skip
        return
    before, slot.lease = slot.lease, _lease(client, slot.limit, LEASE_S, holder)
    if slot.lease == before:  # None
        return
    slot.write(record)
    if slot.lease is not None:
        log.warning("Prefect took the GPUs back while this run could not reach it; this run holds them again")
    else:
        log.error(
            "Prefect took the GPUs back while this run could not reach it, and another run holds them now (%s). Both "
            "use them: cancel one if they are not enough for two", slot.limit,
        )  # fmt: skip


def _witness(client: SyncPrefectClient, slot: Slot, record: Path) -> None:
    """Renew the witness, or take one: it is to be one of the server that knows the lease."""
    if slot.witness is None or not _knows(client, slot.witness, WITNESS_S):
        slot.witness = _lease(client, f"{slot.limit}-witness", WITNESS_S)
        slot.write(record)


def _forgotten(client: SyncPrefectClient, slot: Slot) -> bool:
    """The lease is gone not because it ran out."""
    return slot.witness is not None and not _knows(client, slot.witness, WITNESS_S)


def _release(client: SyncPrefectClient, slot: Slot, record: Path) -> None:
    """Give the slot back. If the server cannot be reached now, the next run on this host does it by the record."""
    with contextlib.suppress(httpx.HTTPError):
        _give_back(client, slot, record)


def _give_back(client: SyncPrefectClient, slot: Slot, record: Path) -> None:
    """By its lease; by the limit's name where the server has forgotten its leases. Never a slot that is another's."""
    if slot.lease is not None and _knows(client, slot.lease, LEASE_S):
        client.release_concurrency_slots_with_lease(UUID(slot.lease))
    elif slot.lease is not None and _forgotten(client, slot):
        with contextlib.suppress(ObjectNotFound):  # somebody has deleted the limit
            taken = client.read_global_concurrency_limit_by_name(slot.limit).active_slots
            if taken > _others(slot, record.parent):
                client.release_concurrency_slots([slot.limit], 1, 1.0)
    record.unlink(missing_ok=True)
    if slot.witness is not None:
        client.release_concurrency_slots_with_lease(UUID(slot.witness))


def _read(record: Path) -> tuple[Slot, bool] | None:
    """A run's slot, and whether the run lives: by pid *and* start time. None: being written, or being removed."""
    try:
        held = json.loads(record.read_text())
        lives = held["boot_id"] == lifeline.boot_id() and lifeline.start_time(held["pid"]) == held["start_time"]
        return Slot(**held["slot"]), lives
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _others(slot: Slot, records: Path) -> int:
    """How many slots of the same limit other living runs on this host hold."""
    read = [found for record in records.glob("*.json") if (found := _read(record)) is not None]
    return sum(lives and s.limit == slot.limit and s.lease not in (None, slot.lease) for s, lives in read)


def _hand_back_of_the_dead(client: SyncPrefectClient, name: str, records: Path) -> None:
    """Slots of this limit whose holders on this host are gone go back at once."""
    for record in records.glob("*.json"):
        found = _read(record)
        if found is None or found[1] or found[0].limit != name:
            continue
        claimed = record.with_suffix(".ended")
        try:
            record.rename(claimed)
        except FileNotFoundError:  # another run hands it back
            continue
        try:
            _give_back(client, found[0], claimed)
        except httpx.HTTPError:  # the next one tries again
            with contextlib.suppress(FileNotFoundError):  # only the witness is left
                claimed.rename(record)
