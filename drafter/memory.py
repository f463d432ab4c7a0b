"""Freed memory, kept for the next step: a training asks for the same blocks every time.

glibc hands large blocks back to the kernel as soon as they are free; the next step then pays a page fault for every
4 KB of them, 10,000 to 25,000 a step at the demo's size, 3% of its time.
"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_LARGEST = 32 << 20  # the most that glibc lets its heap serve; where it would arrive by itself


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within, what is freed stays with the process (blocks over 32 MB do not); on leaving it is given back. Does
    nothing where the allocator is not glibc's."""
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
    libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    libc.mallopt(_TOP_PAD, 64 << 20)
    try:
        yield
    finally:
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
        libc.mallopt(_TOP_PAD, 128 << 10)
        libc.malloc_trim(0)
