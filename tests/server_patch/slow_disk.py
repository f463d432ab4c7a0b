"""A disk under the publisher's process that waits, refuses or loses files when told to."""

import fcntl
import os
from pathlib import Path

import pytest

_PATCH = """
import fcntl, os
from pathlib import Path
from eyas_capture import publisher
plain, where = publisher.write_all, Path({where!r})
def write_all(descriptor, view):
    with open(where / "wait") as wait:
        fcntl.flock(wait, fcntl.LOCK_SH)
    if (where / "refuse").exists():
        number = int((where / "refuse").read_text())
        raise OSError(number, os.strerror(number))
    plain(descriptor, view)
    victim = Path(os.readlink(f"/proc/self/fd/{{descriptor}}")).parent / "states.safetensors"
    if (where / "delete").exists() and view[:1] == b"{{" and victim.exists():  # the record, right after the states
        (where / "delete").unlink()
        victim.unlink()
publisher.write_all = write_all
"""


class SlowDisk:
    """Of the publisher processes that are started from now on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "sitecustomize.py").write_text(_PATCH.format(where=str(folder)))
        self._wait = (folder / "wait").open("w")  # a process that waits for its lock sleeps, as for a disk
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))

    def wait(self) -> None:
        """Write nothing until told to go on."""
        fcntl.flock(self._wait, fcntl.LOCK_EX)

    def refuse(self, number: int) -> None:
        """Raise this errno at each write until told to go on."""
        (self._folder / "refuse").write_text(str(number))

    def delete_once(self) -> None:
        """Delete the next dump's states while it is being written."""
        (self._folder / "delete").touch()

    def go_on(self) -> None:
        """Write as any disk does."""
        fcntl.flock(self._wait, fcntl.LOCK_UN)
        for name in ("refuse", "delete"):
            (self._folder / name).unlink(missing_ok=True)
