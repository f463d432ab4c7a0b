"""states.safetensors, written row range by row range with a checksum on the way.

The safetensors library is not used for writing on purpose: it wants whole contiguous tensors, so an incomplete dump
would be copied once more (outside the queue's bound), and every byte would be read a second time for its checksum.

Every system call, large hash and torch operation gives Python's interpreter lock away, and the forward thread pays for
each hand-over. So tensors are hashed whole, and small ones are written together. But no call writes more than 256 KB:
file systems with large folios (XFS, ext4 since Linux 6.16) look for as much memory in one piece as a call brings, and
once memory is fragmented, looking costs five times the copy.
"""

import hashlib
import json
import os
import struct
from collections.abc import Sequence

import torch

from eyas_capture import contract
from eyas_capture.spans import Assembly

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PIECE = 8 << 20  # bytes hashed before they are written: few enough to be in the cache still
_PIECES = 512  # a call takes 1,024 at most
_CALL = 256 << 10  # bytes


def write_states(descriptor: int, assembly: Assembly) -> tuple[dict[str, str], int]:
    """Write input_ids [S] and each tensor's captured rows [R, H] to an open file; (checksum by tensor, bytes).

    Raises OSError.
    """
    header: dict[str, dict[str, object]] = {}
    offset = 0
    tokens = memoryview(assembly.tokens).cast("B")
    for name, dtype, shape, nbytes in [
        (contract.INPUT_IDS, "I64", [len(assembly.tokens)], len(tokens)),
        *((name, *_described(rows, assembly.row_count)) for name, rows in assembly.rows.items()),
    ]:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    file = _Gathered(descriptor)
    file.add(memoryview(struct.pack("<Q", len(text)) + text))
    checksums = {contract.INPUT_IDS: file.add_hashed([tokens])}
    for name, rows in assembly.rows.items():
        data, row = _bytes_of(rows), rows.shape[1] * rows.element_size()
        checksums[name] = file.add_hashed(
            [data[(start - assembly.base) * row : (stop - assembly.base) * row] for start, stop in assembly.spans]
        )
    file.flush()
    return checksums, 8 + len(text) + offset


def same_tokens(assembly: Assembly) -> bool:
    """Whether the ids the forward pass saw are the request's, row for row."""
    seen, sent = _bytes_of(assembly.ids), memoryview(assembly.tokens).cast("B")
    size, base = assembly.tokens.itemsize, assembly.base
    return all(
        bytes(seen[(start - base) * size : (stop - base) * size]) == bytes(sent[start * size : stop * size])
        for start, stop in assembly.spans
    )


def _described(rows: torch.Tensor, count: int) -> tuple[str, list[int], int]:
    width = rows.shape[1]
    return _DTYPES[rows.dtype], [count, width], count * width * rows.element_size()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return tensor.view(torch.uint8).numpy().data.cast("B")


class _Gathered:
    """Bytes on their way to a file, handed over some megabytes at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._views: list[memoryview] = []
        self._bytes = 0

    def add(self, view: memoryview) -> None:
        self._views.append(view)
        self._bytes += len(view)
        if self._bytes >= _PIECE or len(self._views) >= _PIECES:
            self.flush()

    def add_hashed(self, ranges: list[memoryview]) -> str:
        """Add these one after another; the checksum of them all."""
        digest = hashlib.sha256()
        for view in ranges:
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                digest.update(piece)
                self.add(piece)
        return "sha256:" + digest.hexdigest()

    def flush(self) -> None:
        write_all(self._descriptor, self._views)
        self._views, self._bytes = [], 0


def write_all(descriptor: int, views: Sequence[memoryview]) -> None:
    """Write everything: a disk that is nearly full takes a part first, and raises OSError at the rest."""
    left = [view for view in views if view]
    while left:
        written = os.writev(descriptor, _first(left))
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def _first(views: Sequence[memoryview]) -> list[memoryview]:
    """What one call writes of these."""
    call, room = [], _CALL
    for view in views:
        call.append(view[:room])
        room -= len(call[-1])
        if not room:
            break
    return call
