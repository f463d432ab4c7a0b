"""What the lifeline promises: whatever happens to the owner, nothing is left; and nobody else's process is touched."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hidden_states.errors import ServerError
from infra import lifeline
from infra.process import OwnedProcess, clear_stale, end_recorded, read_record, running
from tests.servers import REPOSITORY

DEADLINE_S = 30.0
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def eventually(true: Callable[[], object], what: str) -> None:
    """Wait for something another process does."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for: {what}"
        time.sleep(0.02)


def gone(pids: list[int]) -> bool:
    return all(lifeline.start_time(pid) is None for pid in pids)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts an owner of a stubborn tree in a process of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(kind: str = "owner") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.infra.process_tree", kind, str(tmp_path)]
        started.append(subprocess.Popen(command, cwd=REPOSITORY))
        eventually((tmp_path / "pids").exists, "the owner's command has started its workers")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    end_recorded(tmp_path / "pid", grace_s=1)


def tree_pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_killed(owner, tmp_path, number):
    process = owner("owner")
    pids = [*tree_pids(tmp_path), read_record(tmp_path / "pid")["lifeline"]["pid"]]
    assert not gone(pids)

    process.send_signal(number)
    process.wait()

    eventually(lambda: gone(pids), "all four processes of the tree and the lifeline are gone")
    eventually(lambda: not (tmp_path / "pid").exists(), "the pid file is gone")


def test_a_forked_child_of_the_owner_keeps_nothing_alive(owner, tmp_path):
    process = owner("forking-owner")
    eventually((tmp_path / "forked").exists, "the owner has forked")
    forked = int((tmp_path / "forked").read_text())
    pids = tree_pids(tmp_path)

    process.kill()
    process.wait()

    eventually(lambda: gone(pids), "the tree is gone")
    assert not gone([forked]), "the forked child lives on, so it was not its end that closed the pipe"
    os.kill(forked, signal.SIGKILL)


def test_what_a_killed_lifeline_leaves_is_cleared_at_the_next_start(owner, tmp_path):
    process = owner("owner")
    pids = tree_pids(tmp_path)
    os.kill(read_record(tmp_path / "pid")["lifeline"]["pid"], signal.SIGKILL)
    process.kill()
    process.wait()
    eventually(lambda: gone(pids[:1]), "the kernel ended the command with its lifeline")
    assert running(tmp_path / "pid"), "its workers are still there"

    assert clear_stale(tmp_path / "pid", grace_s=0.5)

    assert gone(pids), "also the one that left the session and the one that does not hear TERM"
    assert not (tmp_path / "pid").exists()


def by_hand(folder: Path, log: Path, pid_file: Path, what: str) -> subprocess.Popen[bytes]:
    """A lifeline over one of the test programs, without `OwnedProcess`."""
    program = [sys.executable, "-m", "tests.infra.process_tree", what, str(folder / "pids")]
    options = ["--log", log, "--pid-file", pid_file, "--grace", "0.5"]
    command = [sys.executable, "-I", lifeline.__file__, *options, "--", *program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, cwd=REPOSITORY)


def test_a_full_disk_keeps_nothing_alive(tmp_path):
    """The log takes not one line more, and there are processes to be killed, which is worth one."""
    guard = by_hand(tmp_path, Path("/dev/full"), tmp_path / "pid", "tree")
    eventually((tmp_path / "pids").exists, "the workers are there")
    pids = tree_pids(tmp_path)
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait(DEADLINE_S)
    assert gone(pids)


def test_a_pid_file_that_cannot_be_written_ends_the_command_and_all_it_has_started(tmp_path):
    guard = by_hand(tmp_path, tmp_path / "log", tmp_path / "no" / "folder" / "pid", "tree")
    guard.wait(DEADLINE_S)
    assert not (tmp_path / "pids").exists() or gone(tree_pids(tmp_path))
    assert "no/folder/pid" in (tmp_path / "log").read_text()


def test_nothing_slips_away_by_forking_while_it_is_ended(tmp_path):
    """Runners that fork, leave their child behind and end, without a pause: the worst of a server's start-up."""
    guard = by_hand(tmp_path, tmp_path / "log", tmp_path / "pid", "runners")
    eventually((tmp_path / "pids").exists, "they run")
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait(DEADLINE_S)
    last = (tmp_path / "pids").stat().st_mtime_ns
    time.sleep(0.2)
    assert (tmp_path / "pids").stat().st_mtime_ns == last, "one still runs"


def test_stop_returns_when_nothing_is_left(tmp_path):
    process = OwnedProcess(
        [sys.executable, "-m", "tests.infra.process_tree", "tree", tmp_path / "pids"],
        log_path=tmp_path / "log",
        pid_file=tmp_path / "pid",
        cwd=REPOSITORY,
        grace_s=0.5,
    ).start()
    eventually((tmp_path / "pids").exists, "the workers are there")
    pids = tree_pids(tmp_path)
    assert sorted(process.pids()) == sorted(pids)

    process.stop()

    assert gone(pids)
    assert not process.alive()
    process.stop()  # once more does no harm


def test_a_command_that_ends_takes_its_workers_along(tmp_path):
    code = f"import subprocess, sys; print(subprocess.Popen({SLEEP!r}).pid, flush=True); sys.exit(3)"
    process = OwnedProcess([sys.executable, "-c", code], log_path=tmp_path / "log", pid_file=tmp_path / "pid").start()

    eventually(lambda: not process.alive(), "the command has ended")

    assert process.returncode == 3
    assert gone([int(process.last_lines()[0])])


def test_a_command_ended_by_a_signal_says_so(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    process = OwnedProcess([sys.executable, "-c", code], log_path=tmp_path / "log", pid_file=tmp_path / "pid").start()
    eventually(lambda: not process.alive(), "the command has ended")
    assert process.returncode == 128 + signal.SIGSEGV


def test_a_program_that_is_not_there_is_a_clear_error(tmp_path):
    process = OwnedProcess(["/no/such/program"], log_path=tmp_path / "log", pid_file=tmp_path / "pid", name="store")
    with pytest.raises(ServerError, match="store: cannot start /no/such/program: No such file"):
        process.start()


def test_a_log_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "log").mkdir()
    with pytest.raises(ServerError, match="log: cannot be written: Is a directory"):
        OwnedProcess(SLEEP, log_path=tmp_path / "log", pid_file=tmp_path / "pid").start()


def test_the_log_is_kept_but_only_this_start_is_shown(tmp_path):
    for word in ("first", "second"):
        process = OwnedProcess(
            [sys.executable, "-c", f"print('{word}')"], log_path=tmp_path / "log", pid_file=tmp_path / "pid"
        ).start()
        eventually(lambda process=process: not process.alive(), "the command has ended")
        assert process.last_lines() == [word]
        assert process.new_lines() == [word]
        assert process.new_lines() == []
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_the_command_gets_the_given_environment_only(tmp_path, monkeypatch):
    monkeypatch.setenv("TAKEN_OUT", "1")
    code = "import os; print(os.environ.get('PUT_IN'), os.environ.get('TAKEN_OUT'))"
    process = OwnedProcess(
        [sys.executable, "-c", code],
        log_path=tmp_path / "log",
        pid_file=tmp_path / "pid",
        env={"PUT_IN": "2", "TAKEN_OUT": None},
    ).start()
    eventually(lambda: not process.alive(), "the command has ended")
    assert process.last_lines() == ["2 None"]


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that is not ours to end."""
    process = subprocess.Popen(SLEEP, start_new_session=True)
    yield process.pid
    assert process.poll() is None, "somebody else's process was ended"
    process.kill()
    process.wait()


@pytest.mark.parametrize("change", ["start_time", "boot_id"])
def test_a_pid_that_now_belongs_to_another_process_is_not_touched(tmp_path, stranger, change):
    entry = lifeline.identity(stranger)
    record = {
        "lifeline": entry,
        "command": entry,
        "owner": entry,
        "boot_id": lifeline.boot_id(),
        "mark": "-",
        "argv": SLEEP,
    }
    if change == "start_time":
        older = {**entry, "start_time": entry["start_time"] - 1}
        record |= {"lifeline": older, "command": older, "owner": older}
    else:
        record["boot_id"] = "another boot"
    (tmp_path / "pid").write_text(json.dumps(record))

    assert not clear_stale(tmp_path / "pid", grace_s=0.5)
    assert not (tmp_path / "pid").exists()


@pytest.mark.parametrize("text", ["", "4711", "{}", "[1]", "not json"])
def test_a_pid_file_that_is_not_ours_ends_nothing(tmp_path, text):
    (tmp_path / "pid").write_text(text)
    assert not clear_stale(tmp_path / "pid")


def test_two_runs_do_not_share_a_pid_file(owner, tmp_path):
    process = owner("owner")
    with pytest.raises(ServerError, match=f"belongs to another run that is still there .process {process.pid}"):
        OwnedProcess(SLEEP, log_path=tmp_path / "log2", pid_file=tmp_path / "pid").start()
    assert not gone(tree_pids(tmp_path)[:1])


def test_a_second_start_by_the_same_owner_ends_the_first(tmp_path):
    first = OwnedProcess(SLEEP, log_path=tmp_path / "log", pid_file=tmp_path / "pid").start()
    with OwnedProcess(SLEEP, log_path=tmp_path / "log", pid_file=tmp_path / "pid") as second:
        assert not first.alive()
        assert second.alive()


def test_end_recorded_ends_what_another_process_owns(owner, tmp_path):
    owner("owner")
    pids = tree_pids(tmp_path)
    assert end_recorded(tmp_path / "pid", grace_s=0.5)
    assert gone(pids)


def test_the_lifeline_runs_by_its_path_from_any_folder(tmp_path):
    command = [
        sys.executable,
        "-I",
        "-S",
        lifeline.__file__,
        "--log",
        "log",
        "--pid-file",
        "pid",
        "--",
        "/bin/echo",
        "hi",
    ]
    # not subprocess.run: it closes the pipe at once, which is the owner's death
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE) as guard:
        assert guard.wait(30) == 0
    assert (tmp_path / "log").read_text() == "hi\n"
