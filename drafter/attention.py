"""Attention of one training-time-test step: the step-0 keys up to the slot's own, and its own key of each later step.

A slot at step j sees the step-0 keys of slots <= i of its document (causal) and, of every later step 1..j, only its own
key (the diagonal). The K x N columns of the textbook mask are therefore N columns and j scalars per query, and nothing
of size N x N is kept at any length that matters: queries are taken in blocks, and above a bound the backward pass
computes a block's weights again from what the forward pass kept of the softmax (FlashAttention, Dao et al. 2022, with
the diagonal's terms in the same softmax).

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

# Powers of two in place of e: the CPU's exp is 10 times slower on -inf, and 100 times on what underflows.
_LOG2_E = 1 / math.log(2)
_SPLIT = 2  # products per key/value head and block: two threads share six products evenly, three not
_KEPT_SCORES = 1 << 22  # a step with no more scores keeps them for its backward pass, a longer one makes them again


class Context:
    """Keys [G, C, D] and values [G, C, V] of step 0, of every context slot: read at every step, their gradients summed
    in place and handed on by the last step to be differentiated, as in `fused.SharedWeight`."""

    def __init__(self, keys_GCD: Tensor, values_GCV: Tensor) -> None:
        self.keys, self.values = keys_GCD, values_GCV
        # Each head's rows once per product of a block.
        self.all_keys, self.all_values = (x.detach().repeat_interleave(_SPLIT, 0) for x in (keys_GCD, values_GCV))
        self.pending: set[int] = set()
        self.totals: tuple[Tensor, Tensor] | None = None

    def take_totals(self) -> tuple[Tensor, Tensor]:
        """The sums, of keys and values as they came in."""
        assert self.totals is not None
        keys, values = (g.view(len(self.keys), _SPLIT, -1, g.shape[-1]).sum(1) for g in self.totals)
        self.totals = None
        return keys.div_(_LOG2_E), values


def ttt_attention(
    q_RHD: Tensor,
    context: Context,
    later_keys: Sequence[Tensor],
    later_values: Sequence[Tensor],
    places_R: Tensor,
    blocks: Sequence[Block],
    scale: float,
    use: int,
) -> Tensor:
    """Attention output [R, heads * V] of the slots computed at one step.

    Args:
        q_RHD: rotated queries, heads grouped by the key/value head they share.
        context: keys and values of step 0.
        later_keys, later_values: one [R, G, D] and [R, G, V] per later step, of the same slots as the queries.
        places_R: the queries' own places in the context.
        blocks: `SlotPlan.blocks` of this step.
        scale: of the scores.
        use: the step, by which a recomputed forward pass is not taken for another one.
    """
    out: Tensor = _TTTAttention.apply(
        q_RHD, context.keys, context.values, places_R, context, tuple(blocks), scale, use, *later_keys, *later_values
    )
    return out


def _hide_future(scores: Tensor, places_R: Tensor, block: Block, kv_heads: int) -> Tensor:
    """Puts -inf where a key lies after its query: only columns after the block's first query have such keys."""
    begin, end, first_key, last_key = block
    tail = int(places_R[begin]) + 1
    view = scores.view(kv_heads, end - begin, -1, last_key - first_key)[..., tail - first_key :]
    after = torch.arange(tail, last_key, device=scores.device) > places_R[begin:end, None]
    view += torch.where(after, -math.inf, 0.0).to(scores.dtype)[:, None, :]
    return scores


def _rooms(q_GRQD: Tensor, blocks: Sequence[Block]) -> tuple[list[Tensor], bool]:
    """Memory for the scores of each block, of all heads, and whether they are kept: few enough, each in its own place;
    else all in the same, which then stays in the cache."""
    heads = q_GRQD.shape[0] * q_GRQD.shape[2]
    sizes = [heads * (end - begin) * (last - first) for begin, end, first, last in blocks]
    kept = sum(sizes) <= _KEPT_SCORES
    memory = q_GRQD.new_empty(sum(sizes) if kept else max(sizes))
    return (list(memory.split(sizes)) if kept else [memory[:n] for n in sizes]), kept


def _product(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """a @ b in the memory of `room`."""
    return torch.bmm(a, b, out=room.view(a.shape[0], a.shape[1], b.shape[2]))


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_RHD: Tensor, keys: Tensor, values: Tensor, places: Tensor, context: Context,
        blocks: tuple[Block, ...], scale: float, use: int, *later: Tensor,
    ) -> Tensor:  # fmt: skip
        rows, heads, size = q_RHD.shape
        kv_heads, _, v_size = values.shape
        groups = heads // kv_heads
        q = (q_RHD * (scale * _LOG2_E)).view(rows, kv_heads, groups, size).transpose(0, 1).contiguous()  # GRQD
        out = q.new_empty(kv_heads, rows, groups, v_size)
        tops, totals = q.new_empty(kv_heads, rows, groups, 1), q.new_empty(kv_heads, rows, groups, 1)
        rooms, keep = _rooms(q, blocks)
        half = len(later) // 2
        own_k = own_v = own = None
        if half:
            own_k = torch.stack([x.transpose(0, 1) for x in later[:half]], 2)  # GRjD
            own_v = torch.stack([x.transpose(0, 1) for x in later[half:]], 2)
            own = q @ own_k.mT  # GRQj
        for block, room in zip(blocks, rooms, strict=True):
            begin, end, first_key, last_key = block
            parts, step = _parts(kv_heads, (end - begin) * groups)
            k, v = context.all_keys[::step, first_key:last_key], context.all_values[::step, first_key:last_key]
            scores = _product(q[:, begin:end].reshape(parts, -1, size), k.mT, room)
            _hide_future(scores, places, block, kv_heads)
            top = scores.amax(-1, keepdim=True)
            if own is not None:
                mine = own[:, begin:end].reshape(parts, -1, half)
                top = torch.maximum(top, mine.amax(-1, keepdim=True))
            total = scores.sub_(top).exp2_().sum(-1, keepdim=True)
            mixed = (scores @ v).view(kv_heads, end - begin, groups, v_size)
            if own is not None:
                assert own_v is not None
                mine = (mine - top).exp2_()
                total += mine.sum(-1, keepdim=True)
                mixed += mine.view(kv_heads, end - begin, groups, half) @ own_v[:, begin:end]
            tops[:, begin:end], totals[:, begin:end] = (x.view(kv_heads, -1, groups, 1) for x in (top, total))
            torch.div(mixed, totals[:, begin:end], out=out[:, begin:end])
        ctx.save_for_backward(q, places, out, tops, totals, own_k, own_v, *(rooms if keep else ()))
        ctx.context, ctx.blocks, ctx.scale, ctx.use = context, blocks, scale, use
        context.pending.add(use)
        return out.transpose(0, 1).reshape(rows, heads * v_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, places, out, tops, totals, own_k, own_v, *kept = ctx.saved_tensors
        context: Context = ctx.context
        kv_heads, rows, groups, size = q.shape
        v_size = out.shape[-1]
        # The weights are 2^(score - top) / total; the division is made here, on [R, H, V], once for all uses.
        grad = grad.view(rows, kv_heads, groups, v_size).transpose(0, 1) / totals
        along = torch.linalg.vecdot(grad, out).unsqueeze(-1)  # what the softmax takes off every score's gradient
        rooms = kept or _rooms(q, ctx.blocks)[0]
        grad_room = q.new_empty(max(map(len, rooms)))
        grad_q = torch.empty_like(q)
        if context.totals is None:
            context.totals = torch.zeros_like(context.all_keys), torch.zeros_like(context.all_values)
        grad_keys, grad_values = context.totals
        for block, room in zip(ctx.blocks, rooms, strict=True):
            begin, end, first_key, last_key = block
            parts, step = _parts(kv_heads, (end - begin) * groups)
            k, v = context.all_keys[::step, first_key:last_key], context.all_values[::step, first_key:last_key]
            flat = q[:, begin:end].reshape(parts, -1, size)
            grad_flat = grad[:, begin:end].reshape(parts, -1, v_size)
            if kept:
                weights = room.view(parts, -1, last_key - first_key)
            else:
                weights = _hide_future(_product(flat, k.mT, room), places, block, kv_heads)
                weights.sub_(tops[:, begin:end].reshape(parts, -1, 1)).exp2_()
            # A batched product and a sum: `baddbmm_` into a slice makes its products one after the other.
            grad_values[::step, first_key:last_key] += weights.mT @ grad_flat
            grad_scores = _product(grad_flat, v.mT, grad_room[: len(room)])
            grad_scores.sub_(along[:, begin:end].reshape(parts, -1, 1)).mul_(weights)
            grad_q[:, begin:end] = (grad_scores @ k).view(kv_heads, end - begin, groups, size)
            grad_keys[::step, first_key:last_key] += grad_scores.mT @ flat
        grad_later: list[Tensor | None] = []
        if own_k is not None:
            weights = (q @ own_k.mT).sub_(tops).exp2_()  # GRQj
            grad_scores = (grad @ own_v.mT).sub_(along).mul_(weights)
            grad_q += grad_scores @ own_k
            grad_own_k = (grad_scores.mT @ q).transpose(0, 1).div_(_LOG2_E)  # RGjD
            grad_own_v = (weights.mT @ grad).transpose(0, 1)
            grad_later = [*grad_own_k.unbind(2), *grad_own_v.unbind(2)]
        grad_q_RHD = grad_q.mul_(ctx.scale).transpose(0, 1).reshape(rows, kv_heads * groups, size)
        context.pending.discard(ctx.use)
        of_context = (None, None) if context.pending else context.take_totals()
        return grad_q_RHD, *of_context, None, None, None, None, None, *grad_later


def _parts(kv_heads: int, queries: int) -> tuple[int, int]:
    """Products of a block, and the step through the repeated heads that gives each its own."""
    return (kv_heads, _SPLIT) if queries % _SPLIT else (kv_heads * _SPLIT, 1)
