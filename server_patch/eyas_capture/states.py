"""states.safetensors, written row range by row range with a checksum on the way.

The safetensors library is not used for writing on purpose: it wants whole contiguous tensors, so an incomplete dump
would be copied once more (outside the queue's bound), and every byte would be read a second time for its checksum.
"""

import hashlib
import json
import os
import struct

import torch

from eyas_capture import contract
from eyas_capture.spans import Assembly

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PIECE = 8 << 20  # bytes a write; large enough that hashing and writing release the interpreter lock for long


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
    write_all(descriptor, memoryview(struct.pack("<Q", len(text)) + text))
    checksums = {contract.INPUT_IDS: _write_hashed(descriptor, [tokens])}
    for name, rows in assembly.rows.items():
        ranges = [rows[start - assembly.base : stop - assembly.base] for start, stop in assembly.spans]
        checksums[name] = _write_hashed(descriptor, [_bytes_of(part) for part in ranges])
    return checksums, 8 + len(text) + offset


def same_tokens(assembly: Assembly) -> bool:
    """Whether the ids the forward pass saw are the request's, row for row."""
    sent = torch.frombuffer(assembly.tokens, dtype=torch.int64)
    return all(
        torch.equal(assembly.ids[start - assembly.base : stop - assembly.base], sent[start:stop])
        for start, stop in assembly.spans
    )


def _described(rows: torch.Tensor, count: int) -> tuple[str, list[int], int]:
    width = rows.shape[1]
    return _DTYPES[rows.dtype], [count, width], count * width * rows.element_size()


def _bytes_of(rows: torch.Tensor) -> memoryview:
    if not rows.numel():
        return memoryview(b"")
    return rows.view(torch.uint8).numpy().data.cast("B")


def _write_hashed(descriptor: int, ranges: list[memoryview]) -> str:
    digest = hashlib.sha256()
    for view in ranges:
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            digest.update(piece)
            write_all(descriptor, piece)
    return "sha256:" + digest.hexdigest()


def write_all(descriptor: int, view: memoryview) -> None:
    """Write everything: a disk that is nearly full takes a part first, and raises OSError at the rest."""
    while view:
        view = view[os.write(descriptor, view) :]
