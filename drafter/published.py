"""Drafters that others published: their shape from `config.json`, their weights in any layout, and out in another.

    python -m drafter.published DRAFTER --target TARGET --out FOLDER --format vllm

writes a drafter again for another engine, or refuses it by name when that engine would not run it as it was trained.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from drafter.config import DrafterConfig, LatentSizes, read_target_config, resolve_rope
from drafter.export import export_drafter
from drafter.layer_ids import blocks_sglang_captures
from drafter.model import Eagle3Drafter
from drafter.naming import load_drafter
from hidden_states.errors import Refusal, TrainingError
from hidden_states.target_config import language_config

_DTYPES = ("float32", "bfloat16", "float16")
_NOT_ONE = ("partial_rotary_factor", "attn_factor", "extrapolation_factor", "rope_is_neox_style")  # SGLang reads them


def published_config(folder: str | Path, target: dict[str, Any]) -> DrafterConfig:
    """The shape of a drafter in the layout of SGLang, SpecForge (the same), vLLM or speculators.

    Captured blocks: as they were written where Eyas wrote them; boundaries (id k = output of block k - 1) in the last
    two; else as SGLang reads them for this target. Without ids, SGLang's own default: blocks 1, n/2 - 1 and n - 4.

    Args:
        target: `config.json` of the model it drafts for.

    Raises: TrainingError for a variant whose block differs from EAGLE-3's, or what is no drafter's config.
    """
    given = read_target_config(folder)
    try:
        return _published(folder, given, target)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise TrainingError(
            str(Path(folder) / "config.json"), f"keys are missing, or of another kind ({error!r})",
            "a drafter's config, and its target's", "Are both folders complete?",
        ) from error  # fmt: skip


def _published(folder: str | Path, given: dict[str, Any], target: dict[str, Any]) -> DrafterConfig:
    text = {**given, **(given.get("transformer_layer_config") or {})}
    if given.get("norm_before_residual"):
        raise TrainingError(
            str(folder), "norm_before_residual", "EAGLE-3's block, whose residual is the un-normed state",
            "SGLang's LlamaForCausalLMEagle3 would run these weights as another model; they cannot be continued here.",
        )  # fmt: skip
    if (given.get("eagle_config") or {}).get("norm_before_fc") or given.get("norm_before_fc"):
        raise TrainingError(str(folder), "norm_before_fc", "states that go into fc as they are, or through fc_norm",
                            "This block is another model; it cannot be continued here.")  # fmt: skip
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if turned := [f"{name} {at[name]}" for name in _NOT_ONE for at in (text, rope) if at.get(name) not in (None, 1)]:
        raise TrainingError(
            str(folder), ", ".join(turned), "rope of whole heads without further factors",
            "SGLang runs these weights with it; here they would be trained on as another model.",
        )  # fmt: skip
    inner = language_config(target)
    n = inner["num_hidden_layers"]
    boundaries = "norm_before_residual" in given or "speculators_model_type" in given
    ids = (given.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = ids or given.get("eagle_aux_hidden_state_layer_ids")
    architecture = (target.get("architectures") or inner.get("architectures") or ["unknown"])[0]
    if "eyas" in given:
        blocks = given["eyas"]["after_block"]
    elif not ids:
        blocks = [1, n // 2 - 1, n - 4]
    else:
        blocks = [i - 1 for i in ids] if boundaries else blocks_sglang_captures(ids, architecture)
    heads = text["num_attention_heads"]
    latent = None
    if text.get("kv_lora_rank") and "Eagle3DeepseekV2ForCausalLM" in (given.get("architectures") or []):
        latent = LatentSizes(**{name: text[name] for name in LatentSizes.__dataclass_fields__})
    return DrafterConfig.from_target(
        target, blocks, given.get("draft_vocab_size") or text["vocab_size"],
        intermediate_size=text["intermediate_size"], num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=128 if latent else text.get("head_dim") or text["hidden_size"] // heads,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6), rope=resolve_rope(text), latent=latent,
        max_position_embeddings=text.get("max_position_embeddings") or inner["max_position_embeddings"],
        fc_norm=bool(given.get("fc_norm") or given.get("use_aux_norm")), norm_output=bool(given.get("norm_output")),
    )  # fmt: skip


def load_published(folder: str | Path, target: str | Path, dtype: torch.dtype = torch.float32) -> Eagle3Drafter:
    """A published drafter, to go on training from or to export again.

    Raises: TrainingError when its block, names or shapes are not EAGLE-3's.
    """
    return load_drafter(folder, published_config(folder, read_target_config(target)), dtype)


def main() -> None:
    """Exports again; exit code 1 with a reason when that cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", choices=["sglang", "vllm"], default="sglang")
    args = parser.parse_args()
    try:
        given = read_target_config(args.drafter)
        name = given.get("torch_dtype") or given.get("dtype") or "float32"
        if name not in _DTYPES:
            raise TrainingError(f"{args.drafter}/config.json", f"dtype {name!r}", f"one of {', '.join(_DTYPES)}", "")
        dtype = getattr(torch, name)
        drafter = load_published(args.drafter, args.target, dtype)
        export_drafter(drafter, args.out, args.format, dtype)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(1)
    print(json.dumps({"out": str(args.out), "format": args.format, "after_block": list(drafter.config.after_block)}))


if __name__ == "__main__":
    main()
