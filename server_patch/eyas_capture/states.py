"""What a dump's tensors are as bytes: their names and shapes, and where in their piece of memory they lie."""

from typing import Any

import torch

from eyas_capture import contract
from eyas_capture.spans import Assembly

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def described(assembly: Assembly) -> list[dict[str, Any]]:
    """input_ids [S] and each tensor's captured rows [R, H], in the order of the file.

    Of each its name, dtype as safetensors calls it, shape, and the ranges (offset in the piece, bytes) that make it up.
    """
    prompt = len(assembly.tokens)
    tensors = [_tensor(contract.INPUT_IDS, "I64", [prompt], [(assembly.places[contract.INPUT_IDS], prompt * 8)])]
    for name, rows in assembly.rows.items():
        width, row, place = rows.shape[1], rows.shape[1] * rows.element_size(), assembly.places[name]
        ranges = [(place + (start - assembly.base) * row, (stop - start) * row) for start, stop in assembly.spans]
        tensors.append(_tensor(name, _DTYPES[rows.dtype], [assembly.row_count, width], ranges))
    return tensors


def _tensor(name: str, dtype: str, shape: list[int], ranges: list[tuple[int, int]]) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "ranges": ranges}


def same_tokens(assembly: Assembly) -> bool:
    """Whether the ids the forward pass saw are the request's, row for row."""
    seen, sent, base = _bytes_of(assembly.ids), memoryview(assembly.tokens).cast("B"), assembly.base
    return all(
        bytes(seen[(start - base) * 8 : (stop - base) * 8]) == bytes(sent[start * 8 : stop * 8])
        for start, stop in assembly.spans
    )


def put_prompt(assembly: Assembly) -> None:
    """Write the request's tokens into the shared memory."""
    if assembly.tokens:
        _bytes_of(assembly.sent)[:] = memoryview(assembly.tokens).cast("B")


def _bytes_of(ids: torch.Tensor) -> memoryview:
    return ids.numpy().data.cast("B") if ids.numel() else memoryview(b"")
