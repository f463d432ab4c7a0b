"""Rows on their way out of the forward pass: one asynchronous copy, and a fence that tells when it has landed."""

import functools
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from eyas_capture.memory import SharedMemory

_ID_BYTES = 8  # of a token id


@dataclass(frozen=True)
class Buffers:
    """Memory for a prompt of S tokens and rows of it: sent [S] and ids [count] int64, rows [count, H] by name.

    They lie in `piece`, (offset, bytes) of the shared memory, and `places` tells where in it each begins. Not to be
    touched any more after `release()`.
    """

    sent: torch.Tensor
    ids: torch.Tensor
    rows: dict[str, torch.Tensor]
    piece: tuple[int, int]
    places: dict[str, int]
    release: Callable[[], None]


class RowCopier:
    """Copies rows from the model's device into host memory without making the forward pass wait.

    On a GPU: pinned destination, a side stream that starts when the forward stream's work so far is done, and
    `record_stream`, so that the allocator does not hand the source's memory to somebody else before the copy has read
    it (the rows would silently be another layer's). On the CPU the copy is done when it returns.
    """

    def __init__(self, device: torch.device, memory: SharedMemory) -> None:
        self.device = device
        self._memory = memory
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bytes_for(self, tokens: int, count: int, like: Mapping[str, torch.Tensor]) -> int:
        """Host memory that `buffers` takes for a prompt and `count` rows of it.

        Rounded up to whole pages, and by a quarter at most, so that a piece fits the prompts of about that length that
        come later.
        """
        need = (tokens + count) * _ID_BYTES + count * sum(_row_bytes(rows) for rows in like.values())
        step = max(mmap.PAGESIZE, 1 << max(0, need.bit_length() - 3))
        return max(1, -(-need // step)) * step

    def buffers(self, tokens: int, count: int, like: Mapping[str, torch.Tensor], sent_name: str) -> Buffers:
        """Host memory for a prompt of `tokens` and `count` rows of it, all in one piece. Raises OSError.

        `sent_name` is the name of the prompt itself in `places`.
        """
        piece = self._memory.take(self.bytes_for(tokens, count, like))
        places = {sent_name: 0}
        sent = piece.bytes[: tokens * _ID_BYTES].view(torch.int64)
        offset = (tokens + count) * _ID_BYTES
        ids, named = piece.bytes[tokens * _ID_BYTES : offset].view(torch.int64), {}
        for name, rows in like.items():
            end = offset + count * _row_bytes(rows)
            named[name] = piece.bytes[offset:end].view(rows.dtype).view(count, rows.shape[1])
            places[name] = offset
            offset = end
        whole = (piece.offset, piece.bytes.numel())
        return Buffers(sent, ids, named, whole, places, functools.partial(self._memory.put, piece))

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
        """Done when every copy so far has landed; None when they all have. Has `query()`."""
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record(self._side)
        return event


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()
