"""What another trainer's states are: which blocks, which norm, which shift. Found by asking the target itself."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hidden_states.errors import DataError
from hidden_states.formats import ForeignSample
from hidden_states.gate import row_distance

if TYPE_CHECKING:
    from hidden_states.gate import Reference

NEAR = 0.15  # median distance of rows: rounding to bfloat16 is 0.014, a neighbouring block 0.2 or more


_FOUND = "found by a forward pass of the target"
_BEFORE_NORM = "the final state without its norm"


@dataclass(frozen=True)
class Convention:
    """`after_block`: of the aux states, ascending. `final_norm`: "post" or "pre". `how`: what says so."""

    after_block: tuple[int, ...]
    final_norm: str
    how: str

    def in_words(self) -> str:
        blocks = ", ".join(map(str, self.after_block))
        return f"outputs of blocks {blocks}; final state {self.final_norm}-norm; not shifted ({self.how})"


def found_by(reference: "Reference", sample: ForeignSample) -> Convention:
    """The convention of a sample's states, from a forward pass of its tokens.

    Raises:
        DataError: a state is none of the target's, or is shifted; says what it looks like.
    """
    candidates = reference.states(sample.input_ids.tolist())
    blocks = []
    for column in range(sample.aux.shape[1]):
        words = _nearest(sample, f"aux state {column}", sample.aux[:, column], candidates)
        block = re.search(r"block (\d+)", words)
        if block is None:
            raise _wrong(sample, f"aux state {column} is {words}", "the output of a block")
        blocks.append(int(block[1]))
    if blocks != sorted(set(blocks)):
        raise _wrong(sample, f"its aux states are the outputs of blocks {blocks}", "ascending blocks")
    nearest = min(float(row_distance(sample.final, state).median()) for state in candidates.values())
    before = next(state for words, state in candidates.items() if words.startswith(_BEFORE_NORM))
    if nearest > NEAR >= float(row_distance(_unit(sample.final), _unit(before)).median()):
        return Convention(tuple(blocks), "pre", f"{_FOUND}; the final state up to a factor a row")
    words = _nearest(sample, "the final state", sample.final, candidates)
    norms = {"the final state after its norm": "post"}
    norm = "pre" if words.startswith(_BEFORE_NORM) else norms.get(words)
    if norm is None:
        raise _wrong(sample, f"its final state is {words}", "the target's final state")
    return Convention(tuple(blocks), norm, _FOUND)


def _nearest(sample: ForeignSample, what: str, state: Tensor, candidates: dict[str, Tensor]) -> str:
    """The candidate a state is, in words."""
    distances = {words: float(row_distance(state, other).median()) for words, other in candidates.items()}
    words = min(distances, key=lambda name: distances[name])
    if distances[words] <= NEAR:
        return words
    for shift, said in ((1, "late"), (-1, "early")):
        for name, other in candidates.items():
            x, y = (state[1:], other[:-1]) if shift == 1 else (state[:-1], other[1:])
            if len(x) and float(row_distance(x, y).median()) <= NEAR:
                raise _wrong(sample, f"{what} is {name}, one token {said}", "states of their own tokens, not shifted")
    raise _wrong(
        sample, f"{what} is none of this target's (nearest: {words}, distance {distances[words]:.2g})",
        "states of this target",
    )  # fmt: skip


def _unit(rows_RH: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows_RH.float(), dim=-1)


def _wrong(sample: ForeignSample, found: str, expected: str) -> DataError:
    return DataError(sample.name, found, expected, "Give the target these states were captured from.")
