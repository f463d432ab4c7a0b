"""Prefills that there is no room for: answered all the same, and counted."""

import errno
import os
from pathlib import Path

import pytest

from eyas_capture import contract
from tests.server_patch.bench import Bench, Request
from tests.server_patch.slow_disk import SlowDisk
from tests.server_patch.writers import Fence, until_written


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_prefill_that_the_disk_is_too_slow_for_is_answered_and_recorded(tmp_path: Path, disk: SlowDisk) -> None:
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


def test_a_prefill_that_has_begun_is_finished_however_full_the_queue(tmp_path: Path, disk: SlowDisk) -> None:
    """And what there is no room for in the same passes costs nobody else a row."""
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


@pytest.mark.parametrize("prompts", [1, 8])
def test_a_pass_waits_for_the_disk_once_however_many_prompts_it_has(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    """SGLang's watchdog looks at passes. And a disk that hangs is not waited for again before it writes something."""
    monkeypatch.setattr("eyas_capture.capture.LONGEST_BLOCK", 0.4)
    disk.wait()
    bench = Bench(tmp_path / "dumps", queue_bytes=15_000)
    bench.writer._wait_when_full = True
    bench.run([(Request("fits", 150), 0, 150)])
    for number in range(3):
        bench.run([(Request(f"r{number}-{k}", 100), 0, 100) for k in range(prompts)])
    assert 0.3 < bench.totals["blocked_seconds"] < 0.7
    disk.go_on()
    until_written(bench.writer)
    disk.wait()
    bench.run([(Request("fits again", 150), 0, 150)])
    bench.run([(Request("waits again", 150), 0, 150)])
    assert 0.7 < bench.totals["blocked_seconds"] < 1.2
    disk.go_on()
    records = bench.end()
    assert records["fits"]["complete"] and records["fits again"]["complete"]
    assert bench.totals["incomplete"] == {contract.QUEUE_FULL: 3 * prompts + 1}


def test_memory_that_dumps_of_a_pass_still_share_counts_as_full(tmp_path: Path, disk: SlowDisk) -> None:
    bench = Bench(tmp_path / "dumps", queue_bytes=60_000)
    long = Request("long", 60)
    bench.run([(Request(f"r{k}", 60), 0, 60) for k in range(9)] + [(long, 0, 30)])
    until_written(bench.writer)
    assert bench.totals["queue_bytes"] < 6_000 and bench.writer.memory.bytes_in_use > 30_000
    disk.wait()
    bench.run([(Request("one", 60), 0, 60)])
    bench.run([(Request("more", 400), 0, 400)])
    disk.go_on()
    bench.run([(long, 30, 60)])
    records = bench.end()
    assert records["more"]["incomplete_reason"] == contract.QUEUE_FULL and records["long"]["complete"]


def test_memory_that_cannot_be_had_half_way_costs_the_rest_of_the_prompt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's fence is a stand-in: rows it has not sent yet are neither written nor is their memory given away."""

    def take(size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    long, fence = Request("long", 60), Fence()
    with monkeypatch.context() as patch:
        patch.setattr(bench.writer.copier, "fence", lambda: fence)
        bench.run([(long, 0, 30), (Request("before", 9), 0, 9)])
    with monkeypatch.context() as patch:
        patch.setattr(bench.writer.memory, "take", take)
        bench.run([(long, 30, 60), (Request("new", 9), 0, 9)])
    bench.run([(Request("later", 50), 0, 50)])
    assert bench.writer.memory.in_use == 2 and not list(bench.folder.glob("*req_*"))
    fence.passed = True
    records = bench.end()
    assert records.keys() == {"long", "before", "later"}
    assert records["long"]["spans"] == [[0, 30]] and records["long"]["incomplete_reason"] == contract.CAPTURE_FAILED
    assert bench.totals["lost"] == {os.strerror(errno.ENOMEM): 1}
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


def test_a_queue_of_very_many_dumps_takes_none_without_rows_either(tmp_path: Path, disk: SlowDisk) -> None:
    disk.wait()
    bench = Bench(tmp_path / "dumps", queue_bytes=1 << 20)
    bench.writer._most_waiting = 2
    for number in range(5):
        bench.run([(Request(f"r{number}", 4), 0, 4)])
    disk.go_on()
    assert bench.end().keys() == {"r0", "r1"} and bench.totals["lost"] == {contract.QUEUE_FULL: 3}
