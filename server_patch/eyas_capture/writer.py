"""From rows in memory to published dumps: a queue bounded in bytes, threads that write, one rename each.

The forward thread only reserves, copies and submits. Whatever the disk does, the request is answered.
"""

import contextlib
import json
import logging
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from eyas_capture import contract
from eyas_capture.identity import Identity
from eyas_capture.spans import Assembly
from eyas_capture.states import same_tokens, write_all, write_states
from eyas_capture.totals import Totals

logger = logging.getLogger(__name__)

LONGEST_BLOCK = 60.0  # seconds; SGLang's watchdog kills a server whose forward pass hangs for minutes
MOST_THREADS = 4  # some hash while others wait for the disk
NICER = 10  # how much nicer than the rest of the server the writer's threads are: on a shared core, serving comes first
_TICK = 1.0  # seconds between looks at writer.json and at requests that ended without a word
_QUIET = 10.0  # seconds between log lines about the same trouble


def thread_count() -> int:
    """Writer threads: one for every two cores this process may use. More would only be in the forward thread's way."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


class Writer:
    """Publishes dumps of one writing process, and keeps its writer.json true."""

    def __init__(self, identity: Identity, queue_bytes: int, wait_when_full: bool) -> None:
        self.identity = identity
        self.totals = Totals()
        self.state = contract.CAPTURING
        self.refused: list[str] = []
        self.queue_bytes = queue_bytes
        self._wait_when_full = wait_when_full
        self._queue: queue.SimpleQueue[tuple[Assembly, str | None] | None] = queue.SimpleQueue()
        self._room = threading.Condition()  # guards totals and _waiting
        self._waiting = 0  # dumps submitted and not yet written or lost
        self._stopped = threading.Event()
        self._told: dict[str, float] = {}
        self._published: tuple[Any, ...] = ()
        self._publishing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, on_tick: Callable[[], None]) -> None:
        """Publish writer.json and begin; `on_tick` runs about once a second in a thread of the writer's."""
        self.publish()
        self._threads = [
            threading.Thread(target=self._write_loop, name=f"eyas-writer-{n}", daemon=True)
            for n in range(thread_count())
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._tick_loop, args=(on_tick,), name="eyas-tick", daemon=True).start()

    # ---- forward thread

    def next_counter(self) -> int:
        """Take the next dump's number."""
        with self._room:
            self.totals.captured += 1
            return self.totals.captured - 1

    def reserve(self, nbytes: int) -> bool:
        """Claim room for rows; False when the disk is too slow and the user said skip, or waiting took too long.

        Waits only for dumps that are already submitted. Rows of prompts that are still being prefilled can't leave
        before the forward pass that waits here goes on, so for them the limit gives way (and the peak shows it).
        """
        with self._room:
            if self._full(nbytes):
                if self._wait_when_full:
                    started = time.monotonic()
                    self._room.wait_for(lambda: not self._full(nbytes), timeout=LONGEST_BLOCK)
                    self.totals.blocked_seconds += time.monotonic() - started
                if self._full(nbytes):
                    return False
            self.totals.queue_bytes += nbytes
            self.totals.queue_peak_bytes = max(self.totals.queue_peak_bytes, self.totals.queue_bytes)
            return True

    def _full(self, nbytes: int) -> bool:
        return self._waiting > 0 and self.totals.queue_bytes + nbytes > self.queue_bytes

    def submit(self, assembly: Assembly, reason: str | None) -> None:
        """Hand a dump over for writing; `reason` None means complete. Its reservation ends when it is written."""
        with self._room:
            self._waiting += 1
        self._queue.put((assembly, reason))

    def unseen_pass(self) -> None:
        """Count a prefill that should have been captured and went past the hooks."""
        with self._room:
            self.totals.unseen_passes += 1

    def tell(self, what: str, text: str, *args: object) -> None:
        """Log an error, at most one line in a while about the same thing."""
        now = time.monotonic()
        if now - self._told.get(what, -_QUIET) >= _QUIET:
            self._told[what] = now
            logger.error(text, *args)

    # ---- the end

    def stop(self, deadline_s: float) -> bool:
        """Write what is queued and publish the last writer.json; False when the time was not enough."""
        if self._stopped.is_set():
            return True
        for _ in self._threads:
            self._queue.put(None)
        ends = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        drained = not any(thread.is_alive() for thread in self._threads)
        self._stopped.set()
        if self.state == contract.CAPTURING:
            self.state = contract.STOPPED
        self.publish()
        return drained

    def publish(self) -> None:
        """Rewrite writer.json. An unwritable folder is told in the log: it must not stop anything."""
        with self._publishing:
            with self._room:
                totals = self.totals.as_json()
            try:
                self.identity.publish(self.state, self.refused, totals)
                self._published = self._snapshot()
            except OSError as error:
                self.tell("writer.json", "cannot write %s: %s", self.identity.folder / contract.WRITER_FILE, error)

    def _snapshot(self) -> tuple[Any, ...]:
        return (self.state, len(self.refused), json.dumps(self.totals.as_json()))

    # ---- writer threads

    def _tick_loop(self, on_tick: Callable[[], None]) -> None:
        while not self._stopped.wait(_TICK):
            on_tick()
            gone = not (self.identity.folder / contract.WRITER_FILE).exists()
            if gone or self._snapshot() != self._published:
                self.publish()

    def _write_loop(self) -> None:
        _give_way()
        while (item := self._queue.get()) is not None:
            assembly, reason = item
            try:
                self._write(assembly, reason)
            except OSError as error:
                name = error.strerror or type(error).__name__
                self._lose(name)
                self.tell(name, "lost dump %d of request %s: %s", assembly.counter, assembly.request_id, error)
            except Exception as error:  # a defect of ours must cost this dump, not the thread and all later dumps
                self._lose(type(error).__name__)
                logger.exception("lost dump %d of request %s", assembly.counter, assembly.request_id)
            finally:
                assembly.rows, assembly.ids = {}, None
                if assembly.release is not None:
                    assembly.release()
                with self._room:
                    self._waiting -= 1
                    self.totals.queue_bytes -= assembly.nbytes
                    self._room.notify_all()

    def _write(self, assembly: Assembly, reason: str | None) -> None:
        if assembly.fence is not None:
            assembly.fence.synchronize()
        if not same_tokens(assembly):
            reason = contract.TOKENS_DIFFER
            self.tell(reason, "the rows of request %s belong to other tokens than it sent", assembly.request_id)
        folder = os.fspath(self.identity.folder)
        partial = f"{folder}/{contract.partial_name(assembly.counter)}"
        try:
            try:
                os.mkdir(partial)
            except FileNotFoundError:  # deleted under us: make it again, with the file that says whose it is
                self.publish()
                os.mkdir(partial)
            # Nothing is synced: a dump is read within minutes, by a reader that checks its sums. A commit of the disk's
            # journal per dump would cost more than all the rest, and be felt by everybody who uses that disk.
            with _NewFile(f"{partial}/{contract.STATES_FILE}") as states:
                checksums, nbytes = write_states(states, assembly)
            record = _record(assembly, self.identity.writer_id, checksums, reason)
            with _NewFile(f"{partial}/{contract.RECORD_FILE}") as file:
                write_all(file, [memoryview((json.dumps(record) + "\n").encode())])
            os.rename(partial, f"{folder}/{contract.dump_name(assembly.counter)}")
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        with self._room:
            self.totals.bytes += nbytes
            if reason is None:
                self.totals.complete += 1
            else:
                self.totals.incomplete[reason] += 1

    def _lose(self, why: str) -> None:
        with self._room:
            self.totals.lost[why] += 1


def _give_way() -> None:
    """Make this thread nicer, and no other. On Linux a thread's id will do; elsewhere it may be another process's."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)


class _NewFile:
    """A new file's descriptor, closed on leaving: some file systems say only then that the disk is full. (`open` takes
    three times as long.)"""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _record(assembly: Assembly, writer_id: str, checksums: dict[str, str], reason: str | None) -> dict[str, Any]:
    return {
        "contract": contract.VERSION,
        "counter": assembly.counter,
        "request_id": assembly.request_id,
        "writer_id": writer_id,
        "tokens": len(assembly.tokens),
        "spans": [list(span) for span in assembly.spans],
        "prefix_cached": assembly.from_cache,
        "tokens_sha256": contract.tokens_sha256(assembly.tokens),
        "checksums": checksums,
        "written_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "complete": reason is None,
        "incomplete_reason": reason,
    }
