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

_MOST_KEPT = 512  # pieces: each is a descriptor
_SPACE = 1 << 60  # bytes of addresses; only what is in use takes memory


@dataclass(frozen=True, eq=False)
class Piece:
    """`size` bytes at `offset` of the memory's descriptor."""

    offset: int
    size: int
    mapping: mmap.mmap
    pinned: bool


class SharedMemory:
    """One file without a name, a piece of it for every prompt; pieces that are given back are kept for reuse.

    Fresh memory costs the forward thread a page fault every 4 KiB, and giving it back interrupts every other thread of
    the process: together more than copying the rows.
    """

    def __init__(self, kept_bytes: int = 0, device: torch.device | None = None) -> None:
        """`kept_bytes` at most are kept while nobody uses them. For a GPU `device` they are pinned."""
        self.descriptor = os.memfd_create("eyas-rows")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, _SPACE)
        self._kept_bytes = kept_bytes
        self._device = device
        self._pinned = device is not None and device.type == "cuda"
        self._offsets = 0
        self._lock = threading.Lock()
        self._free: dict[int, list[Piece]] = {}
        self._bytes = 0
        self.in_use = 0  # pieces that were taken and not given back

    def take(self, size: int) -> Piece:
        """A piece of `size` bytes (whole pages), with anything in it. Raises OSError."""
        with self._lock:
            if free := self._free.get(size):
                self._bytes -= size
                self.in_use += 1
                return free.pop()
            # Other sizes are asked for now than before: those that are kept would only add to the memory in use.
            while self._bytes and size <= self._kept_bytes < self._bytes + size:
                self._drop_one()
            offset, self._offsets = self._offsets, self._offsets + size
        mapping = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)
        piece = Piece(offset, size, mapping, self._pinned and self._pin(mapping))
        with self._lock:
            self.in_use += 1
        return piece

    def put(self, piece: Piece) -> None:
        """Nobody reads or writes this piece any more."""
        size = piece.size
        with self._lock:
            self.in_use -= 1
            if self._bytes + size <= self._kept_bytes and sum(map(len, self._free.values())) < _MOST_KEPT:
                self._bytes += size
                self._free.setdefault(size, []).append(piece)
                return
        self._drop(piece)

    def _drop_one(self) -> None:
        free = next(free for free in self._free.values() if free)
        piece = free.pop()
        self._bytes -= piece.size
        self._drop(piece)

    def _pin(self, mapping: mmap.mmap) -> bool:
        status = int(torch.cuda.cudart().cudaHostRegister(_address(mapping), len(mapping), 0))
        if status:  # copies are right without, only slower
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
