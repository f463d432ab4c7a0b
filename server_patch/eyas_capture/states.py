"""What a dump's tensors are as bytes: their shapes, and where in their piece of memory they lie. For the publisher."""

from typing import Any, NamedTuple

from eyas_capture import contract

_ID_BYTES = 8  # of a token id


Range = tuple[int, int, int]  # piece of memory, offset in it, bytes


class Tensor(NamedTuple):
    """One of the file: its dtype as safetensors calls it, and the ranges it is made of."""

    name: str
    dtype: str
    shape: list[int]
    ranges: list[Range]


def tensors(order: dict[str, Any]) -> list[Tensor]:
    """input_ids [S] and each tensor's captured rows [R, H] of a publisher's order, as they come in the file."""
    parts = order["parts"]
    places = [ids + rows * _ID_BYTES for *_, ids, rows in order["memory"]]  # where a tensor begins in each piece
    count = sum(stop - start for start, stop, *_ in parts)
    found = [Tensor(contract.INPUT_IDS, "I64", [order["tokens"]], [(0, order["sent"], order["tokens"] * _ID_BYTES)])]
    for name, dtype, width, row in order["rows"]:
        ranges = [(piece, places[piece] + first * row, (stop - start) * row) for start, stop, piece, first in parts]
        found.append(Tensor(name, dtype, [count, width], ranges))
        places = [place + rows * row for place, (*_, rows) in zip(places, order["memory"], strict=True)]
    return found


def same_tokens(order: dict[str, Any], memory: list[memoryview]) -> bool:
    """Whether the ids the forward pass saw are the request's, row for row."""
    for start, stop, piece, first in order["parts"]:
        size, sent = (stop - start) * _ID_BYTES, order["sent"] + start * _ID_BYTES
        seen = order["memory"][piece][2] + first * _ID_BYTES
        if bytes(memory[0][sent : sent + size]) != bytes(memory[piece][seen : seen + size]):
            return False
    return True
