"""The target's final norm, for datasets that keep the final state before it (other trainers' formats do)."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hidden_states.errors import DataError
from hidden_states.target_config import read_language_config
from hidden_states.weights import TargetWeights


@dataclass(frozen=True)
class FinalNorm:
    """An RMSNorm: `weight_H` float32."""

    weight_H: Tensor
    eps: float

    @classmethod
    def load(cls, target_folder: Path | str) -> "FinalNorm":
        """From a Hugging Face folder.

        Raises:
            DataError: its final norm is not an RMSNorm with weights.
        """
        folder = Path(target_folder)
        weights = TargetWeights(folder)
        name = weights.find("model.norm.weight", "norm.weight")
        if name is None or weights.find(name.removesuffix("weight") + "bias") is not None:
            raise DataError(str(folder), "no final RMSNorm among its weights", "model.norm.weight", "Is it the target?")
        config = read_language_config(folder)
        return cls(weights.whole(name).float(), float(config.get("rms_norm_eps", 1e-6)))

    def behind(self, before_RH: Tensor) -> Tensor:
        """The state behind the norm, in the dtype it came in."""
        wide = before_RH.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight_H).to(before_RH.dtype)

    def before(self, behind_RH: Tensor) -> Tensor:
        """A state before the norm that gives this one: right up to a positive factor a row, which the norm cancels."""
        return (behind_RH.float() / self.weight_H).to(behind_RH.dtype)
