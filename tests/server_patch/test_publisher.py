"""The processes that write dumps: what they write, and what their deaths cost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas_capture import contract, publisher, writer
from eyas_capture.handover import Handover, _Message
from eyas_capture.identity import Identity
from eyas_capture.states import tensors
from eyas_capture.writer import Writer, _Dump, _in_words
from tests.server_patch.slow_disk import SlowDisk
from tests.server_patch.writers import (
    PAGE,
    filled,
    publishers,
    submit,
    tensors_of,
    totals,
    until_ended,
    until_written,
    whole,
)


@pytest.mark.parametrize("kills", [1, 2])
def test_a_publisher_that_is_killed_costs_nothing(disk: SlowDisk, made: Callable[..., Writer], kills: int) -> None:
    """Its orders are done by the next one, the half-written dump too."""
    disk.wait()
    one = made()
    for _ in range(5):
        submit(one, filled(one), None)
    for _ in range(kills):
        ends = time.monotonic() + 10
        while not (publishers(one) and list(one.identity.folder.glob(contract.PARTIAL_GLOB))):
            assert time.monotonic() < ends
            time.sleep(0.01)
            one.look()
        (process,) = publishers(one)
        os.kill(process, signal.SIGKILL)
        while process in publishers(one):
            time.sleep(0.01)
            one.look()
    disk.go_on()
    assert one.stop(20)
    assert totals(one)["complete"] == 5 and totals(one)["lost"] == {}
    assert sorted(p.name for p in one.identity.folder.glob("*req*")) == [f"req_{n}" for n in range(5)]


def kill_publishers_until_a_dump_is_lost(one: Writer) -> None:
    ends = time.monotonic() + 30
    while not one.totals.lost.total() and time.monotonic() < ends:
        for process in publishers(one):
            os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
        one.look()


def test_an_order_that_kills_every_publisher_is_lost_and_said(disk: SlowDisk, made: Callable[..., Writer]) -> None:
    disk.wait()
    one = made()
    submit(one, filled(one), None)
    kill_publishers_until_a_dump_is_lost(one)
    disk.go_on()
    submit(one, filled(one), None)
    assert one.stop(10)
    assert totals(one)["lost"] == {"the publisher process died": 1} and totals(one)["complete"] == 1


def test_publishers_that_cannot_live_neither_hold_up_the_forward_pass_nor_end_the_capture(
    tmp_path: Path, made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They die as soon as they are started; later they can live again."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text("import os; os._exit(3)")
    plain = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    one = made(queue_bytes=3 * PAGE)
    began = time.monotonic()
    for _ in range(40):
        submit(one, filled(one), None)
    until_written(one)
    assert time.monotonic() - began < 20
    assert one.totals.lost == {"the publisher process died": 40}
    monkeypatch.setenv("PYTHONPATH", plain)
    ends = time.monotonic() + 30
    while not one.totals.complete and time.monotonic() < ends:
        submit(one, filled(one), None)
        until_written(one)
        time.sleep(0.1)
    assert one.totals.complete == 1


def test_a_dump_that_was_published_before_its_publisher_died_is_not_written_again(made: Callable[..., Writer]) -> None:
    one = made()
    submit(one, filled(one), None)
    until_written(one)
    before = os.stat(one.identity.folder / "req_0" / contract.STATES_FILE)
    again = filled(one)
    again.counter = 0
    submit(one, again, None)
    until_written(one)
    assert os.stat(one.identity.folder / "req_0" / contract.STATES_FILE).st_mtime_ns == before.st_mtime_ns
    assert one.totals.bytes == 2 * before.st_size and one.totals.lost.total() == 0


def test_an_order_that_kills_its_publishers_costs_none_of_those_behind_it(
    disk: SlowDisk, made: Callable[..., Writer]
) -> None:
    disk.wait()
    one = made()
    for _ in range(20):
        submit(one, filled(one), None)
    kill_publishers_until_a_dump_is_lost(one)
    disk.go_on()
    assert one.stop(20)
    assert totals(one)["lost"] == {"the publisher process died": 1} and totals(one)["complete"] == 19


def test_answers_that_a_publisher_gave_before_it_died_count() -> None:
    """Orders it had not read make the first look at its socket fail, and the answers come after that."""
    handover = Handover(os.memfd_create("rows"), 1)
    handover.start()
    (dead,) = handover._publishers
    dead.process.kill()
    dead.socket.close()
    dead.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.socket.setblocking(False)
    dead.orders = {number: _Message(number, b"{}") for number in range(3)}
    dead.socket.send(b"unread")
    theirs.send(json.dumps({"counter": 0, "bytes": 8}).encode())
    theirs.close()
    assert handover.answers() == [{"counter": 0, "bytes": 8}]
    assert [order.counter for order in handover._unsent] == [1, 2]
    handover.close(0)


def test_without_a_process_to_be_had_dumps_are_lost_and_nobody_waits(
    made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    one = made(queue_bytes=3 * PAGE)
    began = time.monotonic()
    for _ in range(20):
        submit(one, filled(one), None)
    until_written(one)
    assert time.monotonic() - began < 20 and one.totals.lost.total() == 20
    assert "cannot start the publisher process" in "".join(one.totals.lost)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from eyas_capture.identity import Identity, process_stat
from eyas_capture.writer import Writer, _Dump, _in_words
from tests.server_patch.writers import filled, submit
one = Writer(Identity(Path({folder!r}), None, {{}}), 1 << 20, True)
one.start(lambda: None)
for _ in range(20):
    submit(one, filled(one), None)
print(*(p.process.pid for p in one._handover._publishers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_ordered_before_kill_9_is_published_and_the_publisher_ends(tmp_path: Path) -> None:
    code = KILLED.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert ended.stdout.split()
    until_ended(*map(int, ended.stdout.split()))
    assert len(list(tmp_path.glob("*/req_*"))) == 20 and not list(tmp_path.glob(f"*/{contract.PARTIAL_GLOB}"))
    assert all(whole(path) for path in tmp_path.glob("*/req_*"))


def test_a_dump_whose_states_are_deleted_while_it_is_written_is_written_again(
    disk: SlowDisk, made: Callable[..., Writer]
) -> None:
    """Whoever deletes the folder takes one file after the other: a dump with one of them must not be published."""
    disk.delete_once()
    one = made()
    submit(one, filled(one), None)
    assert one.stop(10)
    assert totals(one)["complete"] == 1 and whole(one.identity.folder / "req_0")


def test_the_publisher_takes_nothing_from_the_servers_working_folder(
    tmp_path: Path, made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("json", "hashlib", "eyas_capture"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not me')")
    one = made()
    submit(one, filled(one), None)
    assert one.stop(20) and totals(one)["complete"] == 1


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (128, 4)])
def test_few_cores_have_few_publishers(monkeypatch: pytest.MonkeyPatch, cores: int, processes: int) -> None:
    monkeypatch.setattr(writer.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert writer.process_count() == processes


def test_more_publishers_are_started_when_there_is_more_to_do(
    disk: SlowDisk, made: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "process_count", lambda: 3)
    disk.wait()
    one = made()
    for _ in range(9):
        submit(one, filled(one), None)
    assert len(publishers(one)) == 3
    disk.go_on()
    assert one.stop(20) and totals(one)["complete"] == 9


@pytest.mark.parametrize("most", [1, 5, 7, 8, 1000])
def test_a_dump_in_many_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Pieces smaller than a row, calls of few bytes, and a disk that takes one less than it is given."""
    monkeypatch.setattr(publisher, "_HASHED", 7)
    monkeypatch.setattr(publisher, "_CALL", most)
    write = os.write

    def short(descriptor: int, view: memoryview) -> int:
        assert len(view) <= most
        return write(descriptor, view[: max(1, len(view) - 1)])

    one = Writer(Identity(tmp_path, None, {}), 1 << 20, True)
    assembly = filled(one, 10, ((2, 4), (7, 9)))
    rows = tensors_of(assembly)[contract.FINAL]
    order = _in_words(_Dump(assembly, None), one.identity)
    memory = [memoryview(os.pread(one.memory.descriptor, size, offset)) for offset, size, *_ in order["memory"]]
    with open(tmp_path / "states", "wb") as file, monkeypatch.context() as patch:
        patch.setattr(publisher.os, "write", short)
        nbytes, checksums = publisher.write_states(file.fileno(), tensors(order), memory)
    found = load_file(tmp_path / "states")
    assert nbytes == (tmp_path / "states").stat().st_size
    assert found[contract.INPUT_IDS].tolist() == list(range(100, 110))
    assert torch.equal(found[contract.FINAL], rows)
    raw = found[contract.FINAL].view(torch.uint8).numpy().tobytes()
    assert checksums[contract.FINAL] == contract.tensor_checksum(raw)
