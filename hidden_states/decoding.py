"""What of the target a reader needs to undo what a dataset keeps in place of the final state behind its norm."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hidden_states.encoding import TOP_K
from hidden_states.errors import DatasetError
from hidden_states.teacher import TeacherHead
from hidden_states.top_k import TopK
from hidden_states.weights import TargetWeights

if TYPE_CHECKING:
    from hidden_states.manifest import Manifest


@dataclass(frozen=True)
class Decoder:
    """`head_VH`: for top-k logits. `norm_H`, `eps`: the final RMSNorm, for states kept before it. Any may be missing:
    most datasets need none of them."""

    head_VH: Tensor | None = None
    norm_H: Tensor | None = None
    eps: float = 1e-6

    @classmethod
    def load(cls, target_folder: Path | str, manifest: "Manifest") -> "Decoder":
        """What reading this dataset takes of a target's folder, and no more.

        Raises:
            DataError: the folder has no head where one is needed.
        """
        head = norm = None
        eps = 1e-6
        if manifest.encoding.final == TOP_K:
            found = TeacherHead.load(target_folder)
            head = found.weights.whole(found.name).float()
        if manifest.final_norm == "pre":
            norm, eps = final_norm(Path(target_folder))
        return cls(head, norm, eps)

    def require(self, manifest: "Manifest", where: str) -> None:
        """Raises DatasetError when the dataset keeps what this decoder cannot undo."""
        if manifest.encoding.final == TOP_K and self.head_VH is None:
            raise DatasetError(
                where,
                f"its final state is kept as top-{manifest.encoding.top_k} logits",
                "a reader with the target's head",
                "Give it one: Decoder.load(target, manifest).",
            )
        if manifest.final_norm not in ("post", "pre") or (manifest.final_norm == "pre" and self.norm_H is None):
            raise DatasetError(where, f"its final state is kept {manifest.final_norm}-norm",
                               "post-norm, or a reader with the target's final norm",
                               "Give it one: Decoder.load(target, manifest).")  # fmt: skip

    def from_top_k(self, ids_Rk: Tensor, logits_Rk: Tensor) -> Tensor:
        """[R,H] float32; see top_k.py."""
        assert self.head_VH is not None  # `require` has been asked
        return TopK(self.head_VH).decode(ids_Rk, logits_Rk)

    def normed(self, final_RH: Tensor) -> Tensor:
        """The state behind the target's final RMSNorm, in the dtype it came in."""
        assert self.norm_H is not None
        wide = final_RH.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.norm_H).to(final_RH.dtype)


def final_norm(target_folder: Path) -> tuple[Tensor | None, float]:
    """Weight [H] float32 and eps of the final RMSNorm; None when the folder has no such norm."""
    weights = TargetWeights(target_folder)
    name = weights.find("model.norm.weight", "norm.weight")
    if name is None or weights.find(name.removesuffix("weight") + "bias") is not None:
        return None, 0.0
    config = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    config = {**config, **(config.get("text_config") or {})}
    return weights.whole(name).float(), float(config.get("rms_norm_eps", 1e-6))
