"""The queue, the threads, and what a reader can ever see of a dump."""

import errno
import json
import os
import shutil
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas_capture import contract, identity, states, writer
from eyas_capture.identity import Identity, process_start_time, sweep_partials
from eyas_capture.spans import Assembly
from eyas_capture.writer import Writer

H = 8


def no_tick() -> None:
    """Nothing to look after."""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Writer]]:
    """Writers that are stopped in the end."""
    writers = []

    def make(queue_bytes: int = 1 << 20, wait: bool = True) -> Writer:
        one = Writer(Identity(tmp_path / "dumps", None, {"hidden_size": H}), queue_bytes, wait)
        one.start(no_tick)
        writers.append(one)
        return one

    yield make
    for one in writers:
        one.stop(10)


def filled(
    to: Writer, tokens: int = 6, spans: tuple[tuple[int, int], ...] = ((0, 6),), dtype: torch.dtype = torch.bfloat16
) -> Assembly:
    """A request whose rows are all different, with room reserved for them."""
    counter = to.next_counter()
    base = spans[0][0]
    assembly = Assembly(counter, f"rid-{counter}", array("q", range(100, 100 + tokens)), base=base)
    assembly.ids = torch.arange(100 + base, 100 + tokens)
    for name in (contract.block_tensor(1), contract.FINAL):
        assembly.rows[name] = torch.randn(tokens - base, H).to(dtype)
    for span in spans:
        assembly.take(*span)
    assembly.nbytes = 2 * (tokens - base) * H * dtype.itemsize
    assert to.reserve(assembly.nbytes)
    return assembly


def totals(of: Writer) -> dict[str, Any]:
    return json.loads((of.identity.folder / contract.WRITER_FILE).read_text())["totals"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_the_library_reads_is_what_was_captured(made: Callable[..., Writer], dtype: torch.dtype) -> None:
    one = made()
    assembly = filled(one, dtype=dtype)
    rows = {name: tensor.clone() for name, tensor in assembly.rows.items()}
    one.submit(assembly, None)
    assert one.stop(10)
    folder = one.identity.folder / contract.dump_name(0)
    record = json.loads((folder / contract.RECORD_FILE).read_text())
    tensors = load_file(folder / contract.STATES_FILE)
    assert set(record) == set(contract.RECORD_KEYS)
    assert tensors.pop(contract.INPUT_IDS).tolist() == list(range(100, 106))
    assert tensors.keys() == rows.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == dtype and torch.equal(tensor, rows[name])
        raw = tensor.view(torch.uint8).numpy().tobytes()
        assert record["checksums"][name] == contract.tensor_checksum(raw)
    assert record["tokens_sha256"] == contract.tokens_sha256(range(100, 106))
    assert record["complete"] and record["incomplete_reason"] is None


def test_an_incomplete_dump_holds_the_rows_of_its_spans_in_order(made: Callable[..., Writer]) -> None:
    one = made()
    assembly = filled(one, 10, ((2, 4), (7, 9)))
    rows = assembly.rows[contract.FINAL].clone()
    one.submit(assembly, contract.ABORTED)
    assert one.stop(10)
    folder = one.identity.folder / contract.dump_name(0)
    record = json.loads((folder / contract.RECORD_FILE).read_text())
    assert not record["complete"] and record["incomplete_reason"] == contract.ABORTED
    assert record["spans"] == [[2, 4], [7, 9]] and record["tokens"] == 10 and record["prefix_cached"] == 5
    final = load_file(folder / contract.STATES_FILE)[contract.FINAL]
    assert torch.equal(final, torch.cat([rows[0:2], rows[5:7]]))


def test_rows_of_other_tokens_are_never_published_as_complete(made: Callable[..., Writer]) -> None:
    one = made()
    assembly = filled(one)
    assembly.ids[3] += 1
    one.submit(assembly, None)
    assert one.stop(10)
    assert totals(one)["incomplete"] == {contract.TOKENS_DIFFER: 1}


def test_totals_always_add_up(made: Callable[..., Writer]) -> None:
    one = made()
    for reason in (None, contract.ABORTED, None, contract.PREFIX_CACHE, contract.ABORTED):
        one.submit(filled(one), reason)
    one.next_counter()  # a prefill under way
    assert one.stop(10)
    found = totals(one)
    assert set(found) == set(contract.TOTALS_KEYS)
    assert (found["captured"], found["complete"], found["pending"], found["queue_bytes"]) == (6, 2, 1, 0)
    assert found["incomplete"] == {contract.ABORTED: 2, contract.PREFIX_CACHE: 1}
    on_disk = sum(file.stat().st_size for file in one.identity.folder.glob("req_*/states.safetensors"))
    assert found["bytes"] == on_disk


class SlowDisk:
    """Writing waits until the gate opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        write_states = writer.write_states

        def gated(descriptor: int, assembly: Assembly) -> tuple[dict[str, str], int]:
            assert self.gate.wait(30)
            return write_states(descriptor, assembly)

        monkeypatch.setattr(writer, "write_states", gated)


def test_block_waits_for_the_disk_and_loses_nothing(
    made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    one = made(queue_bytes=500)
    one.submit(filled(one), None)  # 192 bytes each
    one.submit(filled(one), None)
    reserved: list[bool] = []
    forward = threading.Thread(target=lambda: reserved.append(one.reserve(192)))
    forward.start()
    forward.join(0.3)
    assert forward.is_alive() and not reserved
    disk.gate.set()
    forward.join(10)
    assert reserved == [True] and one.totals.blocked_seconds > 0.2
    assert one.totals.queue_peak_bytes <= 500


def test_skip_does_not_wait(made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    one = made(queue_bytes=300, wait=False)
    one.submit(filled(one), None)
    assert not one.reserve(192)
    disk.gate.set()


def test_waiting_for_the_disk_ends_before_sglangs_watchdog(
    made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr(writer, "LONGEST_BLOCK", 0.05)
    one = made(queue_bytes=300)
    one.submit(filled(one), None)
    assert not one.reserve(192)
    disk.gate.set()


def test_prompts_being_prefilled_never_wait_for_each_other(made: Callable[..., Writer]) -> None:
    """Nothing is submitted, so nothing will ever free room: waiting here would stop the server for good."""
    one = made(queue_bytes=300)
    assert one.reserve(250) and one.reserve(250)
    assert one.totals.queue_peak_bytes == 500


@pytest.mark.parametrize("broken", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_dump_the_disk_refuses_is_counted_as_lost_and_the_next_one_is_written(
    made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    one = made()

    def refuse(descriptor: int, views: list[memoryview]) -> None:
        raise OSError(broken, os.strerror(broken))

    with monkeypatch.context() as patch:
        patch.setattr(states, "write_all", refuse)
        one.submit(filled(one), None)
        with one._room:
            assert one._room.wait_for(lambda: not one._waiting, 10)
    one.submit(filled(one), None)
    assert one.stop(10)
    assert totals(one)["lost"] == {os.strerror(broken): 1} and totals(one)["complete"] == 1
    assert sorted(p.name for p in one.identity.folder.glob("*req*")) == ["req_1"]


def test_a_defect_in_writing_costs_one_dump_and_not_the_thread(
    made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made()
    wrong = filled(one)
    wrong.rows["after_block_9"] = None
    one.submit(wrong, None)
    for _ in range(4):
        one.submit(filled(one), None)
    assert one.stop(10)
    assert totals(one)["complete"] == 4 and sum(totals(one)["lost"].values()) == 1


def test_a_folder_deleted_under_the_writer_comes_back_with_its_identity(made: Callable[..., Writer]) -> None:
    one = made()
    one.submit(filled(one), None)
    with one._room:
        assert one._room.wait_for(lambda: not one._waiting, 10)
    shutil.rmtree(one.identity.dump_dir)
    one.submit(filled(one), None)
    assert one.stop(10)
    assert (one.identity.folder / "req_1").is_dir() and totals(one)["complete"] == 2


def test_an_unwritable_dump_folder_does_not_stop_anything(
    tmp_path: Path, made: Callable[..., Writer], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dumps").write_text("a file where the folder should be")
    one = made()
    one.submit(filled(one), None)
    assert one.stop(10)
    assert one.totals.lost.total() == 1 and "writer.json" in caplog.text


def test_a_reader_never_sees_half_a_dump(made: Callable[..., Writer]) -> None:
    """Whatever req_* folder is there while dumps are written, it is whole."""
    one = made(queue_bytes=1 << 24)
    seen, wrong, done = set(), [], threading.Event()

    def read() -> None:
        while not done.is_set():
            for path in one.identity.folder.iterdir():
                if contract.parse_dump_name(path.name) is None or path in seen:
                    continue
                record = json.loads((path / contract.RECORD_FILE).read_text())
                tensors = load_file(path / contract.STATES_FILE)
                if record["checksums"].keys() != tensors.keys():
                    wrong.append(path)
                seen.add(path)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(150):
        one.submit(filled(one, 64, ((0, 64),)), None)
    assert one.stop(30)
    done.set()
    reader.join()
    assert not wrong and totals(one)["complete"] == 150


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_only_the_writers_own_threads_give_way(made: Callable[..., Writer]) -> None:
    def niceness(thread: int) -> int:
        return os.getpriority(os.PRIO_PROCESS, thread)

    here, seen = niceness(threading.get_native_id()), []
    one = made()
    assembly = filled(one)
    assembly.release = lambda: seen.append(niceness(threading.get_native_id()))
    one.submit(assembly, None)
    assert one.stop(10)
    assert seen == [min(19, here + writer.NICER)] and niceness(threading.get_native_id()) == here


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (128, 4)])
def test_few_cores_have_few_writer_threads(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    monkeypatch.setattr(writer.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert writer.thread_count() == threads


@pytest.mark.parametrize("most", [1, 5, 7, 8, 1000])
def test_a_dump_in_many_pieces_is_whole(
    made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Pieces smaller than a row, few a call, calls of few bytes, and a disk that takes one less than it is given."""
    monkeypatch.setattr(states, "_PIECE", 7)
    monkeypatch.setattr(states, "_PIECES", 3)
    monkeypatch.setattr(states, "_CALL", most)
    writev = os.writev

    def short(descriptor: int, views: list[memoryview]) -> int:
        size = sum(map(len, views))
        assert size <= most
        return writev(descriptor, [memoryview(b"".join(views))[: max(1, size - 1)]])

    monkeypatch.setattr(states.os, "writev", short)
    one = made()
    assembly = filled(one, 10, ((2, 4), (7, 9)))
    rows = assembly.rows[contract.FINAL].clone()
    one.submit(assembly, None)
    assert one.stop(10)
    folder = one.identity.folder / contract.dump_name(0)
    final = load_file(folder / contract.STATES_FILE)[contract.FINAL]
    assert torch.equal(final, torch.cat([rows[0:2], rows[5:7]]))
    checksum = json.loads((folder / contract.RECORD_FILE).read_text())["checksums"][contract.FINAL]
    assert checksum == contract.tensor_checksum(final.view(torch.uint8).numpy().tobytes())


def test_what_a_crash_left_is_removed_only_when_its_writer_is_dead(tmp_path: Path) -> None:
    for name, pid, started in (("dead", 2**22 + 1, 1), ("reused", os.getpid(), 1), ("alive", os.getpid(), None)):
        one = Identity(tmp_path, None, {})
        one.writer_id = name
        one.facts |= {"pid": pid, "pid_start_time": started or process_start_time(os.getpid())}
        one.publish(contract.CAPTURING, [], {})
        (one.folder / contract.partial_name(3)).mkdir()
        (one.folder / contract.dump_name(2)).mkdir()
    assert sweep_partials(tmp_path) == 2
    assert [p.parent.name for p in tmp_path.glob("*/.req_*")] == ["alive"]
    assert len(list(tmp_path.glob("*/req_2"))) == 3


def test_a_restarted_writer_never_uses_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Identity(tmp_path, 0, {})
    first.publish(contract.CAPTURING, [], {})
    monkeypatch.setattr(identity.socket, "gethostname", lambda: "other-host")
    second = Identity(tmp_path, 0, {})  # the same second, the same pid, another host
    assert second.folder != first.folder


def test_partial_names_are_not_dump_names() -> None:
    assert contract.parse_dump_name(contract.dump_name(7)) == 7
    assert contract.parse_dump_name(contract.partial_name(7)) is None
    assert Path(contract.partial_name(7)).match(contract.PARTIAL_GLOB)
