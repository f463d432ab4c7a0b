"""The scheduler's end of the publisher processes: orders out, answers back, and nobody ever waits."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas_capture.identity import process_stat

_ROOT = Path(__file__).parents[1]
# Not from the server's working folder, where anything may lie that is called like a module.
_PROGRAM = """import sys
sys.path = [path for path in sys.path if path] + [sys.argv[1]]
from eyas_capture.publisher import main
main(int(sys.argv[2]), when_idle=sys.argv[3] == "when idle")
"""
_LONGEST_ORDER = 1 << 20  # bytes: what publisher.py reads at once, and more than most sockets take
_ANSWER = 64 << 10  # bytes of one at most: the forward pass makes room for it at every look, so not more than that
_DIED = "the publisher process died"
_TRIES = 3  # at an order whose process dies
_MOST_DEATHS = 5  # without an answer between them: then orders fail at once until another process may be started
_LONGEST_PAUSE = 5.0  # seconds before another process is started
_LATE = 5.0  # seconds after which it is asked why an order is not done yet
_WATCHED = 1.0  # seconds, then, to see whether its process waits for a core for half of them
RELIEF = 2 * (_LATE + _WATCHED)  # seconds that are left when relief is still worth it


class _NoPublisher(Exception):
    """None runs, and one that was started now would die as the last ones did."""


@dataclass
class _Message:
    counter: int
    message: bytes
    tries: int = 0
    ordered: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Processor:
    """Seconds a process has run and has waited for a core, and whether it runs or waits for one now."""

    ran: float
    waited: float
    wants: bool

    @classmethod
    def of(cls, pid: int) -> "_Processor | None":
        """None where the kernel does not say."""
        try:
            ran, waited, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
            return cls(ran / 1e9, waited / 1e9, process_stat(pid)[0] == "R") if ran else None
        except (OSError, ValueError, IndexError):
            return None


@dataclass
class _Publisher:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    orders: dict[int, _Message] = field(default_factory=dict)  # sent and not answered, by counter
    replaced: bool = False
    watched: tuple[float, _Processor] | None = None  # since when, and what it had had by then

    def starved(self) -> bool:
        """Whether its orders are late because it waits for a core: not for the disk, nor because a dump is long."""
        now = time.monotonic()
        had = None
        if self.orders and now - next(iter(self.orders.values())).ordered >= _LATE:
            had = _Processor.of(self.process.pid)
        if had is None or self.watched is None:
            self.watched = None if had is None else (now, had)
            return False
        since, before = self.watched
        if now - since < _WATCHED:
            return False
        self.watched = None
        # The kernel adds a wait up when it ends; one that goes on is seen by what it kept the process from.
        return had.waited - before.waited > (now - since) / 2 or (had.wants and before.wants and had.ran == before.ran)

    def replace(self) -> None:
        """End it; what it has not done is done by others, as after any death."""
        self.replaced = True
        self.process.kill()


class Handover:
    """Some publisher processes, started when they are first needed, and again when they have died.

    They run where a core is idle, until that turns out to be too seldom; from then on they take their share. Without
    CAP_SYS_NICE a process can't leave the idle class, so others take their place. On a kernel that would not say how
    seldom, they take their share from the start.

    Not safe for threads: the writer's lock guards it. `memory` is the descriptor of the shared memory.
    """

    def __init__(self, memory: int, most: int) -> None:
        self._memory = memory
        self._most = most
        self._publishers: list[_Publisher] = []
        self._unsent: deque[_Message] = deque()
        self._answers: list[dict[str, Any]] = []
        self._deaths = 0  # since the last answer
        self._pause_ends = 0.0
        self._trouble = _DIED
        self._closed = False
        self._when_idle = _Processor.of(os.getpid()) is not None
        self._dying: list[subprocess.Popen[bytes]] = []

    def order(self, order: dict[str, Any]) -> None:
        """Have a dump written, from the next look at the `answers` on, one of which will have its counter."""
        message = json.dumps(order).encode()
        if len(message) > _LONGEST_ORDER:
            self._answers.append({"counter": order["counter"], "error": f"an order of {len(message)} bytes"})
        else:
            self._unsent.append(_Message(order["counter"], message))

    def take_undone(self) -> list[int]:
        """Give up the orders that no process has been sent that will do them: their counters."""
        counters = [order.counter for order in self._unsent]
        self._unsent.clear()
        for publisher in self._publishers:
            if publisher.replaced:
                counters += publisher.orders
                publisher.orders.clear()
        return counters

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be an answer, `timeout_s` seconds at most. Needs no lock."""
        poll = select.poll()  # a server has more descriptors than select takes
        for publisher in list(self._publishers):
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                poll.register(publisher.socket, select.POLLIN)
        poll.poll(1000 * timeout_s)

    def answers(self) -> list[dict[str, Any]]:
        """What has been done since the last look, each as publisher.py gives it."""
        for publisher in list(self._publishers):
            self._hear(publisher)
        self._send()
        self._dying = [process for process in self._dying if process.poll() is None]
        answers, self._answers = self._answers, []
        return answers

    def relieve(self) -> bool:
        """Where publishers hardly ever get a core, have some that take their share: whether that was so. Cheap, to be
        called often."""
        if not (self._when_idle and any([publisher.starved() for publisher in self._publishers])):
            return False
        self._when_idle = False
        for publisher in self._publishers:
            publisher.replace()
        return True

    def start(self) -> None:
        """Start one process more. Raises OSError, and what else a broken environment makes Python raise."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            command = [sys.executable, "-c", _PROGRAM, str(_ROOT), str(self._memory)]
            command.append("when idle" if self._when_idle else "always")
            process = subprocess.Popen(command, stdin=theirs.fileno(), pass_fds=[self._memory])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._publishers.append(_Publisher(process, ours))

    def close(self, timeout_s: float) -> None:
        """Let the processes end after what they have."""
        self._closed = True
        publishers, self._publishers = self._publishers, []
        for publisher in publishers:
            with contextlib.suppress(OSError):
                publisher.socket.shutdown(socket.SHUT_WR)
        ends = time.monotonic() + timeout_s
        for publisher in publishers:
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that was replaced has nothing more to do
                publisher.process.wait(0 if publisher.replaced else max(0.0, ends - time.monotonic()))
            publisher.socket.close()

    def _hear(self, publisher: _Publisher) -> None:
        while True:
            try:
                message = publisher.socket.recv(_ANSWER)
            except BlockingIOError:
                return
            except ConnectionError:  # it died with orders unread: said once, and before the answers that remain
                continue
            if not message:
                break
            answer = json.loads(message)
            self._deaths = 0
            if publisher.orders.pop(answer["counter"], None) is not None:
                self._answers.append(answer)
        self._bury(publisher)

    def _bury(self, publisher: _Publisher) -> None:
        """A process that died: its orders are somebody else's. Nothing is lost, the rows are still there."""
        self._publishers.remove(publisher)
        publisher.socket.close()
        publisher.process.kill()
        self._dying.append(publisher.process)  # it runs no more of its program; the system may take its time
        if not publisher.replaced:
            self._pause()
        for number, order in enumerate(publisher.orders.values()):
            order.tries += number == 0 and not publisher.replaced  # the others were only waiting
            if order.tries < _TRIES:
                self._unsent.append(order)
            else:
                self._fail(order)

    def _pause(self) -> None:
        self._deaths += 1
        self._pause_ends = time.monotonic() + min(_LONGEST_PAUSE, 0.05 * 2**self._deaths)

    def _fail(self, order: _Message, why: str = _DIED) -> None:
        self._answers.append({"counter": order.counter, "error": why})

    def _send(self) -> None:
        while self._unsent:
            order, publisher = self._unsent[0], None
            try:
                publisher = self._idlest()
                publisher.socket.send(order.message)
            except BlockingIOError:  # it has as much to do as it can remember
                return
            except ConnectionError:
                assert publisher is not None
                self._hear(publisher)
                continue
            except _NoPublisher as error:
                if self._deaths < _MOST_DEATHS:
                    return
                self._fail(self._unsent.popleft(), str(error))  # the forward pass must not wait for what may never come
                continue
            except OSError as error:  # a message too long for a socket
                self._fail(self._unsent.popleft(), error.strerror or str(error))
                continue
            self._unsent.popleft()
            publisher.orders[order.counter] = order

    def _idlest(self) -> _Publisher:
        busy = all(publisher.orders for publisher in self._in_service)
        if busy and len(self._in_service) < self._most and time.monotonic() >= self._pause_ends and not self._closed:
            try:
                self.start()
            except Exception as error:  # no processes, descriptors or memory to be had, or no Python
                self._pause()
                self._trouble = f"cannot start the publisher process: {error}"
        if not self._in_service:
            raise _NoPublisher(self._trouble)
        return min(self._in_service, key=lambda publisher: len(publisher.orders))

    @property
    def _in_service(self) -> list[_Publisher]:
        # One that was replaced where no core is idle takes seconds to be gone.
        return [publisher for publisher in self._publishers if not publisher.replaced]
