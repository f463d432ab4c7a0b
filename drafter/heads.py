"""From a draft block's input to queries, keys and values: grouped heads, or DeepSeek's latent attention.

Both begin with one product over the attention's input [norm(embedding), norm(state)], of which the first columns are
for the query and the rest for key and value. What follows differs:

    grouped    the products are the heads; rope turns all of a head           LlamaForCausalLMEagle3
    latent     the products are latents, normed and spread out to heads;      Eagle3DeepseekV2ForCausalLM
               rope turns a part of the query's heads, and one part of
               the key that all heads share

The latent form is trained spread out (as in DeepSeek-V2, arXiv 2405.04434, equations 37 to 47); serving folds the
spreading matrices into query and output, which is the same in exact arithmetic.

Legend: R rows, Q heads of the query, G of key and value, D size of a query's head, V of a value's.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from drafter.config import DrafterConfig
from drafter.fused import RMSNorm, SharedWeight, rotate

Turn = tuple[Tensor, Tensor]  # cos and sin of the rows' positions


class Heads(ABC):
    """The weights of one pass, cast. `into` [width, 2H] is the first product; `query_width` of it is the query's."""

    into: Tensor
    query_width: int
    scale: float

    @abstractmethod
    def queries(self, made: Tensor, turn: Turn, use: int) -> Tensor:
        """made [R, query_width] -> [R, Q, D], turned. `use`: the step, see `SharedWeight`."""

    @abstractmethod
    def keys_values(self, made: Tensor, turn: Turn, use: int) -> tuple[Tensor, Tensor]:
        """made [R, width - query_width] -> [R, G, D], turned, and [R, G, V]."""


class GroupedAttention(nn.Module):
    """Weights of grouped heads."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)
        self.head_dim = c.head_dim

    def heads(self, dtype: torch.dtype) -> Heads:
        """For one pass."""
        return _Grouped(self, dtype)


class _Grouped(Heads):
    def __init__(self, attn: GroupedAttention, dtype: torch.dtype) -> None:
        self.into = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]).to(dtype)
        self.query_width = len(attn.q_proj.weight)
        self.size = attn.head_dim
        self.scale = self.size**-0.5

    def queries(self, made: Tensor, turn: Turn, use: int) -> Tensor:
        return rotate(made.reshape(len(made), -1, self.size), *turn)

    def keys_values(self, made: Tensor, turn: Turn, use: int) -> tuple[Tensor, Tensor]:
        key, value = made.reshape(len(made), 2, -1, self.size).unbind(1)
        return rotate(key, *turn), value


class LatentAttention(nn.Module):
    """Weights of multi-head latent attention, by DeepSeek's names."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        assert c.latent is not None
        at, heads = c.latent, c.num_attention_heads
        self.q_a_proj = nn.Linear(2 * c.hidden_size, at.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(at.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(at.q_lora_rank, heads * (at.qk_nope_head_dim + at.qk_rope_head_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * c.hidden_size, at.kv_lora_rank + at.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(at.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(at.kv_lora_rank, heads * (at.qk_nope_head_dim + at.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * at.v_head_dim, c.hidden_size, bias=False)
        self.sizes, self.scale = at, latent_scale(c)

    def heads(self, dtype: torch.dtype) -> Heads:
        """For one pass."""
        return _Latent(self, dtype)


class _Latent(Heads):
    def __init__(self, attn: LatentAttention, dtype: torch.dtype) -> None:
        self.attn, self.dtype, self.scale = attn, dtype, attn.scale
        self.into = torch.cat([attn.q_a_proj.weight, attn.kv_a_proj_with_mqa.weight]).to(dtype)
        self.query_width = attn.sizes.q_lora_rank
        self.to_queries = SharedWeight(attn.q_b_proj.weight.to(dtype))
        self.to_keys_values = SharedWeight(attn.kv_b_proj.weight.to(dtype))

    def queries(self, made: Tensor, turn: Turn, use: int) -> Tensor:
        at = self.attn.sizes
        spread = self.to_queries(self.attn.q_a_layernorm(made, self.dtype), use)
        still, turned = spread.reshape(len(made), -1, at.qk_nope_head_dim + at.qk_rope_head_dim).split(
            [at.qk_nope_head_dim, at.qk_rope_head_dim], dim=-1
        )
        return torch.cat([still, rotate(turned, *turn, neighbours=True)], dim=-1)

    def keys_values(self, made: Tensor, turn: Turn, use: int) -> tuple[Tensor, Tensor]:
        at = self.attn.sizes
        latent, turned = made.split([at.kv_lora_rank, at.qk_rope_head_dim], dim=-1)
        spread = self.to_keys_values(self.attn.kv_a_layernorm(latent, self.dtype), use)
        still, value = spread.reshape(len(made), -1, at.qk_nope_head_dim + at.v_head_dim).split(
            [at.qk_nope_head_dim, at.v_head_dim], dim=-1
        )
        shared = rotate(turned.unsqueeze(1), *turn, neighbours=True).expand(-1, still.shape[1], -1)
        return torch.cat([still, shared], dim=-1), value


def latent_scale(c: DrafterConfig) -> float:
    """What latent attention multiplies its scores with. Under YaRN the square of its magnitude comes on top, where
    grouped heads have it in cos and sin; source: `compute_mla_mscale_scaling` of SGLang 0.5.23."""
    assert c.latent is not None
    scale = (c.latent.qk_nope_head_dim + c.latent.qk_rope_head_dim) ** -0.5
    if c.rope["rope_type"] == "default":
        return scale
    factor, weight = float(c.rope["factor"]), float(c.rope.get("mscale_all_dim", 0.0))
    magnitude = 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale * magnitude**2
