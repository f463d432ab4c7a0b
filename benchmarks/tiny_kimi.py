"""A tiny Kimi-K2.5: SGLang's real multimodal wrapper around a tiny deepseek_v3, for text only."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.tiny_models import HIDDEN, make_tiny

KIND = "kimi_k25"
_VISION = {
    "patch_size": 14, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128,
    "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger", "mm_hidden_size": 64, "text_hidden_size": HIDDEN,
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "vt_hidden_size": 64,
    "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1,
    "vt_intermediate_size": 128,
}  # fmt: skip


def make_tiny_kimi(folder: Path) -> tuple[Path, Path]:
    """Write the wrapper and the text model it wraps, as two Hugging Face folders: (what to serve, the reference).

    The vision tower keeps whatever SGLang initialises it with: no image is ever sent.
    """
    text, wrapper = make_tiny("deepseek_v3", folder / "text"), folder / "wrapper"
    wrapper.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": KIND,
        "text_config": json.loads((text / "config.json").read_text()),
        "vision_config": _VISION,
        "language_model_only": True,  # no image processor, which would need torchvision
        "media_placeholder_token_id": 5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    (wrapper / "config.json").write_text(json.dumps(config, indent=1))
    weights = {f"language_model.{name}": tensor for name, tensor in load_file(text / "model.safetensors").items()}
    save_file(weights, wrapper / "model.safetensors", metadata={"format": "pt"})
    for file in (*text.glob("*token*"), *text.glob("chat_template*")):
        (wrapper / file.name).write_bytes(file.read_bytes())
    return wrapper, text
