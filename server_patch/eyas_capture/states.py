"""What a dump's tensors are as bytes: their shapes, and where in their piece of memory they lie. For the publisher."""

from typing import Any, NamedTuple

from eyas_capture import contract

_ID_BYTES = 8  # of a token id


class Tensor(NamedTuple):
    """One of the file: its dtype as safetensors calls it, and the ranges (offset in the piece, bytes) it is made of."""

    name: str
    dtype: str
    shape: list[int]
    ranges: list[tuple[int, int]]


def tensors(order: dict[str, Any]) -> list[Tensor]:
    """input_ids [S] and each tensor's captured rows [R, H] of a publisher's order, as they come in the file."""
    spans, base = order["spans"], order["base"]
    count = sum(stop - start for start, stop in spans)
    found = [Tensor(contract.INPUT_IDS, "I64", [order["tokens"]], [(order["sent"], order["tokens"] * _ID_BYTES)])]
    for name, dtype, width, row, place in order["rows"]:
        ranges = [(place + (start - base) * row, (stop - start) * row) for start, stop in spans]
        found.append(Tensor(name, dtype, [count, width], ranges))
    return found


def same_tokens(order: dict[str, Any], data: memoryview) -> bool:
    """Whether the ids the forward pass saw are the request's, row for row."""
    sent, ids = order["sent"], order["ids"] - order["base"] * _ID_BYTES
    bounds = [(start * _ID_BYTES, stop * _ID_BYTES) for start, stop in order["spans"]]
    return all(bytes(data[sent + a : sent + b]) == bytes(data[ids + a : ids + b]) for a, b in bounds)
