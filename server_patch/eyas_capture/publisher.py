"""A process of its own that checks sums and writes files; `main` is its program.

In the scheduler's process a second thread of Python takes the interpreter lock from the forward pass again and again,
and each time the pass sleeps and is woken: a dump with 0.7 ms of work held it up for 2.1 ms. Here nobody waits.

Standard library only: it starts in a moment and stays small, however long a prompt is. Standard input is a socket that
keeps messages whole. Each message is JSON, with tuples as lists:

    in    {"folder", "writer_id", "counter", "request_id", "reason": why the dump is incomplete, or null,
           "tokens": S, "cached", "only_tokens": whether the rows follow from them alone,
           "memory": [(offset, bytes, where the ids of its rows begin, rows), ...] of each piece of the shared memory,
           "sent": where the prompt begins in the first piece,
           "rows": [(name, dtype, H, bytes of a row), ...] of each tensor: they follow the ids, one after the other,
           "parts": [(start, stop, piece, row), ...]: rows [start, stop) of the prompt begin at a row of a piece}
    out   {"counter", "bytes": of the file, "reason"} | {"counter", "gone": true}: somebody deleted the folder
           | {"counter", "error": why}

It ends with the socket. When the scheduler is killed, what this process has been sent is still published.
"""

import contextlib
import functools
import hashlib
import json
import mmap
import os
import select
import shutil
import signal
import struct
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from eyas_capture import contract
from eyas_capture.states import Tensor, same_tokens, tensors

_ORDER = 1 << 20  # bytes of one at most; sockets take less
NICER = 10  # than the server: on a shared core, serving comes first, and publishing still gets a tenth
_LOOK = 5.0  # seconds between looks whether the scheduler is still there: a process it forked may hold the socket open
# File systems with large folios (XFS, ext4 since Linux 6.16) look for as much memory in one piece as a call writes, and
# once memory is fragmented, looking costs five times the copy.
_CALL = 256 << 10  # bytes
_HASHED = 4 << 20  # bytes hashed before they are written: few enough to be in the cache still
_MAPPINGS = 64  # pieces kept in this process's addresses: the scheduler uses them again, for other passes


def publish(order: dict[str, Any], memory: int) -> dict[str, Any]:
    """Write one dump; what to answer of it. Raises OSError: then nothing is left of it."""
    folder, counter = order["folder"], order["counter"]
    pieces = [_mapped(memory, offset, size) for offset, size, *_ in order["memory"]]
    reason = order["reason"]
    # A model file changes the ids of a pass where images stand.
    if order["only_tokens"] and not same_tokens(order, pieces):
        reason = contract.TOKENS_DIFFER
    partial, published = f"{folder}/{contract.partial_name(counter)}", f"{folder}/{contract.dump_name(counter)}"
    try:
        os.mkdir(partial)
    except FileExistsError:  # of a process that died over this order
        shutil.rmtree(partial)
        os.mkdir(partial)
    try:
        # Nothing is synced: a dump is read within minutes, by a reader that checks its sums. A commit of the disk's
        # journal per dump would cost more than all the rest, and be felt by everybody who uses that disk.
        with _new_file(f"{partial}/{contract.STATES_FILE}") as file:
            nbytes, checksums = write_states(file, tensors(order), pieces)
        with _new_file(f"{partial}/{contract.RECORD_FILE}") as file:
            write_all(file, memoryview((json.dumps(_record(order, reason, checksums)) + "\n").encode()))
        # Whoever deletes the folder right now may have taken one of the two already.
        for name in (contract.STATES_FILE, contract.RECORD_FILE):
            os.stat(f"{partial}/{name}")
        os.rename(partial, published)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # A process may have died over this order after it had published the dump, and before it could say so.
        if not isinstance(error, OSError) or not os.path.exists(published):
            raise
        nbytes = os.stat(f"{published}/{contract.STATES_FILE}").st_size
    return {"bytes": nbytes, "reason": reason}


def _record(order: dict[str, Any], reason: str | None, checksums: dict[str, str]) -> dict[str, Any]:
    return {
        "contract": contract.VERSION,
        "counter": order["counter"],
        "request_id": order["request_id"],
        "writer_id": order["writer_id"],
        "tokens": order["tokens"],
        "spans": [[start, stop] for start, stop, *_ in order["parts"]],
        "prefix_cached": order["cached"],
        # The sum of the very bytes that identify the prompt.
        "tokens_sha256": checksums[contract.INPUT_IDS].removeprefix(contract.CHECKSUM_PREFIX),
        "checksums": checksums,
        "written_at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "complete": reason is None,
        "incomplete_reason": reason,
    }


def write_states(file: int, parts: list[Tensor], pieces: list[memoryview]) -> tuple[int, dict[str, str]]:
    """states.safetensors from pieces of memory, to an open file: its size, and the checksum of each tensor.

    The safetensors library wants whole contiguous tensors in memory, and a second pass over them for the checksums.
    """
    header, offset, checksums = {}, 0, {}
    for part in parts:
        end = offset + sum(nbytes for *_, nbytes in part.ranges)
        header[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    write_all(file, memoryview(struct.pack("<Q", len(text)) + text))
    for part in parts:
        digest = hashlib.sha256()
        for piece, place, nbytes in part.ranges:
            for start in range(place, place + nbytes, _HASHED):
                data = pieces[piece][start : min(start + _HASHED, place + nbytes)]
                digest.update(data)
                write_all(file, data)
        checksums[part.name] = contract.CHECKSUM_PREFIX + digest.hexdigest()
    return 8 + len(text) + offset, checksums


@functools.lru_cache(_MAPPINGS)
def _mapped(memory: int, offset: int, nbytes: int) -> memoryview:
    """A piece of the shared memory. No other ever begins where one has been."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(memory, nbytes, flags=flags, prot=mmap.PROT_READ, offset=offset))


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[int]:
    """A new file's descriptor. Closing counts: some file systems say only then that the disk is full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield descriptor
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    os.close(descriptor)


def write_all(descriptor: int, view: memoryview) -> None:
    """Write everything: a disk that is nearly full takes a part first, and raises OSError at the rest."""
    while view:
        view = view[os.write(descriptor, view[:_CALL]) :]


def answer(order: dict[str, Any], memory: int) -> dict[str, Any]:
    """What to say of an order when it is done."""
    said: dict[str, Any] = {"counter": order["counter"]}
    try:
        return said | publish(order, memory)
    except FileNotFoundError:
        return said | {"gone": True}
    except OSError as error:
        return said | {"error": error.strerror or str(error)}
    except Exception as error:  # a defect of ours must cost this dump, and none after it
        return said | {"error": f"{type(error).__name__}: {error}"}


def main(memory: int, when_idle: bool) -> None:
    """Publish what is ordered until there is no more. Signals are for the scheduler, which then waits for its queue.

    With `when_idle` only where a core has nothing else to do, so that the forward pass's helpers hardly ever wait for
    it, as far as the system permits that.
    """
    parent, socket = os.getppid(), sys.stdin.fileno()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICER)
    if when_idle:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        while not select.select([socket], [], [], _LOOK)[0]:
            if os.getppid() != parent:
                return
        try:
            message = os.read(socket, _ORDER)
        except ConnectionError:  # it ended with an answer of ours unread: said once, and before the orders that remain
            continue
        if not message:
            return
        said = json.dumps(answer(json.loads(message), memory)).encode()
        with contextlib.suppress(ConnectionError):  # nobody listens any more, and there may be more orders
            os.write(socket, said)
