"""A process that outlives the command that started it, and can be ended by any later one.

It runs under the lifeline like an OwnedProcess, so that ending it takes all its descendants; but the pipe whose end
would end it is held by the lifeline itself, so only a signal does.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hidden_states.errors import ServerError
from infra import lifeline
from infra.process import START_DEADLINE_S, end_recorded, read_record, running


class DetachedProcess:
    """What a pid file names. `start` makes it; any other process may look at it and stop it."""

    def __init__(self, *, log_path: Path, pid_file: Path, name: str) -> None:
        self.log_path, self.pid_file, self.name = Path(log_path), Path(pid_file), name

    def start(self, command: Sequence[str], env: Mapping[str, str | None]) -> None:
        """Returns once the command runs (not once it is ready). What the pid file names is ended first; the log
        begins anew.

        Raises:
            ServerError: it could not be started.
        """
        for path in (self.log_path, self.pid_file):
            path.parent.mkdir(parents=True, exist_ok=True)
        end_recorded(self.pid_file)
        read_end, write_end = os.pipe()
        try:
            with open(self.log_path, "wb") as log:
                guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", lifeline.__file__, "--log", self.log_path,
                     "--pid-file", self.pid_file, "--", *command],
                    stdin=read_end, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True, pass_fds=[write_end],
                    env={key: value for key, value in (os.environ | dict(env)).items() if value is not None},
                )  # fmt: skip
        finally:
            os.close(read_end)
            os.close(write_end)
        deadline = time.monotonic() + START_DEADLINE_S
        while read_record(self.pid_file) is None:
            if guard.poll() is not None or time.monotonic() > deadline:
                guard.kill()
                lines = self.last_lines(1) or ["no output"]
                raise ServerError(self.name, f"it could not be started: {lines[0]}", None, f"See {self.log_path}.")
            time.sleep(0.01)

    def alive(self) -> bool:
        """Whether the command runs."""
        return bool(running(self.pid_file))

    def pid(self) -> int | None:
        """The command's, while it runs."""
        record = read_record(self.pid_file)
        return record["command"]["pid"] if record is not None and self.alive() else None

    def stop(self) -> bool:
        """Ends it with all its descendants.

        Returns:
            Whether it was running.

        Raises:
            ServerError: it is still there.
        """
        found = end_recorded(self.pid_file)
        if self.alive():
            raise ServerError(self.name, f"processes {running(self.pid_file)} do not end", None, "End them by hand.")
        return found

    def last_lines(self, count: int = 20) -> list[str]:
        """The last lines of its output."""
        try:
            return self.log_path.read_text(errors="replace").splitlines()[-count:]
        except FileNotFoundError:
            return []
