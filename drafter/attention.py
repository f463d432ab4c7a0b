"""Attention of one training-time-test step: the step-0 keys up to the slot's own, and its own key of each later step.

A slot at step j sees the step-0 keys of slots <= i of its document (causal) and, of every later step 1..j, only its own
key (the diagonal). The K x N columns of the textbook mask are therefore N columns and j scalars per query, and nothing
of size N x N is ever kept: queries are taken in blocks, the backward pass computes a block's weights again from the
log-sum that the forward pass kept (FlashAttention, Dao et al. 2022, with the diagonal's terms in the same softmax).

Legend: R computed slots, C context slots; G key/value heads, Q query heads each, H all query heads, D and V size
of a key's and a value's head, j later steps. Suffixes like `_GCD` name the axes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Block = tuple[int, int, int, int]


def ttt_attention(
    q_RHD: Tensor,
    keys_GCD: Tensor,
    values_GCV: Tensor,
    later_keys: Sequence[Tensor],
    later_values: Sequence[Tensor],
    places_R: Tensor,
    blocks: Sequence[Block],
    scale: float,
) -> Tensor:
    """Attention output [R, heads * V] of the slots computed at one step.

    Args:
        q_RHD: rotated queries, heads grouped by the key/value head they share.
        keys_GCD, values_GCV: step 0, of every context slot, contiguous.
        later_keys, later_values: one [R, G, D] and [R, G, V] per later step, of the same slots as the queries.
        places_R: the queries' own places in the context.
        blocks: `SlotPlan.blocks` of this step.
        scale: of the scores.
    """
    later_kv = [*later_keys, *later_values]
    out: Tensor = _TTTAttention.apply(q_RHD, keys_GCD, values_GCV, places_R, tuple(blocks), scale, *later_kv)
    return out


# Powers of two in place of e: the CPU's exp is 10 times slower on -inf, and 100 times on what underflows.
_LOG2_E = 1 / math.log(2)
_SPLIT = 2  # products per key/value head and block: two threads share six products evenly, three not


def _hide_future(scores: Tensor, places_R: Tensor, block: Block, kv_heads: int) -> Tensor:
    """Puts -inf where a key lies after its query: only columns after the block's first query have such keys."""
    begin, end, first_key, last_key = block
    tail = int(places_R[begin]) + 1
    view = scores.view(kv_heads, end - begin, -1, last_key - first_key)[..., tail - first_key :]
    after = torch.arange(tail, last_key, device=scores.device) > places_R[begin:end, None]
    view += torch.where(after, -math.inf, 0.0).to(scores.dtype)[:, None, :]
    return scores


def _room(like: Tensor, blocks: tuple[Block, ...]) -> Tensor:
    """Memory for the scores of any of the blocks, of all heads; used again by each, so that it stays in the cache."""
    heads = like.shape[0] * like.shape[2]
    return like.new_empty(max((end - begin) * (last - first) for begin, end, first, last in blocks) * heads)


def _product(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """a @ b in the memory of `room`."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return torch.bmm(a, b, out=room[: math.prod(shape)].view(shape))


def _repeated(x_GCD: Tensor) -> Tensor:
    """[G * _SPLIT, C, D]: each head's rows once per product of a block."""
    return x_GCD.repeat_interleave(_SPLIT, 0)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_RHD: Tensor, keys: Tensor, values: Tensor, places: Tensor, blocks: tuple[Block, ...], scale: float,
        *later: Tensor,
    ) -> Tensor:  # fmt: skip
        rows, heads, size = q_RHD.shape
        kv_heads, _, v_size = values.shape
        groups = heads // kv_heads
        q = (q_RHD * (scale * _LOG2_E)).view(rows, kv_heads, groups, size).transpose(0, 1).contiguous()  # GRQD
        out = q.new_empty(kv_heads, rows, groups, v_size)
        lse = q.new_empty(kv_heads, rows, groups, 1)
        all_keys, all_values = _repeated(keys), _repeated(values)
        room = _room(q, blocks)
        half = len(later) // 2
        own_k = own_v = own = None
        if half:
            own_k = torch.stack(later[:half], 2).transpose(0, 1).contiguous()  # GRjD
            own_v = torch.stack(later[half:], 2).transpose(0, 1).contiguous()
            own = q @ own_k.mT  # GRQj
        for block in blocks:
            begin, end, first_key, last_key = block
            parts, step = _parts(kv_heads, (end - begin) * groups)
            k, v = all_keys[::step, first_key:last_key], all_values[::step, first_key:last_key]
            scores = _product(q[:, begin:end].reshape(parts, -1, size), k.mT, room)
            _hide_future(scores, places, block, kv_heads)
            top = scores.amax(-1, keepdim=True)
            if own is None:
                total = scores.sub_(top).exp2_().sum(-1, keepdim=True)
                mixed = (scores @ v).view(kv_heads, end - begin, groups, v_size)
            else:
                assert own_v is not None
                mine = own[:, begin:end].reshape(parts, -1, half)
                top = torch.maximum(top, mine.amax(-1, keepdim=True))
                mine = (mine - top).exp2_()
                total = scores.sub_(top).exp2_().sum(-1, keepdim=True) + mine.sum(-1, keepdim=True)
                mixed = (scores @ v).view(kv_heads, end - begin, groups, v_size)
                mixed += mine.view(kv_heads, end - begin, groups, half) @ own_v[:, begin:end]
            total = total.view(kv_heads, end - begin, groups, 1)
            torch.div(mixed, total, out=out[:, begin:end])
            torch.add(total.log2_(), top.view_as(total), out=lse[:, begin:end])
        ctx.save_for_backward(q, all_keys, all_values, places, out, lse, own_k, own_v)
        ctx.blocks, ctx.scale = blocks, scale
        return out.transpose(0, 1).reshape(rows, heads * v_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, all_keys, all_values, places, out, lse, own_k, own_v = ctx.saved_tensors
        kv_heads, rows, groups, size = q.shape
        v_size = out.shape[-1]
        grad = grad.view(rows, kv_heads, groups, v_size).transpose(0, 1).contiguous()
        along = torch.linalg.vecdot(grad, out).unsqueeze(-1)  # what the softmax takes off every score's gradient
        room, grad_room = _room(q, ctx.blocks), _room(q, ctx.blocks)
        grad_q = torch.empty_like(q)
        grad_keys, grad_values = torch.zeros_like(all_keys), torch.zeros_like(all_values)
        for block in ctx.blocks:
            begin, end, first_key, last_key = block
            parts, step = _parts(kv_heads, (end - begin) * groups)
            k, v = all_keys[::step, first_key:last_key], all_values[::step, first_key:last_key]
            flat = q[:, begin:end].reshape(parts, -1, size)
            grad_flat = grad[:, begin:end].reshape(parts, -1, v_size)
            weights = _hide_future(_product(flat, k.mT, room), places, block, kv_heads)
            weights.sub_(lse[:, begin:end].reshape(parts, -1, 1)).exp2_()
            grad_values[::step, first_key:last_key].baddbmm_(weights.mT, grad_flat)
            grad_scores = (
                _product(grad_flat, v.mT, grad_room).sub_(along[:, begin:end].reshape(parts, -1, 1)).mul_(weights)
            )
            grad_q[:, begin:end] = (grad_scores @ k).view(kv_heads, end - begin, groups, size)
            grad_keys[::step, first_key:last_key].baddbmm_(grad_scores.mT, flat)
        grad_later: list[Tensor | None] = []
        if own_k is not None:
            weights = (q @ own_k.mT).sub_(lse).exp2_()  # GRQj
            grad_scores = (grad @ own_v.mT).sub_(along).mul_(weights)
            grad_q += grad_scores @ own_k
            grad_own_k = (grad_scores.mT @ q).transpose(0, 1).div_(_LOG2_E)  # RGjD
            grad_own_v = (weights.mT @ grad).transpose(0, 1)
            grad_later = [*grad_own_k.unbind(2), *grad_own_v.unbind(2)]
        grad_q_RHD = grad_q.mul_(ctx.scale).transpose(0, 1).reshape(rows, kv_heads * groups, size)
        grad_keys, grad_values = (g.view(kv_heads, _SPLIT, -1, g.shape[-1]).sum(1) for g in (grad_keys, grad_values))
        return grad_q_RHD, grad_keys.div_(_LOG2_E), grad_values, None, None, None, *grad_later


def _parts(kv_heads: int, queries: int) -> tuple[int, int]:
    """Products of a block, and the step through the repeated heads that gives each its own."""
    return (kv_heads, _SPLIT) if queries % _SPLIT else (kv_heads * _SPLIT, 1)
