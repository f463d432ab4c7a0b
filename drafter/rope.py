"""Rotary position embedding, in the exact form SGLang applies for the drafter's exported config."""

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim/2] in float64, and the factor that multiplies cos and sin (yarn's attention scale).

    Sources: RoPE (Su et al. 2021); linear interpolation (Chen et al. 2023); YaRN (Peng et al. 2023, section 3.4);
    llama3: the piecewise scaling of Llama 3.1.
    """
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    inv = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "default":
        return inv, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return inv / factor, 1.0
    original = float(rope["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = original * inv / (2 * math.pi)  # full turns within the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns >= low).double()
        return (1 - blend) * inv / factor + blend * inv, 1.0

    def dimension(turns: float) -> float:  # the pair that makes this many turns within the original context
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(float(rope["beta_fast"])), dimension(float(rope["beta_slow"]))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    inv = inv / factor * ramp + inv * (1 - ramp)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
        return inv, magnitude(float(rope["mscale"])) / magnitude(float(rope["mscale_all_dim"]))
    return inv, magnitude(1.0)


class RopeTable:
    """cos and sin of every position up to a limit, grown when a longer row comes: [P, head_dim/2] each."""

    def __init__(self, rope: dict[str, Any], head_dim: int) -> None:
        self._inv, self._scale = inverse_frequencies(rope, head_dim)
        self._cos = self._sin = torch.empty(0)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [len(positions), 1, head_dim/2], for `drafter.fused.rotate`."""
        need = int(positions.max()) + 1 if positions.numel() else 1
        wide = torch.promote_types(dtype, torch.float32)
        if need > len(self._cos) or self._cos.dtype != wide or self._cos.device != positions.device:
            # Grown by doubling; float64 angles, since float32 ones are off by 1e-3 rad at position 20,000.
            length = max(need, 2 * len(self._cos), 1024)
            angle = torch.arange(length, dtype=torch.float64)[:, None] * self._inv
            self._cos = (angle.cos() * self._scale).to(positions.device, wide)
            self._sin = (angle.sin() * self._scale).to(positions.device, wide)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
