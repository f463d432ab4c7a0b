"""Memory for packed batches, used again once nobody holds a tensor of it.

A batch is a hundred megabytes; asking the system for it anew means that every page is zeroed and mapped anew, which
takes three times as long as the copy into it. A tensor made by `torch.frombuffer` holds a reference to its buffer as
long as any view of it lives, so the buffer's reference count says whether it is free.
"""

import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL = 1 << 20  # below this the allocator has free memory at hand
_KEPT = 12  # buffers: four batches of three large tensors
_FREE = 3  # references to a free buffer: the list's, the loop's, getrefcount's own


class BatchMemory:
    """One reader's. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._buffers: list[mmap.mmap] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < _SMALL:
            return torch.empty(*shape, dtype=dtype)
        return torch.frombuffer(self._take(size), dtype=dtype, count=count).view(*shape)

    def _take(self, size: int) -> mmap.mmap:
        free = [buffer for buffer in self._buffers if sys.getrefcount(buffer) == _FREE]
        fitting = [buffer for buffer in free if size <= len(buffer) <= 2 * size]
        if fitting:
            return min(fitting, key=len)
        if len(self._buffers) >= _KEPT and free:
            self._buffers.remove(free[0])
        # Private: a forked process gets its own, and the system may use huge pages.
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        if len(self._buffers) < _KEPT:
            self._buffers.append(buffer)
        return buffer
