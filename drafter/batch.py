"""A packed row: whole documents one after the other, unshifted, as the drafter reads them.

Legend: N tokens, A captured blocks, H hidden size.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hidden_states.top_k import TopLogits


class Batch(Protocol):
    """One packed row of documents, unshifted, as `hidden_states.stream` yields it."""

    @property
    def input_ids(self) -> Tensor:
        """[N]."""

    @property
    def loss_mask(self) -> Tensor:
        """[N], 1 = token to learn."""

    @property
    def aux(self) -> Tensor:
        """[N, A, H], ascending blocks."""

    @property
    def final(self) -> Tensor:
        """[N, H], after the target's final norm."""

    @property
    def doc_ids(self) -> Tensor:
        """[N], documents contiguous."""

    @property
    def positions(self) -> Tensor:
        """[N], within the document."""

    @property
    def sample_ids(self) -> list[str]:
        """of the documents, in order."""


@dataclass
class Row:
    """A `Batch` made by hand. `top`: in place of `final`, where only the largest teacher logits are known."""

    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final: Tensor
    doc_ids: Tensor
    positions: Tensor
    sample_ids: list[str]
    top: TopLogits | None = None
