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
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from drafter.attention import Block


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

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_key[query]) & (key <= places_R[query])

    mask = create_block_mask(sees, None, None, rows, context, device=q_RHD.device.type)
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


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
