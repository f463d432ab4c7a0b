"""Names of one drafter's weights in the layouts others publish.

ours, SGLang, SpecForge     vLLM, speculators       NeMo Automodel
midlayer.*                  layers.0.*              model.layers.0.*
fc, norm                    fc, norm                model.fc, model.norm
lm_head, d2t                the same                the same
fc_norm.<a>                 the same                model.fc_norm.<a>
aux_norm_low, _mid, _high   older names of fc_norm.0, 1, 2, which SGLang reads too
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.export import compare_keys
from drafter.model import Eagle3Drafter
from hidden_states.errors import TrainingError

_OLDER = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_NOT_OURS = ("embed_tokens.weight", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")


def to_sglang_name(name: str) -> str:
    """Any of the layouts' names -> ours; unknown names come back as they are."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    first, dot, rest = name.partition(".")
    return _OLDER.get(first, first) + dot + rest


def map_problem(d2t: Tensor, vocab_size: int) -> str | None:
    """Why these offsets [D] are no map into a vocabulary of this size; None when they are one."""
    if d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool:
        return f"d2t holds {str(d2t.dtype).removeprefix('torch.')}, not whole numbers"
    ids = d2t.to(torch.int64) + torch.arange(len(d2t))
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()[:, 0].tolist()
    if not outside:
        return None
    return (
        f"d2t maps {len(outside)} draft tokens to tokens that do not exist (the first: {outside[0]} to "
        f"{int(ids[outside[0]])}; the vocabulary has {vocab_size})"
    )


def load_drafter(folder: str | Path, config: DrafterConfig, dtype: torch.dtype = torch.float32) -> Eagle3Drafter:
    """A drafter with weights published in any of these layouts, to go on training from.

    Args:
        config: its shape, as `DrafterConfig.from_target` with the draft vocabulary size of the folder.

    Raises: TrainingError when tensors are missing, too many, there twice, or of other shapes or kinds, or the folder
        has no safetensors that can be read.
    """
    weights: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError) as error:
            raise TrainingError(str(file), f"it cannot be read ({error})", "weights", "Copy it again.") from error
        for name, value in tensors.items():
            name = to_sglang_name(name)
            if name in weights:
                raise TrainingError(str(file), f"{name}, which was read already", "every tensor once",
                                    "Which of them an engine takes is chance: remove one.")  # fmt: skip
            if name not in _NOT_OURS:
                weights[name] = value.to(dtype) if value.is_floating_point() else value
    if not weights:
        raise TrainingError(
            str(folder), "no *.safetensors file", "a published drafter", "Pickled weights are not loaded."
        )
    if "d2t" not in weights and config.draft_vocab_size == config.vocab_size:
        weights["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    compare_keys(weights, config)
    wrong = [f"{n} holds {w.dtype}" for n, w in weights.items() if n != "d2t" and not w.is_floating_point()]
    if problem := map_problem(weights["d2t"], config.vocab_size) or "; ".join(wrong):
        raise TrainingError(str(folder), problem, "a drafter's weights and vocabulary map", "Export it again.")
    drafter = Eagle3Drafter(config, weights["d2t"])
    drafter.to(dtype).load_state_dict(weights)
    return drafter
