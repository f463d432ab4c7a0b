"""The k largest teacher logits of a row in place of its final state, and the state they stand for.

Stored are the target ids (int32) and logits (float16) of each row, largest first. Read back is the shortest state that
gives these k logits with the target's head: with W [k,H] the head's rows of the k ids and v their logits,

    state = W^T (W W^T + r I)^-1 v

which is the true final state projected onto the span of those k rows, for v = W final. So the k logits are right to
rounding (r, a millionth of the mean diagonal, only keeps near-equal rows from blowing up), the trainer needs not know
what was stored, and what is lost is exact to say: how the ids beyond the k differ from each other.
"""

import torch
from torch import Tensor

from hidden_states.errors import DatasetError

_CHUNK_BYTES = 64 << 20
_RIDGE = 1e-6


class TopK:
    """Encodes and decodes with the target's head [V,H]."""

    def __init__(self, head_VH: Tensor) -> None:
        self.head_VH = head_VH

    def encode(self, final_RH: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """ids [R,k] int32 and logits [R,k] float16, largest first.

        Raises:
            DatasetError: the head is not this state's, or k exceeds the vocabulary.
        """
        vocabulary, size = self.head_VH.shape
        if size != final_RH.shape[1] or not 0 < k <= vocabulary:
            raise DatasetError("top-k logits", f"k = {k}, states of size {final_RH.shape[1]}",
                               f"k up to {vocabulary}, states of size {size}: the target's head")  # fmt: skip
        ids = torch.empty(len(final_RH), k, dtype=torch.int32)
        logits = torch.empty(len(final_RH), k, dtype=torch.float16)
        step = max(1, _CHUNK_BYTES // (4 * vocabulary))
        for start in range(0, len(final_RH), step):
            rows = final_RH[start : start + step].to(self.head_VH.dtype)
            best = (rows @ self.head_VH.T).float().topk(k, dim=-1)
            ids[start : start + step] = best.indices
            logits[start : start + step] = best.values
        return ids, logits

    def decode(self, ids_Rk: Tensor, logits_Rk: Tensor) -> Tensor:
        """[R,H] float32."""
        rows, k = ids_Rk.shape
        size = self.head_VH.shape[1]
        states = torch.empty(rows, size)
        step = max(1, _CHUNK_BYTES // (4 * k * size))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            heads_rkH = self.head_VH[ids_Rk[part].long()].float()
            gram = heads_rkH @ heads_rkH.mT
            ridge = gram.diagonal(dim1=-2, dim2=-1).mean(-1) * _RIDGE
            gram.diagonal(dim1=-2, dim2=-1).add_(ridge[:, None])
            weights = torch.linalg.solve(gram, logits_Rk[part].float().unsqueeze(-1))
            states[part] = (heads_rkH.mT @ weights).squeeze(-1)
        return states
