"""Rows on their way out of the forward pass: one asynchronous copy, and a fence that tells when it has landed."""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_ID_BYTES = 8  # of a token id


@dataclass(frozen=True)
class Buffers:
    """Memory for rows: ids [count] int64, rows [count, H] by name. Not to be touched any more after `release()`."""

    ids: torch.Tensor
    rows: dict[str, torch.Tensor]
    release: Callable[[], None]


class RowCopier:
    """Copies rows from the model's device into host memory without making the forward pass wait.

    On a GPU: pinned destination, a side stream that starts when the forward stream's work so far is done, and
    `record_stream`, so that the allocator does not hand the source's memory to somebody else before the copy has read
    it (the rows would silently be another layer's). On the CPU the copy is done when it returns.
    """

    def __init__(self, device: torch.device, kept_bytes: int = 0) -> None:
        """`kept_bytes` of host memory at most are kept for later rows while nobody uses them."""
        self.device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = _Pool(kept_bytes)

    def bytes_for(self, count: int, like: Mapping[str, torch.Tensor]) -> int:
        """Host memory that `buffers` takes for `count` rows of each tensor and their token ids.

        Rounded up, by a quarter at most, so that a piece fits the prompts of about that length that come later.
        """
        need = count * (_ID_BYTES + sum(_row_bytes(rows) for rows in like.values()))
        step = 1 << max(0, need.bit_length() - 3)
        return -(-need // step) * step

    def buffers(self, count: int, like: Mapping[str, torch.Tensor]) -> Buffers:
        """Host memory for `count` rows, all in one piece; pinned when the model is on a GPU."""
        size = self.bytes_for(count, like)
        if self._side is None:
            piece = self._pool.take(size)
            release: Callable[[], None] = functools.partial(self._pool.put, piece)
        else:  # torch keeps pinned memory itself, and knows which copies are still under way
            piece = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            release = _nothing
        offset = count * _ID_BYTES
        ids, named = piece[:offset].view(torch.int64), {}
        for name, rows in like.items():
            end = offset + count * _row_bytes(rows)
            named[name] = piece[offset:end].view(rows.dtype).view(count, rows.shape[1])
            offset = end
        return Buffers(ids, named, release)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies made inside are ordered after what the current stream has done so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target` of the same shape; inside `copying()` only."""
        target.copy_(source, non_blocking=True)
        if self._side is not None and source.is_cuda:
            source.record_stream(self._side)

    def fence(self) -> Any:
        """Done when every copy so far has landed; None when they all have. Has `synchronize()`."""
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record(self._side)
        return event


class _Pool:
    """Memory to use again, by size.

    Fresh memory costs the forward thread a page fault every 4 KiB, and the writer's giving it back interrupts every
    other thread of the process: together more than copying the rows.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._bytes = 0

    def take(self, size: int) -> torch.Tensor:
        """A piece of `size` bytes, with anything in it."""
        with self._lock:
            if free := self._free.get(size):
                self._bytes -= size
                return free.pop()
            # Other sizes are asked for now than before: those that are kept would only add to the memory in use.
            while self._bytes and size <= self._kept_bytes < self._bytes + size:
                self._bytes -= self._drop_one()
        return torch.empty(size, dtype=torch.uint8)

    def put(self, piece: torch.Tensor) -> None:
        """Nobody reads or writes this piece any more."""
        size = piece.numel()
        with self._lock:
            if self._bytes + size <= self._kept_bytes:
                self._bytes += size
                self._free.setdefault(size, []).append(piece)

    def _drop_one(self) -> int:
        size = next(size for size, free in self._free.items() if free)
        self._free[size].pop()
        return size


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


def _nothing() -> None:
    """Pinned memory is given back by dropping it."""
