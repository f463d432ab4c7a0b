"""Rows on their way out of the forward pass: one asynchronous copy, and a fence that tells when it has landed."""

import mmap
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from eyas_capture.memory import SharedMemory
from eyas_capture.refusals import Drift

_ID_BYTES = 8  # of a token id
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # as safetensors calls them
_NO_IDS = torch.empty(0, dtype=torch.int64)


class Layout(NamedTuple):
    """What the rows of a pass look like: (name, dtype, H, bytes of a row) of each tensor, and the bytes of all."""

    tensors: list[tuple[str, torch.dtype, int, int]]
    row_bytes: int

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> "Layout":
        """Of tensors [rows, H]. Raises Drift for a dtype that dumps don't have."""
        if unknown := [f"{name} {rows.dtype}" for name, rows in named.items() if rows.dtype not in _DTYPES]:
            raise Drift(f"captured rows are neither float32, bfloat16 nor float16: {unknown}")
        tensors = [
            (name, rows.dtype, rows.shape[1], rows.shape[1] * rows.element_size()) for name, rows in named.items()
        ]
        return cls(tensors, sum(row for *_, row in tensors))


class Buffers(NamedTuple):
    """Memory for a prompt of S tokens and rows of it: ids [count] int64, rows [count, H] by name.

    They lie in `piece`, (offset, bytes) of the shared memory. Where in it each begins, `places` tells in the words of
    publisher.py. Not to be touched any more after `release()`.
    """

    ids: torch.Tensor
    rows: dict[str, torch.Tensor]
    piece: tuple[int, int]
    places: dict[str, Any]
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

    def bytes_for(self, tokens: int, count: int, layout: Layout) -> int:
        """Host memory that `buffers` takes for a prompt of `tokens` and `count` rows of it.

        Rounded up to whole pages, and by a quarter at most, so that a piece fits the prompts of about that length that
        come later.
        """
        need = (tokens + count) * _ID_BYTES + count * layout.row_bytes
        step = max(mmap.PAGESIZE, 1 << max(0, need.bit_length() - 3))
        return max(1, -(-need // step)) * step

    def buffers(self, tokens: array, count: int, layout: Layout) -> Buffers:
        """Host memory, all in one piece, with a prompt in it and room for `count` rows. Raises OSError.

        For no rows there are no tensors.
        """
        piece = self._memory.take(self.bytes_for(len(tokens), count, layout))
        mapping, sent = piece.mapping, len(tokens) * _ID_BYTES
        mapping[:sent] = tokens.tobytes()
        offset, rows, places = sent + count * _ID_BYTES, {}, []
        for name, dtype, width, row in layout.tensors:
            if count:
                values = torch.frombuffer(mapping, dtype=dtype, count=count * width, offset=offset)
                rows[name] = values.view(count, width)
            places.append((name, _DTYPES[dtype], width, row, offset))
            offset += count * row
        ids = _NO_IDS if not count else torch.frombuffer(mapping, dtype=torch.int64, count=count, offset=sent)
        found = {"sent": 0, "ids": sent, "rows": places}
        return Buffers(ids, rows, (piece.offset, piece.size), found, lambda: self._memory.put(piece))

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
