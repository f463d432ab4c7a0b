"""Names of one drafter's weights in the layouts others publish.

ours, SGLang, SpecForge     vLLM, speculators       NeMo Automodel
midlayer.*                  layers.0.*              model.layers.0.*
fc, norm                    fc, norm                model.fc, model.norm
lm_head, d2t                the same                the same
fc_norm.<a>                 the same                model.fc_norm.<a>
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.export import compare_keys
from drafter.model import Eagle3Drafter
from hidden_states.errors import TrainingError

_NOT_OURS = ("embed_tokens.weight", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")


def to_sglang_name(name: str) -> str:
    """Any of the layouts' names -> ours; unknown names come back as they are."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return name


def load_drafter(folder: str | Path, config: DrafterConfig, dtype: torch.dtype = torch.float32) -> Eagle3Drafter:
    """A drafter with weights published in any of these layouts, to go on training from.

    Args:
        config: its shape, as `DrafterConfig.from_target` with the draft vocabulary size of the folder.

    Raises: TrainingError when tensors are missing, too many, or of other shapes, or the folder has no safetensors.
    """
    weights: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, value in load_file(file).items():
            name = to_sglang_name(name)
            if name not in _NOT_OURS:
                weights[name] = value.to(dtype) if value.is_floating_point() else value
    if not weights:
        raise TrainingError(
            str(folder), "no *.safetensors file", "a published drafter", "Pickled weights are not loaded."
        )
    if "d2t" not in weights and config.draft_vocab_size == config.vocab_size:
        weights["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    compare_keys(weights, config)
    drafter = Eagle3Drafter(config, weights["d2t"])
    drafter.to(dtype).load_state_dict(weights)
    return drafter


def draft_vocab_of(folder: str | Path) -> int:
    """Draft vocabulary size a published drafter's config names."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return int(config.get("draft_vocab_size") or config["vocab_size"])
