"""What a dump's tensors are as bytes: their shapes, and where in a piece of memory they lie. Standard library only."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from eyas_capture import contract

ID_BYTES = 8  # of a token id
Range = tuple[int, int, int]  # piece of memory, offset in it, bytes


class Tensor(NamedTuple):
    """One of the file: its dtype as safetensors calls it, and the ranges it is made of."""

    name: str
    dtype: str
    shape: list[int]
    ranges: list[Range]


def places(ids: int, count: int, row_bytes: Iterable[int]) -> list[int]:
    """Where in a piece its tensors begin: after the ids of its rows, one after the other."""
    *found, _ = accumulate((count * row for row in row_bytes), initial=ids + count * ID_BYTES)
    return found


def tensors(order: dict[str, Any]) -> list[Tensor]:
    """input_ids [S] and each tensor's captured rows [R, H] of a publisher's order, as they come in the file."""
    parts = order["parts"]
    begin = [places(ids, rows, [row for *_, row in order["rows"]]) for *_, ids, rows in order["memory"]]
    count = sum(stop - start for start, stop, *_ in parts)
    found = [Tensor(contract.INPUT_IDS, "I64", [order["tokens"]], [(0, order["sent"], order["tokens"] * ID_BYTES)])]
    for number, (name, dtype, width, row) in enumerate(order["rows"]):
        ranges = [
            (piece, begin[piece][number] + first * row, (stop - start) * row) for start, stop, piece, first in parts
        ]
        found.append(Tensor(name, dtype, [count, width], ranges))
    return found


def same_tokens(order: dict[str, Any], memory: list[memoryview]) -> bool:
    """Whether the ids the forward pass saw are the request's, row for row."""
    for start, stop, piece, first in order["parts"]:
        size, sent = (stop - start) * ID_BYTES, order["sent"] + start * ID_BYTES
        seen = order["memory"][piece][2] + first * ID_BYTES
        if bytes(memory[0][sent : sent + size]) != bytes(memory[piece][seen : seen + size]):
            return False
    return True
