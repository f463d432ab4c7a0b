"""From rows in memory to published dumps: a queue bounded in bytes, processes that write, one rename each.

The forward thread only reserves, copies and submits. Whatever the disk does, the request is answered. No thread of ours
takes part: each time one wakes up, it takes Python's interpreter lock from the forward pass.
"""

import json
import logging
import math
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eyas_capture import contract
from eyas_capture.handover import RELIEF, Handover
from eyas_capture.identity import Identity
from eyas_capture.memory import SharedMemory
from eyas_capture.rows import RowCopier
from eyas_capture.spans import Assembly
from eyas_capture.totals import Totals

logger = logging.getLogger(__name__)

LONGEST_BLOCK = 60.0  # seconds; SGLang's watchdog kills a server whose forward pass hangs for minutes
MOST_PROCESSES = 4  # some hash while others wait for the disk
_MOST_WAITING = 16_384  # dumps, or pieces of memory: a process may have 65,530 of these, and each is a descriptor
_TICK = 0.1  # seconds between looks at what was written, when no forward pass has looked since the last
_SLOW_TICK = 1.0  # seconds between looks at writer.json and at requests that ended without a word
_GONE_TRIES = 3  # at a dump whose folder is deleted again and again
_QUIET = 10.0  # seconds between log lines about the same trouble


def process_count() -> int:
    """Publisher processes at most: one for every two cores this process may use."""
    return max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))


@dataclass(eq=False)
class _Dump:
    assembly: Assembly
    reason: str | None
    tries: int = 0

    def landed(self) -> bool:
        """Whether all its rows are in memory."""
        fence = self.assembly.fence
        return fence is None or bool(fence.query())


class Writer:
    """Publishes dumps of one writing process, and keeps its writer.json true."""

    def __init__(
        self, identity: Identity, queue_bytes: int, wait_when_full: bool, device: torch.device | None = None
    ) -> None:
        """`device` is where rows come from; None is the CPU."""
        self.identity = identity
        self.totals = Totals()
        self.state = contract.CAPTURING
        self.refused: list[str] = []
        self.queue_bytes = queue_bytes
        self.memory = SharedMemory(queue_bytes // 4, device)
        self.copier = RowCopier(device or torch.device("cpu"), self.memory)
        self.ending = False  # no more rows are taken
        self._device = device
        self._most_waiting = min(_MOST_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._wait_when_full = wait_when_full
        self._lock = threading.RLock()  # the forward thread, the tick and the end
        self._handover = Handover(self.memory.descriptor, process_count())
        self._copied: deque[_Dump] = deque()  # submitted, their last rows perhaps still on the way from the GPU
        self._ordered: dict[int, _Dump] = {}  # by counter: with a publisher
        self._abandoned: list[_Dump] = []  # lost, and their memory never used again: a GPU may still copy into it
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        self._drained = False
        self._relief_ends = math.inf  # what a publisher has in the last moments it will still do, if late
        self._looked = False  # since the last tick
        self._stuck = False  # waiting for room took too long, and no dump has been written since
        self._told: dict[str, float] = {}
        self._published: tuple[Any, ...] = ()
        self._publishing = threading.Lock()
        self._edition = self._newest_edition = 0  # of writer.json

    def start(self, on_tick: Callable[[], None]) -> None:
        """Publish writer.json and begin; `on_tick` runs about once a second in a thread of the writer's."""
        self.publish()
        try:
            self._handover.start()
        except Exception as error:  # tried again with each dump
            self.tell("publisher", "cannot start the publisher process: %s", error)
        threading.Thread(target=self._tick_loop, args=(on_tick,), name="eyas-tick", daemon=True).start()

    # ---- forward thread

    def next_counter(self) -> int:
        """Take the next dump's number."""
        with self._lock:
            self.totals.captured += 1
            return self.totals.captured - 1

    def reserve(self, nbytes: int, until: float | None = None) -> bool:
        """Claim room for rows; False when the disk is too slow and the user said skip, or waiting took too long.

        Waits only for dumps that are already submitted, and no longer than `until` (by the monotonic clock; a pass has
        one for all its prompts, LONGEST_BLOCK away); after that not at all before a dump is written. Rows of prompts
        that are still being prefilled can't leave before the forward pass that waits here goes on, so for them the
        limit gives way (and the peak shows it).
        """
        if self._full(nbytes):
            self.look()  # perhaps it isn't any more
        if self._full(nbytes) and self._wait_when_full and not self._stuck:
            started = time.monotonic()
            until = started + LONGEST_BLOCK if until is None else until
            while self._full(nbytes) and not self.ending and time.monotonic() < until:
                self._handover.wait(_TICK)
                self.look()
            with self._lock:
                self._stuck = time.monotonic() >= until
                self.totals.blocked_seconds += time.monotonic() - started
        with self._lock:
            if self._full(nbytes):
                return False
            self.totals.queue_bytes += nbytes
            self.totals.queue_peak_bytes = max(self.totals.queue_peak_bytes, self.totals.queue_bytes)
            return True

    def _full(self, nbytes: int) -> bool:
        # The memory of a pass is given back with the last of its dumps, so it may be more than what is counted.
        used = max(self.totals.queue_bytes, self.memory.bytes_in_use)
        return self._waiting > 0 and (used + nbytes > self.queue_bytes or self.crowded)

    @property
    def _waiting(self) -> int:
        return len(self._copied) + len(self._ordered)

    @property
    def crowded(self) -> bool:
        """Whether so many dumps wait, or have memory, that there is not even a place for one without rows."""
        return max(self._waiting, self.memory.in_use) >= self._most_waiting

    def lose(self, assembly: Assembly, why: str) -> None:
        """Count a dump that will not be written, whatever became of it, and give back what it held."""
        with self._lock:
            self.totals.lost[why] += 1
            self._free(assembly)
        self.tell(why, "lost dump %d of request %.80r: %s", assembly.counter, assembly.request_id, why)

    def _abandon(self, dumps: list[_Dump], why: str) -> None:
        if dumps:
            self.totals.lost[why] += len(dumps)
            self.totals.queue_bytes -= sum(dump.assembly.nbytes for dump in dumps)
            self._abandoned += dumps
            self.tell(why, "lost %d dumps: %s", len(dumps), why)

    def _free(self, assembly: Assembly) -> None:
        self.totals.queue_bytes -= assembly.nbytes
        for rows in assembly.places:
            rows.release()
        assembly.prompt, assembly.parts = None, []

    def submit(self, assembly: Assembly, reason: str | None) -> None:
        """Hand a dump over for writing, from the next `look` on; `reason` None means complete.

        Its reservation ends when it is written.
        """
        with self._lock:
            self._copied.append(_Dump(assembly, reason))

    def look(self) -> None:
        """Order what has arrived in memory, and see what has been written. Once a pass is enough."""
        with self._lock:
            self._looked = True
            self.totals.memory_peak_bytes = self.memory.peak_bytes
            while self._copied:
                try:
                    if not self._copied[0].landed():
                        break
                except Exception as error:  # the GPU's: it takes this dump, and not what waits behind it
                    self._abandon([self._copied.popleft()], type(error).__name__)
                    continue
                self._order(self._copied.popleft())
            gone = [dump for answer in self._handover.answers() if (dump := self._answered(answer))]
            if time.monotonic() < self._relief_ends and self._handover.relieve():
                self.tell("relief", "publishers hardly ever got a core: they now take a share of the server's")
            if gone and not os.path.exists(self.identity.folder / contract.WRITER_FILE):
                self.publish()  # the folder comes back with the file that says whose it is
            for dump in gone:
                self._order(dump)

    def _order(self, dump: _Dump) -> None:
        assembly = dump.assembly
        self._ordered[assembly.counter] = dump
        try:
            self._handover.order(_in_words(dump, self.identity))
        except Exception as error:  # a defect of ours must cost this dump, and neither the server nor later dumps
            logger.exception("lost dump %d of request %.80r", assembly.counter, assembly.request_id)
            del self._ordered[assembly.counter]
            self.lose(assembly, type(error).__name__)

    def _answered(self, answer: dict[str, Any]) -> _Dump | None:
        """Close the books on a dump; returns it when it has to be ordered again."""
        dump = self._ordered.pop(answer["counter"])
        dump.tries += 1
        if "gone" in answer and dump.tries < _GONE_TRIES:
            return dump
        if "bytes" not in answer:
            self.lose(dump.assembly, answer.get("error", "the folder was deleted"))
            return None
        self._stuck = False
        self.totals.bytes += answer["bytes"]
        if answer["reason"] is None:
            self.totals.complete += 1
        else:
            self.totals.incomplete[answer["reason"]] += 1
        if answer["reason"] == contract.TOKENS_DIFFER:
            text = "the rows of request %.80r belong to other tokens than it sent"
            self.tell(contract.TOKENS_DIFFER, text, dump.assembly.request_id)
        self._free(dump.assembly)
        return None

    def unseen_pass(self) -> None:
        """Count a prefill that should have been captured and went past the hooks."""
        with self._lock:
            self.totals.unseen_passes += 1

    def tell(self, what: str, text: str, *args: object) -> None:
        """Log an error, at most one line in a while about the same thing."""
        now = time.monotonic()
        if now - self._told.get(what, -_QUIET) >= _QUIET:
            self._told[what] = now
            logger.error(text, *args)

    # ---- the end

    def stop(self, deadline_s: float) -> bool:
        """Write what is queued and publish the last writer.json; False when the time was not enough.

        Then what no publisher has that goes on is lost; what one has may still appear, and stays pending.
        """
        self.ending = True
        with self._stopping:
            if self._stopped.is_set():
                return self._drained
            ends = time.monotonic() + deadline_s
            self._relief_ends = ends - RELIEF
            self.look()
            while self._waiting and time.monotonic() < ends:
                self._handover.wait(_TICK)
                self.look()
            self._drained = not self._waiting
            with self._lock:
                self._abandon([*self._copied], contract.SERVER_STOPPED)
                self._copied.clear()
                undone = [self._ordered.pop(counter) for counter in self._handover.take_undone()]
                self._abandon(undone, contract.SERVER_STOPPED)
            if self.state == contract.CAPTURING:
                self.state = contract.STOPPED
            self.publish()
            with self._lock:
                self._handover.close(max(0.0, ends - time.monotonic()))
            self._stopped.set()
            return self._drained

    def publish(self) -> None:
        """Rewrite writer.json. An unwritable folder is told in the log: it must not stop anything."""
        with self._lock:
            self._edition += 1
            edition, totals, snapshot = self._edition, self.totals.as_json(), self._snapshot()
        with self._publishing:  # never takes the other lock inside: who holds that one may come here
            if edition < self._newest_edition:
                return
            self._newest_edition = edition
            try:
                self.identity.publish(self.state, self.refused, totals)
                self._published = snapshot
            except OSError as error:
                self.tell("writer.json", "cannot write %s: %s", self.identity.folder / contract.WRITER_FILE, error)

    def _snapshot(self) -> tuple[Any, ...]:
        return (self.state, len(self.refused), json.dumps(self.totals.as_json()))

    # ---- between passes

    def _tick_loop(self, on_tick: Callable[[], None]) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first one
        slow = 0.0
        while not self._stopped.wait(_TICK):
            try:
                if self._waiting and not self._looked:  # the forward pass does, as long as there is one
                    self.look()
                self._looked = False
                if time.monotonic() - slow < _SLOW_TICK:
                    continue
                slow = time.monotonic()
                on_tick()
                gone = not os.path.exists(self.identity.folder / contract.WRITER_FILE)
                if gone or self._snapshot() != self._published:
                    self.publish()
            except Exception as error:  # the next second is another try
                self.tell("tick", "%s: %s", type(error).__name__, error)


def _in_words(dump: _Dump, identity: Identity) -> dict[str, Any]:
    """An order as publisher.py reads it."""
    assembly, places = dump.assembly, dump.assembly.places
    assert assembly.prompt is not None
    number = {rows: n for n, rows in enumerate(places)}
    return {
        "folder": os.fspath(identity.folder),
        "writer_id": identity.writer_id,
        "counter": assembly.counter,
        "request_id": assembly.request_id,
        "reason": dump.reason,
        "tokens": len(assembly.tokens),
        "cached": assembly.from_cache,
        "only_tokens": assembly.unfit != contract.NOT_ONLY_TOKENS,
        "memory": [rows.words for rows in places],
        "sent": assembly.prompt[1],
        "rows": places[0].layout.words,
        "parts": [(start, stop, number[rows], first) for start, stop, rows, first in assembly.parts],
    }
