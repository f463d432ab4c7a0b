"""Prefills that there is no room for: answered all the same, and counted."""

import errno
import os
from pathlib import Path

import pytest

from eyas_capture import contract
from tests.server_patch.slow_disk import SlowDisk
from tests.server_patch.test_capture import Bench, Request
from tests.server_patch.writers import until_written


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_prefill_that_the_disk_is_too_slow_for_is_answered_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(tmp_path / "disk", monkeypatch)
    disk.wait()
    bench = Bench(tmp_path / "dumps", queue_bytes=15_000)
    for name in ("fits", "skipped"):
        bench.run([(Request(name, 150), 0, 150)])
    disk.go_on()
    until_written(bench.writer)
    bench.run([(Request("later", 150), 0, 150)])
    records = bench.end()
    assert records["skipped"]["incomplete_reason"] == contract.QUEUE_FULL and records["skipped"]["spans"] == []
    assert records["fits"]["complete"] and records["later"]["complete"]
    assert bench.totals["queue_peak_bytes"] <= 15_000 and bench.totals["queue_bytes"] == 0


def test_a_prefill_that_has_begun_is_finished_however_full_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what there is no room for in the same passes costs nobody else a row."""
    disk = SlowDisk(tmp_path / "disk", monkeypatch)
    disk.wait()
    bench = Bench(tmp_path / "dumps", queue_bytes=15_000)
    long, before = Request("long", 120), Request("before", 60)
    bench.run([(long, 0, 30), (before, 0, 60)])
    bench.run([(Request("first", 100), 0, 100), (long, 30, 80), (Request("last", 90), 0, 90)])
    bench.run([(long, 80, 120)])
    disk.go_on()
    records = bench.end()
    assert records["long"]["complete"] and records["before"]["complete"]
    for name in ("first", "last"):
        assert records[name]["incomplete_reason"] == contract.QUEUE_FULL and records[name]["spans"] == []
    assert bench.writer.memory.in_use == 0


def test_memory_that_cannot_be_had_half_way_costs_the_prompts_of_that_pass(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    long = Request("long", 60)
    bench.run([(long, 0, 30), (Request("before", 9), 0, 9)])
    with monkeypatch.context() as patch:
        patch.setattr(bench.writer.memory, "take", take)
        bench.run([(long, 30, 60), (Request("new", 9), 0, 9)])
    bench.run([(Request("later", 50), 0, 50)])
    assert bench.end().keys() == {"before", "later"}
    assert bench.totals["lost"] == {os.strerror(errno.ENOMEM): 2}
    assert bench.totals["queue_bytes"] == 0 and bench.totals["pending"] == 0 and bench.writer.memory.in_use == 0


def test_a_prefill_without_memory_to_be_had_is_answered_and_counted_as_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(size: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(bench.writer.memory, "take", take)
        bench.run([(Request("fits", 5), 0, 5), (Request("neither", 6), 0, 6)])
    bench.run([(Request("later", 50), 0, 50)])
    assert bench.end().keys() == {"later"}
    assert bench.totals["lost"] == {os.strerror(errno.EMFILE): 2}
    assert bench.totals["queue_bytes"] == 0 and bench.totals["pending"] == 0


def test_a_queue_of_very_many_dumps_takes_none_without_rows_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(tmp_path / "disk", monkeypatch)
    disk.wait()
    bench = Bench(tmp_path / "dumps", queue_bytes=1 << 20)
    bench.writer._most_waiting = 2
    for number in range(5):
        bench.run([(Request(f"r{number}", 4), 0, 4)])
    disk.go_on()
    assert bench.end().keys() == {"r0", "r1"} and bench.totals["lost"] == {contract.QUEUE_FULL: 3}
