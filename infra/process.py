"""A process that a flow owns: started under the lifeline, its output in a file, never left behind.

    with OwnedProcess([...], log_path=..., pid_file=...) as process:
        ...

Used for SGLang, the object store and the local Prefect and MLflow servers alike. `lifeline` says how the owning works.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hidden_states.errors import ServerError
from infra import lifeline

START_DEADLINE_S = 20.0  # the lifeline is a bare interpreter: 0.1 s, more on a machine that swaps

# Write ends of the pipes to our lifelines. A forked child (a data loader's worker, say) must not hold them: it would
# keep a server alive after its owner died. Programs that are exec'ed never get them, the pipes are close-on-exec.
_held_pipes: set[int] = set()


def _close_pipes_in_fork() -> None:
    for pipe in _held_pipes:
        with contextlib.suppress(OSError):
            os.close(pipe)
    _held_pipes.clear()


os.register_at_fork(after_in_child=_close_pipes_in_fork)


class OwnedProcess:
    """One command under a lifeline.

    Args:
        command: program and arguments.
        log_path: file its output is appended to; parent folders are made.
        pid_file: where the lifeline says who it is, for `clear_stale` of a later run.
        env: variables added to this process' own environment; None takes one out.
        grace_s: seconds between TERM and KILL when it is ended.
        name: what messages call it.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log_path: Path,
        pid_file: Path,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        grace_s: float = 15.0,
        name: str = "process",
    ) -> None:
        self.command = [str(part) for part in command]
        self.log_path, self.pid_file = Path(log_path).resolve(), Path(pid_file).resolve()
        self.env, self.cwd, self.grace_s, self.name = dict(env or {}), cwd, grace_s, name
        self._guard: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._log_start = 0
        self._log_read = 0

    def start(self) -> Self:
        """Start the command and return once it runs (not once it is ready).

        Raises:
            ServerError: it could not be started at all; or another living run still owns the pid file.
        """
        if self._guard is not None:
            raise RuntimeError(f"{self.name} was started before; make a new OwnedProcess to start it again")
        for path in (self.log_path, self.pid_file):
            path.parent.mkdir(parents=True, exist_ok=True)
        clear_stale(self.pid_file)
        with contextlib.suppress(FileNotFoundError):  # the log may hold an earlier start: ours begins behind it
            self._log_start = self._log_read = self.log_path.stat().st_size
        try:
            log = self.log_path.open("ab")
        except OSError as error:
            raise ServerError(
                str(self.log_path), f"cannot be written: {error.strerror}", None, "Name another folder."
            ) from error
        environment = {key: value for key, value in (os.environ | self.env).items() if value is not None}
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        _held_pipes.add(write_end)
        self._pipe = write_end
        try:
            self._guard = subprocess.Popen(
                [
                    sys.executable, "-I", "-S", lifeline.__file__, "--log", self.log_path, "--pid-file", self.pid_file,
                    "--grace", str(self.grace_s), "--", *self.command,
                ],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
                cwd=self.cwd,
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(read_end)
            log.close()
            if self._guard is None:
                self._let_go()
        deadline = time.monotonic() + START_DEADLINE_S
        while self._record() is None:
            if self._guard.poll() is not None and self._record() is None:
                if self._guard.returncode == lifeline.EXIT_CANNOT_START:
                    self.stop()
                    raise ServerError(self.name, self._last_words(), None, "Check the command and the paths in it.")
                return self  # started and over already: alive() and returncode tell
            if time.monotonic() > deadline:
                self.stop()
                raise ServerError(
                    self.name,
                    f"its lifeline did not start within {START_DEADLINE_S:g} s",
                    None,
                    f"Is this machine overloaded? See {self.log_path}.",
                )
            time.sleep(0.01)
        return self

    def alive(self) -> bool:
        """Whether the command runs."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the command, 128 + signal number if a signal ended it; None while it runs."""
        return self._guard.poll() if self._guard is not None else None

    def pids(self) -> list[int]:
        """The command and all its descendants, the command first."""
        return lifeline.descendants(self._guard.pid) if self._guard is not None and self.alive() else []

    def stop(self) -> None:
        """End the command and everything it started; returns when nothing is left. Harmless when it is over."""
        self._let_go()
        if self._guard is None:
            return
        try:
            self._guard.wait(self.grace_s + lifeline.KILL_DEADLINE_S + 5)
        except subprocess.TimeoutExpired:  # the lifeline itself is stuck: do its work from outside
            left = [*lifeline.descendants(self._guard.pid), self._guard.pid]
            lifeline.send(left, signal.SIGKILL)
            self._guard.wait(lifeline.KILL_DEADLINE_S)

    def last_lines(self, count: int = 20) -> list[str]:
        """The last lines of this start's output."""
        return self._output(self._log_start)[0][-count:]

    def new_lines(self) -> list[str]:
        """Complete lines of output since the last call."""
        lines, self._log_read = self._output(self._log_read)
        return lines

    def _output(self, start: int) -> tuple[list[str], int]:
        """Complete lines from a position on, and the position behind them."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(start)
                data = log.read()
        except FileNotFoundError:
            return [], start
        if self.alive():
            data = data[: data.rfind(b"\n") + 1]
        return data.decode(errors="replace").splitlines(), start + len(data)

    def _last_words(self) -> str:
        lines = self.last_lines(1)
        return lines[0].removeprefix("lifeline: ") if lines else "it could not be started"

    def _record(self) -> dict[str, Any] | None:
        record = read_record(self.pid_file)
        if record is None or self._guard is None or record["lifeline"]["pid"] != self._guard.pid:
            return None
        return record

    def _let_go(self) -> None:
        if self._pipe is not None:
            _held_pipes.discard(self._pipe)
            os.close(self._pipe)
            self._pipe = None

    def __enter__(self) -> Self:
        return self if self._guard is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def read_record(pid_file: Path) -> dict[str, Any] | None:
    """The pid file's content; None if there is none or it is not one of ours."""
    try:
        record = json.loads(Path(pid_file).read_text())
        entries = (record["lifeline"], record["command"], record["owner"])
        ours = {"boot_id", "mark"} <= record.keys() and all({"pid", "start_time"} <= e.keys() for e in entries)
        return record if ours else None
    except (FileNotFoundError, ValueError, AttributeError, KeyError, TypeError):
        return None


def running(pid_file: Path) -> list[int]:
    """What still runs of a recorded start, the lifeline first: same pid, same start time, same boot.

    If the lifeline was killed, whatever it had started counts as well. A number that meanwhile belongs to another
    process never does.
    """
    record = read_record(pid_file)
    if record is None or record["boot_id"] != lifeline.boot_id():
        return []
    found = [entry["pid"] for entry in (record["lifeline"], record["command"]) if _is_same(entry)]
    orphans = [] if _is_same(record["lifeline"]) else lifeline.marked(record["mark"])
    return list(dict.fromkeys(found + orphans))


def end_recorded(pid_file: Path, grace_s: float = 15.0) -> bool:
    """End what a pid file names, whoever owns it, with all descendants; then remove the file.

    Returns:
        Whether anything was still running.
    """
    found = running(pid_file)
    record = read_record(pid_file)
    if record is not None and found[:1] == [record["lifeline"]["pid"]]:  # it does the rest itself
        lifeline.end_processes(found[:1], grace_s + lifeline.KILL_DEADLINE_S)
    left = running(pid_file)
    lifeline.end_processes([*left, *(pid for root in left for pid in lifeline.descendants(root))], grace_s)
    Path(pid_file).unlink(missing_ok=True)
    return bool(found)


def clear_stale(pid_file: Path, grace_s: float = 15.0) -> bool:
    """End what an earlier run left behind, by its pid file.

    Returns:
        Whether anything was still running.

    Raises:
        ServerError: its owner is another process that lives: two runs share one pid file.
    """
    record = read_record(pid_file)
    if record is not None and running(pid_file) and record["owner"]["pid"] != os.getpid() and _is_same(record["owner"]):
        raise ServerError(
            str(pid_file),
            f"process {record['command']['pid']} belongs to another run that is still there "
            f"(process {record['owner']['pid']})",
            None,
            "Wait for that run, or end it, and start this one again.",
        )
    return end_recorded(pid_file, grace_s)


def _is_same(entry: Mapping[str, Any]) -> bool:
    return entry["start_time"] is not None and lifeline.start_time(entry["pid"]) == entry["start_time"]
