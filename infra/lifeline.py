"""An owner that dies with the flow: runs one command and ends it, with everything it started, when the flow is gone.

    python lifeline.py --log FILE --pid-file FILE [--grace SECONDS] -- COMMAND...

A process started plainly by a flow outlives it when the flow is killed, and a GPU server that nobody owns keeps its
memory. The lifeline stands between them. Its standard input is a pipe whose other end only the flow holds: end-of-file
means that the flow is gone, however it went. On end-of-file, SIGTERM or SIGINT, and when the command ends by itself, it
TERMs the command, waits up to `grace` seconds, and KILLs all descendants. As child subreaper it also gets those that
were re-parented or left the session; SGLang's schedulers do both.

Should the lifeline itself be killed (`pkill -9 -f eyas` gets both), the kernel ends the command and nobody ends what
that had started: SGLang's workers watch their parent only once they have finished importing. So everything started here
carries a mark in its environment; the next start with the same pid file ends whatever still has it.

Standard library only, and runs by its path from any folder: it must not depend on what it guards. Linux only.

The pid file is JSON: `lifeline`, `command` and `owner` as {"pid", "start_time"}, the machine's `boot_id`, the `mark`,
and `argv`. A pid alone is no identity, for numbers come back; the start time (clock ticks since boot) with it is one.
The file goes away with the lifeline.
"""

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
EXIT_CANNOT_START = 127
MARK = "EYAS_LIFELINE"  # environment variable: which lifeline a process belongs to
KILL_DEADLINE_S = 10.0  # a killed process that is still there after this sits in the kernel; waiting longer is no use


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold blanks and parentheses
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Identity of this boot: start times are comparable within one only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identity(pid: int) -> dict[str, int | None]:
    """What the pid file says about a process."""
    return {"pid": pid, "start_time": start_time(pid)}


def _living() -> Iterator[tuple[int, int]]:
    """(pid, parent) of every process, zombies left out."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        if fields[0] not in "ZX":
            yield int(entry), int(fields[1])


def descendants(root: int) -> list[int]:
    """All living descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid, parent in _living():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def marked(mark: str) -> list[int]:
    """Living processes that were started, at any remove, by the lifeline of this mark and by none below it.

    A process that cleared its environment is not found; neither is one of another user, unless we are root.
    """
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid, _ in _living():
        with contextlib.suppress(OSError):  # ended while we looked, or somebody else's
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal processes; those that are already gone are left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_processes(pids: list[int], grace_s: float) -> None:
    """TERM these processes, wait, KILL what is left of them. For processes that are not our children."""
    alive = {pid: start_time(pid) for pid in pids}

    def left() -> list[int]:
        return [pid for pid, since in alive.items() if since is not None and start_time(pid) == since]

    send(left(), signal.SIGTERM)
    _wait_until(lambda: not left(), grace_s)
    send(left(), signal.SIGKILL)
    _wait_until(lambda: not left(), KILL_DEADLINE_S)


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)


class Lifeline:
    """The running command, its log and its pid file."""

    def __init__(self, command: list[str], log: Path, pid_file: Path, grace_s: float) -> None:
        self.command, self.pid_file, self.grace_s = command, pid_file, grace_s
        self.owner = identity(os.getppid())
        self.mark = f"{boot_id()}:{os.getpid()}:{start_time(os.getpid())}"
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.child: subprocess.Popen[bytes] | None = None

    def say(self, message: str) -> None:
        """A line of our own in the command's log; a full disk must not keep us from ending the command."""
        with contextlib.suppress(OSError):
            os.write(self.log, f"lifeline: {message}\n".encode())

    def run(self) -> int:
        """Start the command, wait for an end of any kind, clean up.

        Returns:
            The command's exit status, 128 + signal number if a signal ended it, 127 if it could not be started.
        """
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with contextlib.suppress(PermissionError):  # already a session leader
            os.setsid()  # Ctrl-C in the terminal is for the flow, which then ends the command in good order
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        try:
            self.child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env=os.environ | {MARK: self.mark},
                # Should the lifeline itself be killed, the kernel ends the command.
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )
        except OSError as error:
            self.say(f"cannot start {self.command[0]}: {error.strerror}")
            return EXIT_CANNOT_START
        try:
            self._write_pid_file()
            self._watch(wake_read)
        except OSError as error:  # no room for the pid file, or its folder is gone
            self.say(f"{error.filename}: {error.strerror}: ending the command")
        finally:
            self._end_all()
            self.pid_file.unlink(missing_ok=True)
        status = self.child.wait()
        return status if status >= 0 else 128 - status

    def _write_pid_file(self) -> None:
        assert self.child is not None
        record = {
            "lifeline": identity(os.getpid()),
            "command": identity(self.child.pid),
            "owner": self.owner,
            "boot_id": boot_id(),
            "mark": self.mark,
            "argv": self.command,
        }
        temporary = self.pid_file.with_name(f"{self.pid_file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(record))
        temporary.replace(self.pid_file)

    def _watch(self, wake: int) -> None:
        """Return when the flow is gone, when told to end, or when the command has ended."""
        assert self.child is not None
        owner_pipe = sys.stdin.fileno()
        while self.child.poll() is None:
            ready, _, _ = select.select([owner_pipe, wake], [], [])
            if wake in ready:
                numbers = set(os.read(wake, 512))
                told = numbers & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
                if told:
                    self.say(f"{signal.Signals(min(told)).name}: ending the command")
                    return
                self._bury()
            if owner_pipe in ready and not os.read(owner_pipe, 512):
                self.say("the owner let go: ending the command")
                return

    def _bury(self) -> bool:
        """Reap what has ended, re-parented descendants too; whether nothing we started is left.

        Asked of the kernel: a subreaper without children has no descendants either. A walk through /proc, in contrast,
        misses what is forked during the walk by a process that then ends.
        """
        assert self.child is not None
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
            if ended is None:
                return False
            if ended.si_pid == self.child.pid and self.child.returncode is None:
                self.child.poll()  # its status is Popen's to keep
            else:
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _end_all(self) -> None:
        """TERM, wait, KILL; returns when nothing is left, however long the kernel holds on to it."""
        assert self.child is not None
        mine = os.getpid()
        # The command first and alone: it ends its own workers in good order. Left behind without it, all are told.
        send([self.child.pid] if self.child.poll() is None else descendants(mine), signal.SIGTERM)
        _wait_until(self._bury, self.grace_s)
        pause = 0.0
        while not self._bury():  # again and again, at first without a pause: forks slip between two looks
            left = descendants(mine)
            if pause == 0.0:
                self.say(f"killing {len(left)} process(es) that did not end within {self.grace_s:g} s: {left}")
            send(left, signal.SIGKILL)
            send(_children(), signal.SIGKILL)
            time.sleep(pause)
            pause = min(pause + 0.001, 1.0)


def _children() -> list[int]:
    """Our own children at this moment; none if this kernel does not list them. Ten times faster than `descendants`.

    What was forked while we walked through /proc and lost its parent to our signals is among them.
    """
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []


def main(argv: list[str]) -> int:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(description="Run a command and end it, with all it started, when stdin closes.")
    parser.add_argument("--log", type=Path, required=True, help="file the command's output is appended to")
    parser.add_argument("--pid-file", type=Path, required=True, help="file that says which processes these are")
    parser.add_argument("--grace", type=float, default=15.0, help="seconds between TERM and KILL")
    parser.add_argument("command", nargs="+", help="after --: what to run")
    options = parser.parse_args(argv)
    return Lifeline(options.command, options.log, options.pid_file, options.grace).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
