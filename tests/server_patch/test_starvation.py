"""Publishers run where a core is idle; where none ever is, others that take their share are put in their place."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from eyas_capture import contract, handover, publisher
from eyas_capture.handover import _Message, _Processor, _Publisher
from eyas_capture.identity import process_stat
from eyas_capture.writer import Writer
from tests.server_patch.slow_disk import SlowDisk
from tests.server_patch.writers import (
    filled,
    publishers,
    submit,
    totals,
    until_ended,
    until_partial,
    until_written,
    whole,
)


def ask_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why an order is not done: not after seconds."""
    monkeypatch.setattr(handover, "_LATE", 0.3)
    monkeypatch.setattr(handover, "_WATCHED", 0.3)


class Hogs:
    """Processes that keep a core busy."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def starve(self, one: Writer) -> int:
        """Give a writer's publisher a core that is never idle, and tell its process id."""
        submit(one, filled(one), None)
        until_written(one)
        (process,) = publishers(one)
        core = {min(os.sched_getaffinity(0))}
        os.sched_setaffinity(process, core)
        for _ in range(2):
            self._processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            os.sched_setaffinity(self._processes[-1].pid, core)
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def hogs() -> Iterator[Hogs]:
    made = Hogs()
    yield made
    made.end()


def test_only_the_publisher_gives_way(made: Callable[..., Writer]) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    one = made()
    submit(one, filled(one), None)
    until_written(one)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in publishers(one)] == [min(19, here + publisher.NICER)]
    assert [os.sched_getscheduler(pid) for pid in publishers(one)] == [os.SCHED_IDLE]
    assert os.getpriority(os.PRIO_PROCESS, 0) == here and os.sched_getscheduler(0) == os.SCHED_OTHER


def test_where_no_core_is_ever_idle_publishers_take_their_share(
    made: Callable[..., Writer], hogs: Hogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, said = made(), []
    monkeypatch.setattr(one, "tell", lambda *words: said.append(words))
    before = hogs.starve(one)
    ask_soon(monkeypatch)
    for _ in range(300):
        submit(one, filled(one), None)
    until_written(one, 60)
    (instead,) = publishers(one)
    assert instead != before and os.sched_getscheduler(instead) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, instead) > os.getpriority(os.PRIO_PROCESS, 0)
    until_ended(before, look=one.look)
    assert one.stop(10) and totals(one)["complete"] == 301 and len(said) == 1
    assert all(whole(path) for path in one.identity.folder.glob("req_*"))


def test_publishers_are_replaced_at_the_end_too_while_there_is_time(
    made: Callable[..., Writer], hogs: Hogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(queue_bytes=1 << 28)
    hogs.starve(one)
    for _ in range(100):
        submit(one, filled(one), None)
    ask_soon(monkeypatch)
    assert one.stop(60) and totals(one)["complete"] == 101


def test_in_the_last_moments_publishers_keep_their_orders(
    made: Callable[..., Writer], hogs: Hogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was replaced then would not have done them, and nobody after it."""
    one = made(queue_bytes=1 << 28)
    before = hogs.starve(one)
    for _ in range(60):
        submit(one, filled(one), None)
    ask_soon(monkeypatch)
    assert not one.stop(1.5)
    hogs.end()
    os.sched_setaffinity(before, os.sched_getaffinity(0))
    of, ends = totals(one), time.monotonic() + 60
    assert of["pending"]
    while len(list(one.identity.folder.glob("req_*"))) < of["complete"] + of["pending"]:
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_one_that_was_replaced_gets_no_more_orders_and_its_own_are_not_awaited(
    disk: SlowDisk, made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it takes seconds to be gone: here it is not killed at all."""
    monkeypatch.setattr(_Publisher, "replace", lambda self: setattr(self, "replaced", True))
    disk.wait()
    one = made()
    submit(one, filled(one), None)
    (slow,) = one._handover._publishers
    until_partial(one)
    slow.replace()
    monkeypatch.setenv("PYTHONPATH", "")  # the next one has another disk
    submit(one, filled(one), None)
    ends = time.monotonic() + 20
    while not one.totals.complete:
        assert time.monotonic() < ends
        one.look()
    assert len(slow.orders) == 1 and not one.stop(0.5)
    assert totals(one)["complete"] == 1 and totals(one)["lost"] == {contract.SERVER_STOPPED: 1}
    slow.process.kill()


def test_a_publisher_that_waits_for_the_disk_is_not_replaced(
    disk: SlowDisk, made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made()
    submit(one, filled(one), None)
    until_written(one)
    (before,) = publishers(one)
    disk.wait()
    submit(one, filled(one), None)
    until_partial(one)
    while process_stat(before)[0] == "R":
        time.sleep(0.01)
    ask_soon(monkeypatch)
    for _ in range(30):
        submit(one, filled(one), None)
        time.sleep(0.05)
    assert publishers(one) == [before]
    monkeypatch.undo()
    disk.go_on()
    until_written(one)


@pytest.mark.parametrize(
    ("before", "after", "starved"),
    [
        (_Processor(1.0, 1.0, True), _Processor(1.0, 1.0, True), True),  # waits all the time
        (_Processor(1.0, 1.0, False), _Processor(1.1, 1.9, False), True),  # waited, and now sleeps
        (_Processor(1.0, 1.0, True), _Processor(2.0, 1.0, True), False),  # runs all the time
        (_Processor(1.0, 1.0, True), _Processor(1.2, 1.1, True), False),  # runs now and waits for the disk else
        (_Processor(1.0, 1.0, False), _Processor(1.0, 1.0, True), False),  # the disk has just answered
        (_Processor(1.0, 1.0, True), _Processor(1.0, 1.0, False), False),
        (None, _Processor(1.0, 1.0, True), False),
        (_Processor(1.0, 1.0, True), None, False),
    ],
)
def test_starved_is_what_waits_for_a_core_and_not_for_the_disk(
    monkeypatch: pytest.MonkeyPatch, before: _Processor | None, after: _Processor | None, starved: bool
) -> None:
    """What it had had by the first look, and a second later."""
    now, seen = time.monotonic(), [before, after]
    monkeypatch.setattr(_Processor, "of", lambda pid: seen.pop(0))
    monkeypatch.setattr(handover, "time", Mock(monotonic=lambda: now - len(seen)))
    one = _Publisher(Mock(), Mock(), {0: _Message(0, b"", ordered=now - 10)})
    assert [one.starved(), one.starved()] == [False, starved]


@pytest.mark.parametrize("text", ["0 0 0\n", "", "what?\n", None])
def test_on_a_kernel_that_does_not_say_publishers_take_their_share_from_the_start(
    made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    plain = handover.Path.read_text

    def read(path: handover.Path) -> str:
        if path.name != "schedstat":
            return plain(path)
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(handover.Path, "read_text", read)
    one = made()
    submit(one, filled(one), None)
    until_written(one)
    assert [os.sched_getscheduler(pid) for pid in publishers(one)] == [os.SCHED_OTHER]
