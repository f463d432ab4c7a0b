"""The folder a serving engine loads: `config.json` and `model.safetensors`, checked key by key against its loader.

SGLang's loader passes over names it does not know without a word, and leaves weights it did not find at random values;
so the key set is compared here, where a difference still stops something.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.layer_ids import sglang_layer_ids, vllm_layer_ids
from drafter.model import Eagle3Drafter, vocabulary_digest
from hidden_states.errors import TrainingError

Format = Literal["sglang", "vllm"]


def architecture_of(config: DrafterConfig) -> str:
    """SGLang's class for this drafter."""
    return "Eagle3DeepseekV2ForCausalLM" if config.latent else "LlamaForCausalLMEagle3"


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that SGLang's class for this drafter consumes, with its shape.

    The embedding is not among them: the engine puts the target's in its place. Source: `load_weights` of
    sglang/srt/models/llama_eagle3.py and kimi_k25_eagle3.py, 0.5.23.
    """
    h, i = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, config.states_width),
        **{f"midlayer.self_attn.{name}.weight": shape for name, shape in attention_shapes(config).items()},
        "midlayer.mlp.gate_proj.weight": (i, h),
        "midlayer.mlp.up_proj.weight": (i, h),
        "midlayer.mlp.down_proj.weight": (h, i),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab_size, h),
        "d2t": (config.draft_vocab_size,),
    }
    if config.fc_norm:
        shapes.update({f"fc_norm.{a}.weight": (h,) for a in range(len(config.after_block))})
    return shapes


def attention_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The attention's matrices and norms, by SGLang's names."""
    h, heads = config.hidden_size, config.num_attention_heads
    if (at := config.latent) is None:
        q, kv = heads * config.head_dim, config.num_key_value_heads * config.head_dim
        return {"q_proj": (q, 2 * h), "k_proj": (kv, 2 * h), "v_proj": (kv, 2 * h), "o_proj": (h, q)}
    return {
        "q_a_proj": (at.q_lora_rank, 2 * h),
        "q_a_layernorm": (at.q_lora_rank,),
        "q_b_proj": (heads * (at.qk_nope_head_dim + at.qk_rope_head_dim), at.q_lora_rank),
        "kv_a_proj_with_mqa": (at.kv_lora_rank + at.qk_rope_head_dim, 2 * h),
        "kv_a_layernorm": (at.kv_lora_rank,),
        "kv_b_proj": (heads * (at.qk_nope_head_dim + at.v_head_dim), at.kv_lora_rank),
        "o_proj": (h, heads * at.v_head_dim),
    }


def engine_config(config: DrafterConfig, dtype: torch.dtype, format: Format) -> dict[str, Any]:
    """`config.json` for the engine. Rope stands there in both forms engines read (`rope_theta` beside `rope_scaling`,
    and transformers 5's `rope_parameters`), from one source, so that they cannot disagree."""
    own = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    scaling = None if config.rope["rope_type"] == "default" else own
    if format == "sglang":
        ids = sglang_layer_ids(config.after_block, config.target_architecture)
    else:
        ids = vllm_layer_ids(config.after_block)
    out: dict[str, Any] = {
        "architectures": [architecture_of(config)],
        "model_type": "deepseek_v3" if config.latent else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": scaling,
        "rope_parameters": config.rope,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(config.after_block),
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
        # For people and for `inspect`: engines ignore it.
        "eyas": {
            "after_block": list(config.after_block),
            "target_architecture": config.target_architecture,
            "target_blocks": config.target_blocks,
            # once more, as trained: a file edited above is told from one that is not (drafter/diagnosis.py)
            "trained": {
                "rope": config.rope,
                "rms_norm_eps": config.rms_norm_eps,
                "fc_norm": config.fc_norm,
                "norm_output": config.norm_output,
            },
        },
    }
    if config.latent:
        del out["head_dim"]
        out |= {**asdict(config.latent), "num_key_value_heads": config.num_attention_heads, "rope_interleave": True}
    if format == "vllm":
        out |= {"eagle_aux_hidden_state_layer_ids": ids, "norm_before_residual": False}
    return out


def export_drafter(
    drafter: Eagle3Drafter, folder: str | Path, format: Format = "sglang", dtype: torch.dtype | None = None
) -> Path:
    """Writes the folder an engine loads, and returns it.

    Args:
        dtype: of the weights; the drafter's own when not given. Serve it with the same.

    Raises: TrainingError when the engine would not load exactly these tensors.
    """
    config = drafter.config
    if format == "vllm" and (config.fc_norm or config.norm_output or config.latent or len(config.after_block) != 3):
        raise TrainingError(
            "export to vllm",
            f"fc_norm={config.fc_norm}, norm_output={config.norm_output}, latent attention={bool(config.latent)}, "
            f"{len(config.after_block)} blocks",
            "none of them, and 3 blocks", "vLLM's llama_eagle3 cannot express this drafter; export it for SGLang.",
        )  # fmt: skip
    dtype = dtype or drafter.fc.weight.dtype
    weights = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype).contiguous()
        for name, value in drafter.state_dict().items()
    }
    compare_keys(weights, config)
    if format == "vllm":
        weights = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = engine_config(config, dtype, format)
    written["eyas"]["trained"]["d2t_sha256"] = vocabulary_digest(drafter.d2t)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    return folder


def compare_keys(weights: dict[str, Tensor], config: DrafterConfig) -> None:
    """Compares names and shapes with what the engine consumes.

    Raises: TrainingError naming every difference.
    """
    expected = expected_shapes(config)
    wrong = [f"{n} is missing" for n in expected if n not in weights]
    wrong += [f"{n} is not loaded by SGLang" for n in weights if n not in expected]
    wrong += [
        f"{n} is {list(weights[n].shape)}, not {list(shape)}"
        for n, shape in expected.items()
        if n in weights and tuple(weights[n].shape) != shape
    ]
    if wrong:
        raise TrainingError(
            "drafter weights", "; ".join(wrong), f"exactly the tensors of {architecture_of(config)}",
            "SGLang would skip unknown names silently and keep random values for missing ones.",
        )  # fmt: skip
