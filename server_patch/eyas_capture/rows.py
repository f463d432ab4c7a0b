"""Rows on their way out of the forward pass: one asynchronous copy, and a fence that tells when it has landed."""

import mmap
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from eyas_capture.memory import Piece, SharedMemory
from eyas_capture.refusals import Drift
from eyas_capture.states import ID_BYTES, places

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # as safetensors calls them


class Layout(NamedTuple):
    """What the rows of a pass look like: (name, dtype, H, bytes of a row) of each tensor."""

    tensors: tuple[tuple[str, torch.dtype, int, int], ...]
    row_bytes: int  # of all tensors and the id

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> "Layout":
        """Of tensors [rows, H]. Raises Drift for a dtype that dumps don't have."""
        if unknown := [f"{name} {rows.dtype}" for name, rows in named.items() if rows.dtype not in _DTYPES]:
            raise Drift(f"captured rows are neither float32, bfloat16 nor float16: {unknown}")
        tensors = tuple(
            (name, rows.dtype, rows.shape[1], rows.shape[1] * rows.element_size()) for name, rows in named.items()
        )
        return cls(tensors, sum(row for *_, row in tensors) + ID_BYTES)

    def bytes_for(self, tokens: int, count: int) -> int:
        """Host memory for a prompt of `tokens` and `count` rows of it."""
        return tokens * ID_BYTES + count * self.row_bytes

    @property
    def words(self) -> list[tuple[str, str, int, int]]:
        """The tensors in the words of publisher.py."""
        return [(name, _DTYPES[dtype], width, row) for name, dtype, width, row in self.tensors]


class PassRows:
    """Prompts, and rows of one pass, in a piece of the shared memory: until the last dump that needs them is written.

    `prompts` are their places in the piece, `rows` the first row of each part, in the order they were given. `holders`
    is for the forward pass to set, before any dump is submitted; `release` for the writer to call, once for each.
    """

    def __init__(
        self, memory: SharedMemory, piece: Piece, layout: Layout, prompts: list[int], ids: int, count: int
    ) -> None:
        self.layout, self.prompts = layout, prompts
        self.rows: list[int] = []
        self.holders = 0
        self._memory, self._piece, self._ids, self._count = memory, piece, ids, count

    @property
    def words(self) -> tuple[int, int, int, int]:
        """The piece in the words of publisher.py."""
        return self._piece.offset, self._piece.size, self._ids, self._count

    def tensors(self) -> list[torch.Tensor]:
        """ids [count] int64, and [count, H] of each tensor."""
        mapping, count = self._piece.mapping, self._count
        if not count:
            return []
        found = [torch.frombuffer(mapping, dtype=torch.int64, count=count, offset=self._ids)]
        begin = places(self._ids, count, [row for *_, row in self.layout.tensors])
        for (_, dtype, width, _), place in zip(self.layout.tensors, begin, strict=True):
            values = torch.frombuffer(mapping, dtype=dtype, count=count * width, offset=place)
            found.append(values.view(count, width))
        return found

    def discard(self) -> None:
        """Nobody will hold it."""
        self._memory.put(self._piece)

    def release(self) -> None:
        """One dump less."""
        self.holders -= 1
        if not self.holders:
            self.discard()


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

    def copy(
        self,
        prompts: Sequence[array],
        parts: Sequence[tuple[int, int]],
        input_ids: torch.Tensor,
        named: Mapping[str, torch.Tensor],
        layout: Layout,
    ) -> PassRows:
        """Prompts, and rows [offset, offset + count) of a pass for each part, ascending. Raises OSError.

        Rows of neighbouring parts are copied at once: many requests of a pass cost as few copies as one.
        """
        runs: list[list[int]] = []
        for offset, count in parts:
            if runs and runs[-1][1] == offset:
                runs[-1][1] += count
            else:
                runs.append([offset, offset + count])
        rows = self._room(prompts, sum(stop - start for start, stop in runs), layout)
        try:
            self._copy(runs, [input_ids, *named.values()], rows.tensors())
        except BaseException:
            if self._side is not None:
                self._side.synchronize()  # what is on its way must land before somebody else has the memory
            rows.discard()
            raise
        *rows.rows, _ = accumulate((count for _, count in parts), initial=0)
        return rows

    def _copy(self, runs: list[list[int]], sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        done = 0
        with self._copying():
            for start, stop in runs:
                for target, source in zip(targets, sources, strict=True):
                    target[done : done + stop - start].copy_(source[start:stop], non_blocking=True)
                done += stop - start
            if self._side is not None:
                for source in filter(lambda source: source.is_cuda, sources):
                    source.record_stream(self._side)

    def _room(self, prompts: Sequence[array], count: int, layout: Layout) -> PassRows:
        """With the prompts in it."""
        *begin, ids = accumulate((len(prompt) * ID_BYTES for prompt in prompts), initial=0)
        piece = self._memory.take(_rounded(ids + count * layout.row_bytes))
        for prompt, place in zip(prompts, begin, strict=True):
            piece.mapping[place : place + len(prompt) * ID_BYTES] = prompt.tobytes()
        return PassRows(self._memory, piece, layout, begin, ids, count)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copies made inside are ordered after what the current stream has done so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def fence(self) -> Any:
        """Done when every copy so far has landed; None when they all have. Has `query()`."""
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record(self._side)
        return event


def _rounded(need: int) -> int:
    """Up to whole pages, and by an eighth at most: a piece fits passes of about that size that come later."""
    step = max(mmap.PAGESIZE, 1 << max(0, need.bit_length() - 4))
    return max(1, -(-need // step)) * step
