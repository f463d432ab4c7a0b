"""Host memory that the publisher processes see too: they are told where, and nothing is copied."""

import contextlib
import logging
import mmap
import os
import threading
import weakref
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

_KEPT_BYTES = 256 << 20  # at most, of memory that isn't pinned: pinning takes longer than copying
_MOST_KEPT = 512  # pieces: each is a descriptor
_POPULATE_WRITE = 23  # of Linux's mman.h; Python has no name for it
_SPACE = 1 << 60  # bytes of addresses; only what is in use takes memory


@dataclass(frozen=True, eq=False)
class Piece:
    """`size` bytes at `offset` of the memory's descriptor."""

    offset: int
    size: int
    mapping: mmap.mmap
    pinned: bool


class SharedMemory:
    """One file without a name, a piece of it for the rows of every pass; pieces that are given back are kept for reuse.

    Fresh memory costs the forward thread a page fault every 4 KiB, and giving it back interrupts every other thread of
    the process: together more than copying the rows. Pinning it for a GPU costs more still.
    """

    def __init__(self, kept_bytes: int = 0, device: torch.device | None = None) -> None:
        """`kept_bytes` at most are kept while nobody uses them. For a GPU `device` they are pinned."""
        self.descriptor = os.memfd_create("eyas-rows")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, _SPACE)
        self.in_use = 0  # pieces that were taken and not given back
        self.bytes_in_use = self.peak_bytes = 0
        self._device = device
        self._pinned = device is not None and device.type == "cuda"
        self._kept_bytes = kept_bytes if self._pinned else min(_KEPT_BYTES, kept_bytes)
        self._offsets = 0
        self._lock = threading.Lock()
        self._kept: list[Piece] = []  # the longest unused first
        self._bytes = 0  # of those

    def take(self, size: int) -> Piece:
        """A piece of `size` bytes (whole pages) or up to twice as many, with anything in it. Raises OSError."""
        with self._lock:
            fits = [piece for piece in self._kept if size <= piece.size <= 2 * size]
            if fits:
                piece = min(fits, key=lambda piece: piece.size)
                self._kept.remove(piece)
                self._bytes -= piece.size
                self._count(piece)
                return piece
            offset, self._offsets = self._offsets, self._offsets + size
        mapping = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED, offset=offset)
        # Populating is silent about memory that is not to be had, and the first touch then ends the process.
        os.posix_fallocate(self.descriptor, offset, size)
        with contextlib.suppress(OSError):  # before Linux 5.14 each page costs a fault
            mapping.madvise(_POPULATE_WRITE)
        piece = Piece(offset, size, mapping, self._pinned and self._pin(mapping))
        with self._lock:
            self._count(piece)
        return piece

    def _count(self, piece: Piece, pieces: int = 1) -> None:
        self.in_use += pieces
        self.bytes_in_use += pieces * piece.size
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)

    def put(self, piece: Piece) -> None:
        """Nobody reads or writes this piece any more."""
        dropped = []
        with self._lock:
            self._count(piece, -1)
            self._kept.append(piece)
            self._bytes += piece.size
            while self._bytes > self._kept_bytes or len(self._kept) > _MOST_KEPT:
                dropped.append(self._kept.pop(0))
                self._bytes -= dropped[-1].size
        for old in dropped:
            self._drop(old)

    def _pin(self, mapping: mmap.mmap) -> bool:
        status = int(torch.cuda.cudart().cudaHostRegister(_address(mapping), len(mapping), 0))
        if status:  # copies are right without, but the pass waits for them
            logger.warning("eyas: cannot pin %d bytes of host memory (CUDA error %d)", len(mapping), status)
            self._pinned = False
            # CUDA remembers the error, and tells whoever asks next: be that one.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
        return not status

    def _drop(self, piece: Piece) -> None:
        if piece.pinned:
            torch.cuda.cudart().cudaHostUnregister(_address(piece.mapping))
        with contextlib.suppress(OSError):  # locked memory: it goes with the process
            piece.mapping.madvise(mmap.MADV_REMOVE)


def _address(mapping: mmap.mmap) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
