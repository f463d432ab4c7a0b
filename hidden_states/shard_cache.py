"""What a reader has at hand: the shards of its next batches, fetched ahead by threads, verified, within bounds.

A shard that is needed almost whole is fetched whole, into a file that stays for the next epoch while there is
room. Of any other only the needed rows are fetched, by range, into a file that has holes and no name, so that nothing
is left behind whatever happens. Shards of a local store are mapped where they lie. Nothing is handed out unverified:
whole shards against the manifest's crc32, single samples against the digests from their capture. (The manifest has a
sha256 of each shard too. Computing it takes as long as receiving the shard, so that is left to `eyas datasets verify`.)
"""

import contextlib
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hidden_states.crc32 import crc32_file
from hidden_states.dataset import Dataset, damaged
from hidden_states.errors import DatasetError, StoreError
from hidden_states.shard_file import MappedShard, file_state
from hidden_states.store import BLOCK_BYTES

WHOLE_FROM = 0.8  # share of a shard that must be needed for all of it to be fetched: at most a quarter more than needed
GAP_BYTES = 256 << 10  # unneeded bytes between two ranges that are fetched along instead of asking twice
RANGE_THREADS = 8
SHARDS_AT_ONCE = 2  # so that connections are busy while the last ranges of a shard arrive
STALE_PART_S = 3600.0


@dataclass(frozen=True)
class Need:
    """What a reader wants of one shard: `rows` of the samples table, during some of its batches (positions in its own
    order)."""

    shard: int
    rows: tuple[int, ...]
    first_batch: int
    last_batch: int


class ShardCache:
    """The shards of one reader. One consumer thread; made by it, and closed by it.

    Args:
        needs: at most one a shard, in the order of their first batch. All that are live at one time must fit into
            `cache_bytes` (`peak_bytes` tells); what is left of it is used to fetch ahead and to keep whole shards.
        folder: None for a local store, whose shards are mapped where they lie.
        verified: what this process has verified already, by name and state of the file; grows.
    """

    def __init__(
        self, dataset: Dataset, needs: Sequence[Need], folder: Path | None, cache_bytes: int, verified: set[str]
    ) -> None:
        self._dataset, self._left, self._budget, self._verified = dataset, deque(needs), cache_bytes, verified
        self._folder = folder / dataset.digest[:16] if folder is not None else None
        self._ends: dict[int, list[int]] = {}
        for need in needs:
            self._ends.setdefault(need.last_batch, []).append(need.shard)
        self._open: dict[int, MappedShard] = {}
        self._sizes: dict[int, int] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        if self._folder is not None:
            with self._explained():
                self._folder.mkdir(parents=True, exist_ok=True)
                self._sweep_parts()
        self._threads = [
            threading.Thread(target=self._run, name=f"eyas-prefetch-{number}", daemon=True)
            for number in range(min(SHARDS_AT_ONCE, len(needs)))
        ]
        for thread in self._threads:
            thread.start()

    def shard(self, shard: int) -> MappedShard:
        """The mapped shard, once it is there.

        Raises:
            DatasetError: its bytes are not those of the manifest.
            StoreError: it cannot be fetched or kept.
        """
        with self._changed:
            self._changed.wait_for(lambda: shard in self._open or self._error is not None)
            if shard in self._open:
                return self._open[shard]
            assert self._error is not None
            raise self._error

    def done_with(self, batch: int) -> None:
        """Lets go of what no batch after this one needs."""
        with self._changed:
            for shard in self._ends.get(batch, ()):
                del self._open[shard], self._sizes[shard]
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._open.clear()

    # -- the threads

    def _run(self) -> None:
        try:
            while (need := self._next()) is not None:
                with self._explained():
                    mapped = self._fetch(need)
                with self._changed:
                    self._open[need.shard] = mapped
                    self._changed.notify_all()
        except BaseException as exc:  # handed to the consumer, which raises it
            with self._changed:
                self._error = self._error or exc
                self._changed.notify_all()

    def _next(self) -> Need | None:
        """The next need, its bytes set aside, once there is room for it; None when there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._error or not self._left or self._fits(self._left[0]))
            if self._closed or self._error or not self._left:
                return None
            need = self._left.popleft()
            self._sizes[need.shard] = need_bytes(self._dataset, need)
            return need

    def _fits(self, need: Need) -> bool:
        return sum(self._sizes.values()) + need_bytes(self._dataset, need) <= self._budget

    def _fetch(self, need: Need) -> MappedShard:
        record, layout = self._dataset.manifest.shards[need.shard], self._dataset.manifest.layout(need.shard)
        key = self._dataset.key(record)
        whole = _is_whole(self._dataset, need)
        local = self._dataset.store.local_path(key)
        if local is None and not whole:
            with self._ranges(need, key) as path:
                mapped = MappedShard(path, layout)
            self._verify_samples(mapped, need, key, remember=False)
            return mapped
        while True:
            path = local or self._whole(need, key)
            try:
                mapped = MappedShard(path, layout)
                if whole:
                    self._verify_file(path, mapped, need, key)
                else:
                    self._verify_samples(mapped, need, key, remember=True)
                return mapped
            except FileNotFoundError:  # of a cache: another process that shares the folder has made room meanwhile
                if local is not None:
                    raise damaged(self._dataset.store.object_uri(key), "the shard is missing") from None

    def _whole(self, need: Need, key: str) -> Path:
        """The shard's file in the cache, fetched unless it is there from an earlier epoch or run."""
        assert self._folder is not None
        record = self._dataset.manifest.shards[need.shard]
        path = self._folder / Path(record.key).name
        with contextlib.suppress(FileNotFoundError):
            there = path.stat()
            if there.st_size == record.size:
                # The least recently used go first. The other time stays: it shows whether the bytes have changed.
                os.utime(path, ns=(time.time_ns(), there.st_mtime_ns))
                return path
        self._make_room()
        part = self._folder / f".part-{uuid.uuid4().hex}"
        try:
            crc32 = self._dataset.store.fetch(key, record.size, part)
            if crc32 != record.crc32:
                raise damaged(self._dataset.store.object_uri(key), _differs(crc32, record.crc32))
            self._verified.add(f"{path} {file_state(part.stat())}")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return path

    @contextlib.contextmanager
    def _ranges(self, need: Need, key: str) -> Iterator[Path]:
        """A file of the shard's size with the needed rows in their places; its name is gone after the block."""
        assert self._folder is not None
        self._make_room()
        layout = self._dataset.manifest.layout(need.shard)
        places = map(self._dataset.span, need.rows)
        spans = sorted(span for place in places for span in layout.sample_spans(*place).values())
        path = self._folder / f".part-{uuid.uuid4().hex}"
        try:
            with open(path, "xb") as file:
                file.truncate(layout.file_bytes)

                def fetch(span: tuple[int, int]) -> None:
                    self._dataset.store.copy_range(key, *span, file.fileno())

                with ThreadPoolExecutor(RANGE_THREADS, thread_name_prefix="eyas-range") as pool:
                    list(pool.map(fetch, _merged(spans)))
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _verify_file(self, path: Path, mapped: MappedShard, need: Need, key: str) -> None:
        record, seen = self._dataset.manifest.shards[need.shard], f"{path} {mapped.state}"
        if seen in self._verified:
            return
        crc32 = crc32_file(path)
        if crc32 != record.crc32:
            if self._folder is not None and path.parent == self._folder:
                path.unlink(missing_ok=True)
                raise DatasetError(
                    str(path), _differs(crc32, record.crc32), "the bytes that were fetched",
                    "The copy is removed and nothing was trained on it: the same command fetches it again. If this "
                    "happens again, check that disk.",
                )  # fmt: skip
            raise damaged(self._dataset.store.object_uri(key), _differs(crc32, record.crc32))
        self._verified.add(seen)

    def _verify_samples(self, mapped: MappedShard, need: Need, key: str, *, remember: bool) -> None:
        for row in need.rows:
            _, entry = self._dataset.entry(row)
            seen = f"{entry.id} {mapped.state}"
            if seen in self._verified:
                continue
            problem = mapped.rows(*entry.span).problem(entry)
            if problem:
                raise damaged(self._dataset.store.object_uri(key), f"sample {entry.id}: {problem}")
            if remember:
                self._verified.add(seen)

    # -- the folder

    def _make_room(self) -> None:
        """Removes whole shards nobody needs now, least recently used first, until all that is live fits."""
        assert self._folder is not None
        with self._changed:
            total = sum(self._sizes.values())
            live = {Path(self._dataset.manifest.shards[shard].key).name for shard in self._sizes}
            idle = [found for found in _listed(self._folder, "*.safetensors") if found[1].name not in live]
            total += sum(status.st_size for status, _ in idle)
            for status, path in sorted(idle, key=lambda pair: pair[0].st_atime_ns):
                if total <= self._budget:
                    return
                total -= status.st_size
                path.unlink(missing_ok=True)
                self._verified.discard(f"{path} {file_state(status)}")

    def _sweep_parts(self) -> None:
        """Removes what a killed run left half fetched."""
        assert self._folder is not None
        for status, path in _listed(self._folder, ".part-*"):
            if time.time() - status.st_mtime > STALE_PART_S:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            if self._folder is None:
                raise StoreError(self._dataset.uri, f"{exc.strerror or exc} ({exc.filename})", "a folder that can be "
                                 "read", "Check its owner and mode, the disk and its mount.") from exc  # fmt: skip
            raise StoreError(f"cache {self._folder}", f"{exc.strerror or exc}", "a folder with room for "
                             f"{self._budget / 1e9:.1f} GB that can be written",
                             "Free space, or set another cache folder or a smaller cache.") from exc  # fmt: skip


def _listed(folder: Path, pattern: str) -> Iterator[tuple[os.stat_result, Path]]:
    """Files and what they are, without those that another process removes meanwhile."""
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            yield path.stat(), path


def need_bytes(dataset: Dataset, need: Need) -> int:
    """Bytes at hand that a need takes."""
    return dataset.manifest.shards[need.shard].size if _is_whole(dataset, need) else _wanted(dataset, need)


def peak_bytes(dataset: Dataset, needs: Sequence[Need]) -> int:
    """The most bytes that batches need at one time: the least a cache must hold."""
    changes: dict[int, int] = {}
    for need in needs:
        cost = need_bytes(dataset, need)
        changes[need.first_batch] = changes.get(need.first_batch, 0) + cost
        changes[need.last_batch + 1] = changes.get(need.last_batch + 1, 0) - cost
    peak = now = 0
    for batch in sorted(changes):
        now += changes[batch]
        peak = max(peak, now)
    return peak


def _wanted(dataset: Dataset, need: Need) -> int:
    token_bytes, final_bytes = dataset.manifest.layout(need.shard).row_bytes()
    spans = [dataset.span(row) for row in need.rows]
    return sum(span.tokens * token_bytes + span.final_rows * final_bytes for span in spans)


def _is_whole(dataset: Dataset, need: Need) -> bool:
    return _wanted(dataset, need) >= WHOLE_FROM * dataset.manifest.shards[need.shard].size


def _differs(found: int, expected: int) -> str:
    return f"crc32 {found:08x}, not the manifest's {expected:08x}"


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted spans (first byte, length) joined over small gaps and cut to BLOCK_BYTES."""
    merged: list[list[int]] = []
    for start, length in spans:
        if merged and start - merged[-1][1] <= GAP_BYTES:
            merged[-1][1] = max(merged[-1][1], start + length)
        else:
            merged.append([start, start + length])
    return [(at, min(BLOCK_BYTES, stop - at)) for start, stop in merged for at in range(start, stop, BLOCK_BYTES)]
