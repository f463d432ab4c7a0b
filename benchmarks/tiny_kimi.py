"""Tiny Kimis: the text model K2, and SGLang's real multimodal wrapper K2.5 around it, for text only."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.tiny_models import HIDDEN, make_tiny

TEXT, WRAPPER = KINDS = ("kimi_k2", "kimi_k25")
_VISION = {
    "patch_size": 14, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128,
    "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger", "mm_hidden_size": 64, "text_hidden_size": HIDDEN,
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "vt_hidden_size": 64,
    "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1,
    "vt_intermediate_size": 128,
}  # fmt: skip


def make_tiny_kimi(kind: str, folder: Path, dtype: str = "float32") -> tuple[Path, Path]:
    """Write one of `KINDS`, and a deepseek_v3 of the same weights, as Hugging Face folders: (what to serve, reference).

    Kimi-K2 is DeepSeek-V3's code with one group of experts under a model type of its own, which transformers does not
    know. The vision tower keeps whatever SGLang initialises it with: no image is ever sent.
    """
    reference = make_tiny("deepseek_v3", folder / "reference", dtype=dtype)
    config = json.loads((reference / "config.json").read_text()) | {"n_group": 1, "topk_group": 1}
    (reference / "config.json").write_text(json.dumps(config, indent=1))

    served = folder / kind
    served.mkdir(parents=True, exist_ok=True)
    for file in (*reference.glob("*token*"), *reference.glob("chat_template*")):
        (served / file.name).write_bytes(file.read_bytes())
    weights = load_file(reference / "model.safetensors")
    text = config | {"model_type": TEXT}
    if kind == TEXT:
        config = text
    else:
        weights = {f"language_model.{name}": tensor for name, tensor in weights.items()}
        config = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": WRAPPER,
            "text_config": text,
            "vision_config": _VISION,
            "language_model_only": True,  # no image processor, which would need torchvision
            "media_placeholder_token_id": 5,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
    (served / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    return served, reference
