"""Attention of one training-time-test step: the step-0 keys up to the slot's own, and its own key of each later step.

A slot at step j sees the step-0 keys of slots <= i of its document (causal) and, of every later step 1..j, only its own
key (the diagonal). The K x N columns of the textbook mask are therefore N columns and j scalars per query, and nothing
of size N x N is ever kept: queries are taken in blocks, the backward pass computes a block's weights again from the
log-sum that the forward pass kept (FlashAttention, Dao et al. 2022, with the diagonal's terms in the same softmax).

Legend: R computed slots, C context slots; G key/value heads, Q query heads each, H all query heads, D head size, j
later steps. Suffixes like `_GCD` name the axes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Block = tuple[int, int, int, int]


def ttt_attention(
    q_RHD: Tensor,
    keys_GCD: Tensor,
    values_GCD: Tensor,
    later_keys: Sequence[Tensor],
    later_values: Sequence[Tensor],
    places_R: Tensor,
    blocks: Sequence[Block],
) -> Tensor:
    """Attention output [R, heads * D] of the slots computed at one step.

    Args:
        q_RHD: rotated queries, heads grouped by the key/value head they share.
        keys_GCD, values_GCD: step 0, of every context slot, contiguous.
        later_keys, later_values: one [R, G, D] per later step, of the same slots as the queries.
        places_R: the queries' own places in the context.
        blocks: `SlotPlan.blocks` of this step.
    """
    later_kv = [*later_keys, *later_values]
    out: Tensor = _TTTAttention.apply(q_RHD, keys_GCD, values_GCD, places_R, tuple(blocks), *later_kv)
    return out


def _hide_future(scores: Tensor, places_R: Tensor, block: Block, groups: int) -> Tensor:
    """Puts -inf where a key lies after its query: only columns after the block's first query have such keys."""
    begin, end, first_key, last_key = block
    tail = int(places_R[begin]) + 1
    view = scores.view(scores.shape[0], end - begin, groups, last_key - first_key)[..., tail - first_key :]
    after = torch.arange(tail, last_key, device=scores.device) > places_R[begin:end, None]
    view += scores.new_zeros(after.shape).masked_fill_(after, float("-inf"))[:, None, :]
    return scores


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_RHD: Tensor, keys: Tensor, values: Tensor, places: Tensor, blocks: tuple[Block, ...], *later: Tensor
    ) -> Tensor:
        rows, heads, size = q_RHD.shape
        kv_heads = keys.shape[0]
        groups = heads // kv_heads
        q = (q_RHD * size**-0.5).view(rows, kv_heads, groups, size).transpose(0, 1).contiguous()  # GRQD
        out = torch.empty_like(q)
        lse = q.new_empty(kv_heads, rows, groups, 1)
        half = len(later) // 2
        own_k = own_v = own = None
        if half:
            own_k = torch.stack(later[:half], 2).transpose(0, 1).contiguous()  # GRjD
            own_v = torch.stack(later[half:], 2).transpose(0, 1).contiguous()
            own = q @ own_k.mT  # GRQj
        for block in blocks:
            begin, end, first_key, last_key = block
            flat = q[:, begin:end].reshape(kv_heads, -1, size)
            scores = _hide_future(flat @ keys[:, first_key:last_key].mT, places, block, groups)
            top = scores.amax(-1, keepdim=True)
            if own is None:
                total = scores.sub_(top).exp_().sum(-1, keepdim=True)
                mixed = scores @ values[:, first_key:last_key]
            else:
                assert own_v is not None
                mine = own[:, begin:end].reshape(kv_heads, -1, half)
                top = torch.maximum(top, mine.amax(-1, keepdim=True))
                mine = (mine - top).exp_()
                total = scores.sub_(top).exp_().sum(-1, keepdim=True) + mine.sum(-1, keepdim=True)
                mixed = scores @ values[:, first_key:last_key]
                mixed += (mine.view(kv_heads, end - begin, groups, half) @ own_v[:, begin:end]).view_as(mixed)
            out[:, begin:end] = mixed.div_(total).view(kv_heads, end - begin, groups, size)
            lse[:, begin:end] = total.log_().add_(top).view(kv_heads, end - begin, groups, 1)
        ctx.save_for_backward(q, keys, values, places, out, lse, own_k, own_v)
        ctx.blocks = blocks
        return out.transpose(0, 1).reshape(rows, heads * size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, places, out, lse, own_k, own_v = ctx.saved_tensors
        kv_heads, rows, groups, size = q.shape
        grad = grad.view(rows, kv_heads, groups, size).transpose(0, 1).contiguous()
        along = torch.linalg.vecdot(grad, out).unsqueeze(-1)  # what the softmax takes off every score's gradient
        grad_q = torch.empty_like(q)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        for block in ctx.blocks:
            begin, end, first_key, last_key = block
            flat = q[:, begin:end].reshape(kv_heads, -1, size)
            grad_flat = grad[:, begin:end].reshape(kv_heads, -1, size)
            k, v = keys[:, first_key:last_key], values[:, first_key:last_key]
            weights = _hide_future(flat @ k.mT, places, block, groups)
            weights.sub_(lse[:, begin:end].reshape(kv_heads, -1, 1)).exp_()
            grad_values[:, first_key:last_key].baddbmm_(weights.mT, grad_flat)
            grad_scores = (grad_flat @ v.mT).sub_(along[:, begin:end].reshape(kv_heads, -1, 1)).mul_(weights)
            grad_q[:, begin:end] = (grad_scores @ k).view(kv_heads, end - begin, groups, size)
            grad_keys[:, first_key:last_key].baddbmm_(grad_scores.mT, flat)
        grad_later: list[Tensor | None] = []
        if own_k is not None:
            weights = (q @ own_k.mT).sub_(lse).exp_()  # GRQj
            grad_scores = (grad @ own_v.mT).sub_(along).mul_(weights)
            grad_q += grad_scores @ own_k
            grad_own_k = (grad_scores.mT @ q).transpose(0, 1)  # RGjD
            grad_own_v = (weights.mT @ grad).transpose(0, 1)
            grad_later = [*grad_own_k.unbind(2), *grad_own_v.unbind(2)]
        grad_q_RHD = grad_q.mul_(size**-0.5).transpose(0, 1).reshape(rows, kv_heads * groups, size)
        return grad_q_RHD, grad_keys, grad_values, None, None, *grad_later
