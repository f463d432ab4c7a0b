"""The folder the capture plugin writes to: its writers, their dumps, and the counters seen so far."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas_capture import contract
from hidden_states.errors import DumpError
from hidden_states.record import BadDump, Record, Writer, read_record_file, read_writer
from hidden_states.states_file import StatesFile

_FIRST_LOOK_S, _SLOWEST_LOOK_S = 0.01, 0.5


@dataclass(frozen=True, order=True)
class DumpRef:
    """Where a published dump lies. Orders by writer (their ids begin with their start time), then counter."""

    writer_id: str
    counter: int
    path: Path

    def __str__(self) -> str:
        return f"{contract.dump_name(self.counter)} of writer {self.writer_id}"


def read_record(ref: DumpRef) -> Record:
    """The record of a dump.

    Raises:
        BadDump: `record-file`, `contract`, or `misplaced`: the record is not of the folder it lies in.
    """
    record = read_record_file(ref.path / contract.RECORD_FILE)
    if (record.writer_id, record.counter) != (ref.writer_id, ref.counter):
        raise BadDump(
            "misplaced",
            str(ref),
            f"its record is of {contract.dump_name(record.counter)} of writer {record.writer_id}",
            None,
            "Somebody moved or copied dumps by hand; remove the folder.",
        )
    return record


class Dump:
    """One published dump: its record, its writer, and its tensors when they are asked for."""

    def __init__(self, ref: DumpRef, record: Record, writer: Writer) -> None:
        self.ref, self.record, self.writer = ref, record, writer
        self._states: StatesFile | None = None

    @property
    def states(self) -> StatesFile:
        """The tensors' file.

        Raises:
            BadDump: `file-intact`.
        """
        if self._states is None:
            self._states = StatesFile(self.ref.path / contract.STATES_FILE)
        return self._states

    def tensor(self, name: str) -> torch.Tensor:
        """`input_ids` [S], `after_block_<k>` [R, H] or `final` [R, H], over the mapped file.

        Raises:
            BadDump: `file-intact`, or `tensor-set` when there is no such tensor.
        """
        if name not in self.states.tensors:
            names = ", ".join(self.states.tensors)
            raise BadDump("tensor-set", str(self.ref), f"no tensor {name!r}", f"one of {names}")
        return self.states.tensor(name)

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes as captured, for packing; no copy."""
        self.tensor(name)
        return self.states.raw(name)

    def verify(self) -> None:
        """Compare every tensor's bytes with the checksum taken at capture.

        Raises:
            BadDump: `file-intact`, `tensor-set` (record and file name other tensors) or `checksum`.
        """
        if set(self.record.checksums) != set(self.states.tensors):
            raise BadDump(
                "tensor-set",
                str(self.ref),
                f"tensors {', '.join(self.states.tensors)}",
                f"those of its record: {', '.join(self.record.checksums)}",
            )
        for name, expected in self.record.checksums.items():
            found = contract.tensor_checksum(self.states.raw(name))
            if found != expected:
                raise BadDump(
                    "checksum",
                    str(self.ref),
                    f"tensor {name} has the checksum {found[:19]}...",
                    f"{expected[:19]}..., taken when it was captured",
                    "The disk or somebody changed it; the sample is captured again.",
                )

    def __repr__(self) -> str:
        return f"Dump({self.ref}, request {self.record.request_id}, {self.record.rows} of {self.record.tokens} rows)"


class DumpFolder:
    """The capture folder as one reader sees it. Remembers which counters it has seen, also after dumps are removed."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._seen: dict[str, set[int]] = {}
        self._requests: dict[DumpRef, str | None] = {}  # request id of each dump still there; None = unreadable record

    def writers(self) -> list[Writer]:
        """Everybody who ever wrote here, oldest first.

        Raises:
            BadDump: a writer.json cannot be read (`writer-file`) or is of another release (`contract`).
        """
        found = []
        for folder in self._writer_folders():
            writer = read_writer(folder / contract.WRITER_FILE)
            if writer.writer_id != folder.name:
                raise BadDump("misplaced", str(folder), f"its writer.json is of writer {writer.writer_id}")
            found.append(writer)
        return found

    def dumps(self, writer_id: str | None = None) -> list[DumpRef]:
        """Published dumps, by writer and counter. What is still being written is not among them."""
        refs = []
        for folder in self._writer_folders():
            if writer_id is not None and folder.name != writer_id:
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    counter = contract.parse_dump_name(entry.name)
                    if counter is not None and entry.is_dir(follow_symlinks=False):
                        refs.append(DumpRef(folder.name, counter, Path(entry.path)))
                        self._seen.setdefault(folder.name, set()).add(counter)
        return sorted(refs)

    def open(self, ref: DumpRef) -> Dump:
        """A dump with its record and writer.

        Raises:
            BadDump: its record or its writer's file cannot be trusted.
        """
        return Dump(ref, read_record(ref), read_writer(ref.path.parent / contract.WRITER_FILE))

    def clear(self) -> int:
        """Remove every published dump; the number removed."""
        return self.remove(self.dumps())

    def remove(self, refs: Iterable[DumpRef]) -> int:
        """Remove dumps that are done with; the number removed.

        A dump is first renamed, so that a kill in between never leaves half a dump under its name.

        Raises:
            DumpError: the folder belongs to somebody else or is read-only.
        """
        removed = 0
        for ref in refs:
            doomed = ref.path.with_name(contract.partial_name(ref.counter))
            try:
                with contextlib.suppress(FileNotFoundError):  # somebody else removed it first
                    ref.path.rename(doomed)
                    shutil.rmtree(doomed)
                    removed += 1
            except OSError as error:
                raise DumpError(
                    str(ref.path),
                    f"cannot be removed ({error.strerror})",
                    None,
                    "The pipeline needs write access to the capture folder: run it as the server's user.",
                ) from error
            self._requests.pop(ref, None)
        return removed

    def base_line(self) -> dict[str, int]:
        """The last counter of each writer so far: seen here, or named in its writer.json; -1 before its first."""
        base = {}
        for writer in self.writers():
            seen = self._seen.get(writer.writer_id, set())
            base[writer.writer_id] = max([writer.next_counter - 1, *seen])
        return base

    def seen(self) -> dict[str, frozenset[int]]:
        """Counters seen, by writer, removed dumps included: what gaps are judged by."""
        return {writer_id: frozenset(counters) for writer_id, counters in self._seen.items()}

    def wait_for(
        self, request_ids: Collection[str], timeout_s: float, keep_waiting: Callable[[], bool] | None = None
    ) -> set[str]:
        """Wait until each request has a dump; the request ids that have none when the time is up.

        Looks at the folder ever more rarely (10 ms up to 0.5 s apart), and reads each record once.

        Args:
            keep_waiting: asked before each look; False ends the wait (the server died).
        """
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_LOOK_S
        while True:
            missing = set(request_ids) - self.request_ids()
            if not missing:
                return missing
            left = deadline - time.monotonic()
            if left <= 0 or (keep_waiting is not None and not keep_waiting()):
                return missing - self.request_ids()
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _SLOWEST_LOOK_S)

    def request_ids(self) -> set[str]:
        """Request ids of the published dumps; dumps whose record cannot be read have none."""
        known, now = self._requests, dict[DumpRef, str | None]()
        for ref in self.dumps():
            try:
                now[ref] = known[ref] if ref in known else read_record(ref).request_id
            except (BadDump, KeyError):
                # Whoever opens a bad dump tells; here it only means that nobody is found by it. A KeyError: removed by
                # another thread a moment ago.
                now[ref] = None
        self._requests = now
        return {request_id for request_id in now.values() if request_id is not None}

    def _writer_folders(self) -> list[Path]:
        try:
            with os.scandir(self.path) as entries:
                folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DumpError(str(self.path), f"cannot be listed ({error.strerror})") from error
        return sorted(folder for folder in folders if (folder / contract.WRITER_FILE).is_file())
