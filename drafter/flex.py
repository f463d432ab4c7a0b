"""The attention of one training-time-test step on a GPU: flex attention for step 0, the diagonal added to its softmax.

The kernel takes the causal part, in blocks, and hands out its log-sum; the slot's own later keys are a few scores a
query. Two softmaxes over disjoint keys are joined by their log-sums, so that the result is the one softmax over all of
them; autograd differentiates the joint through the kernel's own backward pass. On a CPU torch has no backward pass for
this kernel: `drafter.attention` serves there.

Legend as in `drafter.attention`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from drafter.attention import Block

_TILE = 128  # queries and keys of a tile of the kernel


def flex_ttt_attention(
    q_RHD: Tensor,
    keys_GCD: Tensor,
    values_GCV: Tensor,
    later_keys: Sequence[Tensor],
    later_values: Sequence[Tensor],
    places_R: Tensor,
    blocks: Sequence[Block],
    scale: float,
) -> Tensor:
    """Attention output [R, heads * V]; arguments as for `ttt_attention`."""
    rows, heads, _ = q_RHD.shape
    kv_heads, context, v_size = values_GCV.shape
    first_key = torch.empty(rows, dtype=torch.int64)
    for begin, end, first, _ in blocks:
        first_key[begin:end] = first
    first_key = first_key.to(q_RHD.device)
    mask = causal_tiles(first_key, places_R, context)
    kernel = _compiled() if q_RHD.is_cuda else flex_attention
    out, aux = kernel(
        q_RHD.transpose(0, 1)[None], keys_GCD[None], values_GCV[None], block_mask=mask, scale=scale,
        enable_gqa=heads != kv_heads, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    out_RHV = out[0].transpose(0, 1)
    if later_keys:
        lse_RH = aux.lse[0].T
        q_RGQD = q_RHD.view(rows, kv_heads, heads // kv_heads, -1)
        own = torch.einsum("rgqd,rjgd->rgqj", q_RGQD, torch.stack(list(later_keys), 1)).mul(scale)
        total_RH = torch.logaddexp(lse_RH, own.to(lse_RH.dtype).logsumexp(-1).view(rows, heads))
        share = (own - total_RH.view(rows, kv_heads, -1, 1)).exp().to(q_RHD.dtype)
        mixed = torch.einsum("rgqj,rjgv->rgqv", share, torch.stack(list(later_values), 1))
        out_RHV = out_RHV * (lse_RH - total_RH).exp().unsqueeze(-1) + mixed.reshape(rows, heads, v_size)
    return out_RHV.reshape(rows, heads * v_size).to(q_RHD.dtype)


def causal_tiles(first_R: Tensor, last_R: Tensor, context: int) -> BlockMask:
    """The mask of queries that see the keys first to last of `context`, from these two alone.

    (torch's `create_block_mask` makes the whole R x C mask first, unless it is compiled: 400 MB for 20,000 slots.)
    """
    rows = len(first_R)
    pad = -rows % _TILE
    first, last = (torch.cat([x, x[-1:].expand(pad)]).view(-1, _TILE, 1) for x in (first_R, last_R))
    begin = torch.arange(0, context, _TILE, device=first_R.device)
    some = ((first < begin + _TILE) & (last >= begin)).any(1)
    # All pairs of a tile; one that reaches beyond the last query or key is never taken for one.
    every = ((first <= begin) & (last >= begin + _TILE - 1)).all(1)
    if pad:
        every[-1] = False

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_R[query]) & (key <= last_R[query])

    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every), *_ordered(every), BLOCK_SIZE=_TILE, mask_mod=sees, seq_lengths=(rows, context)
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are set [1, 1, rows], and their numbers before those of the others [1, 1, rows, n]."""
    numbers = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], numbers.int()[None, None].contiguous()


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
