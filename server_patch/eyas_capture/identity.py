"""Who writes: the writer's id, its folder, and writer.json."""

import contextlib
import json
import os
import shutil
import socket
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eyas_capture import contract


def process_start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid` (/proc/<pid>/stat, field 22); None when there is no such process."""
    try:
        return int(process_stat(pid)[19])
    except OSError:
        return None


def process_stat(pid: int) -> list[str]:
    """/proc/<pid>/stat from field 3 on, which is the state. Raises OSError when there is no such process."""
    # The command name is in parentheses and may hold spaces: fields are counted from its end.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would lock out a pipeline of another user
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Identity:
    """One writing process: a folder nobody else ever uses, and what is known about the server.

    The id is the start time, the process and the replica, so a restarted server never continues an old folder, and
    an old dump is never mistaken for a new one.
    """

    def __init__(self, dump_dir: Path, dp_rank: int | None, facts: dict[str, Any]) -> None:
        now = datetime.now(timezone.utc)
        self.writer_id = f"{now:%Y%m%dT%H%M%S}-{os.getpid()}" + ("" if dp_rank is None else f"-dp{dp_rank}")
        # Another host with our pid, in the same second, on a shared disk. (Path.exists raises where we may not look.)
        if os.path.exists(dump_dir / self.writer_id):
            self.writer_id += f"-{socket.gethostname()}"
        self.dump_dir = dump_dir
        self.facts = {
            "contract": contract.VERSION,
            "writer_id": self.writer_id,
            "pid": os.getpid(),
            "pid_start_time": process_start_time(os.getpid()),
            "host": socket.gethostname(),
            "started_at": now.isoformat(timespec="seconds"),
            "dp_rank": dp_rank,
        } | facts

    @property
    def folder(self) -> Path:
        """Where this writer's dumps go."""
        return self.dump_dir / self.writer_id

    def publish(self, state: str, refused: list[str], totals: dict[str, Any]) -> None:
        """Rewrite writer.json, and make the folder again when somebody deleted it. Raises OSError."""
        record = dict.fromkeys(contract.WRITER_KEYS) | self.facts
        record |= {"state": state, "refused": refused, "totals": totals}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / contract.WRITER_FILE, json.dumps(record, indent=1) + "\n")


def sweep_partials(dump_dir: Path) -> int:
    """Remove what writers that died (kill -9, power) left half-written; the number of folders removed.

    Folders of a live process, of another host, or without a readable writer.json are left alone.
    """
    removed = 0
    for file in dump_dir.glob(f"*/{contract.WRITER_FILE}"):
        try:
            writer = json.loads(file.read_text())
            alive = process_start_time(writer["pid"]) == writer["pid_start_time"]
            dead = writer["host"] == socket.gethostname() and not alive
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not dead:
            continue
        for temporary in file.parent.glob(f".{contract.WRITER_FILE}.*"):
            with contextlib.suppress(OSError):
                temporary.unlink()
        for partial in file.parent.glob(contract.PARTIAL_GLOB):
            # A publisher outlives its scheduler by what it has been sent: it publishes this dump whole, or not at all.
            aside = partial.with_name(f"{partial.name}{contract.PARTIAL_SUFFIX}")
            with contextlib.suppress(OSError):
                partial.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
                removed += 1
    return removed
