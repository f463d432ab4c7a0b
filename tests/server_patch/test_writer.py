"""The queue, its end, and what a reader can ever see of a dump."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from eyas_capture import contract, identity, writer
from eyas_capture.identity import Identity, process_start_time, sweep_partials
from eyas_capture.spans import Part
from eyas_capture.writer import Writer
from tests.server_patch.slow_disk import SlowDisk
from tests.server_patch.writers import PAGE, Fence, filled, submit, tensors_of, totals, until_written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_the_library_reads_is_what_was_captured(made: Callable[..., Writer], dtype: torch.dtype) -> None:
    one = made()
    assembly = filled(one, dtype=dtype)
    rows = tensors_of(assembly)
    del rows["ids"]
    submit(one, assembly, None)
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
    rows = tensors_of(assembly)[contract.FINAL]
    submit(one, assembly, contract.ABORTED)
    assert one.stop(10)
    folder = one.identity.folder / contract.dump_name(0)
    record = json.loads((folder / contract.RECORD_FILE).read_text())
    assert not record["complete"] and record["incomplete_reason"] == contract.ABORTED
    assert record["spans"] == [[2, 4], [7, 9]] and record["tokens"] == 10 and record["prefix_cached"] == 5
    final = load_file(folder / contract.STATES_FILE)[contract.FINAL]
    assert torch.equal(final, rows)


def test_rows_of_other_tokens_are_never_published_as_complete(made: Callable[..., Writer]) -> None:
    one = made()
    assembly = filled(one)
    assembly.parts[0].rows.tensors()[0][3] += 1
    submit(one, assembly, None)
    assert one.stop(10)
    assert totals(one)["incomplete"] == {contract.TOKENS_DIFFER: 1}


def test_totals_always_add_up(made: Callable[..., Writer]) -> None:
    one = made()
    for reason in (None, contract.ABORTED, None, contract.PREFIX_CACHE, contract.ABORTED):
        submit(one, filled(one), reason)
    one.next_counter()  # a prefill under way
    assert one.stop(10)
    found = totals(one)
    assert set(found) == set(contract.TOTALS_KEYS)
    assert found["memory_peak_bytes"] >= found["queue_peak_bytes"] > 0
    assert (found["captured"], found["complete"], found["pending"], found["queue_bytes"]) == (6, 2, 1, 0)
    assert found["incomplete"] == {contract.ABORTED: 2, contract.PREFIX_CACHE: 1}
    on_disk = sum(file.stat().st_size for file in one.identity.folder.glob("req_*/states.safetensors"))
    assert found["bytes"] == on_disk


def test_block_waits_for_the_disk_and_loses_nothing(disk: SlowDisk, made: Callable[..., Writer]) -> None:
    disk.wait()
    one = made(queue_bytes=2 * PAGE)
    submit(one, filled(one), None)  # a page each
    submit(one, filled(one), None)
    reserved: list[bool] = []
    forward = threading.Thread(target=lambda: reserved.append(one.reserve(PAGE)))
    forward.start()
    forward.join(0.3)
    assert forward.is_alive() and not reserved
    disk.go_on()
    forward.join(10)
    assert reserved == [True] and one.totals.blocked_seconds > 0.2
    assert one.totals.queue_peak_bytes <= 2 * PAGE


def test_skip_does_not_wait(disk: SlowDisk, made: Callable[..., Writer]) -> None:
    disk.wait()
    one = made(queue_bytes=PAGE, wait=False)
    submit(one, filled(one), None)
    assert not one.reserve(PAGE)
    disk.go_on()


def test_waiting_for_the_disk_ends_before_sglangs_watchdog(
    disk: SlowDisk, made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.wait()
    monkeypatch.setattr(writer, "LONGEST_BLOCK", 0.05)
    one = made(queue_bytes=PAGE)
    submit(one, filled(one), None)
    assert not one.reserve(PAGE)
    disk.go_on()


def test_very_many_small_dumps_are_a_full_queue_too(
    disk: SlowDisk, made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have only so many pieces of memory, and a dump may be in many of them."""
    disk.wait()
    monkeypatch.setattr(writer, "_MOST_WAITING", 3)
    one = made(wait=False)
    assert not one.crowded
    submit(one, filled(one), None)
    assert one.reserve(PAGE)
    submit(one, filled(one, spans=((0, 2), (2, 6))), None)
    assert not one.reserve(PAGE)
    disk.go_on()
    until_written(one)
    assert one.reserve(PAGE)


def test_prompts_being_prefilled_never_wait_for_each_other(made: Callable[..., Writer]) -> None:
    """Nothing is submitted, so nothing will ever free room: waiting here would stop the server for good."""
    one = made(queue_bytes=300)
    assert one.reserve(250) and one.reserve(250)
    assert one.totals.queue_peak_bytes == 500


@pytest.mark.parametrize("broken", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_dump_the_disk_refuses_is_counted_as_lost_and_the_next_one_is_written(
    disk: SlowDisk, made: Callable[..., Writer], broken: int
) -> None:
    one = made()
    disk.refuse(broken)
    submit(one, filled(one), None)
    until_written(one)
    disk.go_on()
    submit(one, filled(one), None)
    assert one.stop(10)
    assert totals(one)["lost"] == {os.strerror(broken): 1} and totals(one)["complete"] == 1
    assert sorted(p.name for p in one.identity.folder.glob("*req*")) == ["req_1"]


@pytest.mark.parametrize("where", ["the forward pass", "the publisher"])
def test_a_defect_in_writing_costs_one_dump_and_none_after_it(made: Callable[..., Writer], where: str) -> None:
    one = made()
    wrong = filled(one)
    if where == "the forward pass":
        wrong.prompt = wrong.parts[0].rows, object()  # nothing that can be sent
    else:
        wrong.prompt = wrong.parts[0].rows, "nowhere"
    submit(one, wrong, None)
    for _ in range(4):
        submit(one, filled(one), None)
    assert one.stop(10)
    assert totals(one)["complete"] == 4 and sum(totals(one)["lost"].values()) == 1
    assert totals(one)["queue_bytes"] == 0


def test_an_order_too_long_to_send_costs_one_dump(made: Callable[..., Writer]) -> None:
    one = made(queue_bytes=1 << 30)
    long = filled(one, 80_000, ((0, 1),))
    rows = long.parts[0].rows  # no prompt is prefilled so, but nothing may stop either
    long.parts = [Part(2 * k, 2 * k + 1, rows, 0) for k in range(40_000)]
    submit(one, long, contract.PREFIX_CACHE)
    submit(one, filled(one), None)
    assert one.stop(10)
    assert totals(one)["complete"] == 1 and sum(totals(one)["lost"].values()) == 1


def test_a_forward_pass_that_waits_for_the_disk_does_not_hold_up_the_end(
    disk: SlowDisk, made: Callable[..., Writer]
) -> None:
    disk.wait()
    one = made(queue_bytes=PAGE)
    submit(one, filled(one), None)
    reserved: list[bool] = []
    forward = threading.Thread(target=lambda: reserved.append(one.reserve(PAGE)))
    forward.start()
    time.sleep(0.2)
    began = time.monotonic()
    assert not one.stop(0.5)
    forward.join(5)
    assert reserved == [False] and time.monotonic() - began < 5
    disk.go_on()


def test_the_tick_and_the_forward_pass_never_wait_for_each_other_for_good(made: Callable[..., Writer]) -> None:
    """The one rewrites writer.json while the other finds that the folder is gone and rewrites it too."""
    one = made(queue_bytes=1 << 24)
    over = threading.Event()

    def rewrite() -> None:
        while not over.is_set():
            one.publish()

    def delete() -> None:
        while not over.is_set():
            shutil.rmtree(one.identity.dump_dir, ignore_errors=True)

    threads = [threading.Thread(target=work, daemon=True) for work in (rewrite, rewrite, delete)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        submit(one, filled(one), None)
    until_written(one)
    over.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    found = one.totals.as_json()
    assert found["captured"] == 100 == found["complete"] + sum(found["lost"].values())
    assert one.stop(10) and totals(one) == one.totals.as_json()


def test_no_thread_takes_the_interpreter_from_the_forward_pass(disk: SlowDisk, made: Callable[..., Writer]) -> None:
    before = set(threading.enumerate())
    disk.wait()
    one = made()
    for _ in range(5):
        submit(one, filled(one), None)
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"eyas-tick"}
    disk.go_on()


def test_rows_still_on_their_way_from_a_gpu_are_not_written(made: Callable[..., Writer]) -> None:
    """The GPU is a stand-in. And nobody waits for it: the look between two passes finds that they have landed."""
    one = made()
    late, fence = filled(one), Fence()
    late.fence = fence
    submit(one, late, None)
    time.sleep(0.3)
    assert not list(one.identity.folder.glob("*req_*"))
    late.parts[0].rows.tensors()[-1].fill_(7)
    fence.passed = True
    ends = time.monotonic() + 10  # the tick
    while not list(one.identity.folder.glob("req_*")) and time.monotonic() < ends:
        time.sleep(0.02)
    assert one.stop(10) and totals(one)["complete"] == 1
    assert bool((load_file(one.identity.folder / "req_0" / contract.STATES_FILE)[contract.FINAL] == 7).all())


def test_a_folder_deleted_under_the_writer_comes_back_with_its_identity(made: Callable[..., Writer]) -> None:
    one = made()
    submit(one, filled(one), None)
    until_written(one)
    shutil.rmtree(one.identity.dump_dir)
    submit(one, filled(one), None)
    assert one.stop(10)
    assert (one.identity.folder / "req_1").is_dir() and totals(one)["complete"] == 2


def test_an_unwritable_dump_folder_does_not_stop_anything(
    tmp_path: Path, made: Callable[..., Writer], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dumps").write_text("a file where the folder should be")
    one = made()
    submit(one, filled(one), None)
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
        submit(one, filled(one, 64, ((0, 64),)), None)
    assert one.stop(30)
    done.set()
    reader.join()
    assert not wrong and totals(one)["complete"] == 150


def test_what_a_crash_left_is_removed_only_when_its_writer_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, pid, started in (("dead", 2**22 + 1, 1), ("reused", os.getpid(), 1), ("alive", os.getpid(), None)):
        one = Identity(tmp_path, None, {})
        one.writer_id = name
        one.facts |= {"pid": pid, "pid_start_time": started or process_start_time(os.getpid())}
        one.publish(contract.CAPTURING, [], {})
        (one.folder / contract.partial_name(3)).mkdir()
        (one.folder / contract.dump_name(2)).mkdir()
        (one.folder / f".{contract.WRITER_FILE}.x7").touch()

    def remove(path: Path, ignore_errors: bool) -> None:
        """A publisher that outlived its scheduler can't publish any more what is being removed."""
        assert not (path.parent / contract.partial_name(3)).exists()
        shutil.rmtree(path)

    monkeypatch.setattr(identity, "shutil", SimpleNamespace(rmtree=remove))
    assert sweep_partials(tmp_path) == 2
    assert [p.parent.name for p in tmp_path.glob("*/.req_*")] == ["alive"]
    assert [p.parent.name for p in tmp_path.glob(f"*/.{contract.WRITER_FILE}.*")] == ["alive"]
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
