"""Run by the tests with SGLang's interpreter: asks the installed engine itself. One JSON object in, one out.

layers: {architecture: ids} -> the capture points `set_eagle3_layers_to_capture` makes of them.
ropes: list of drafter configs -> cos of a few positions, from the rotary embedding SGLang builds for that config.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v2",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "glm4_moe",
    "MistralLarge3ForCausalLM": "mistral_large_3",
    "KimiK25ForConditionalGeneration": "kimi_k25",
}


class _Inner(SimpleNamespace):
    """Stands for the transformer inside the model; some of them are told through a method."""

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.layers_to_capture = ids


def capture_points(architecture: str, ids: list[int]) -> list[int]:
    """What the model class, with nothing loaded, makes of the ids."""
    model = getattr(importlib.import_module(f"sglang.srt.models.{MODULES[architecture]}"), architecture)
    inner = _Inner()
    stand_in = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True), config=SimpleNamespace(num_hidden_layers=61), model=inner
    )
    if architecture == "KimiK25ForConditionalGeneration":
        from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM

        inner_model = SimpleNamespace(**vars(stand_in))
        inner_model.set_eagle3_layers_to_capture = lambda given: DeepseekV3ForCausalLM.set_eagle3_layers_to_capture(
            inner_model, given
        )
        stand_in.language_model = inner_model
    model.set_eagle3_layers_to_capture(stand_in, ids)
    return list(inner.layers_to_capture)


def rope_rows(config: dict, positions: list[int]) -> dict:
    """cos and sin [positions, half] as the drafter's attention gets them for this config.json."""
    import torch
    from sglang.srt.layers.rotary_embedding import get_rope
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        loaded = AutoConfig.from_pretrained(folder)
    # The reading of sglang/srt/models/llama.py: LlamaDecoderLayer
    parameters = loaded.rope_parameters
    rope = get_rope(
        loaded.head_dim, rotary_dim=loaded.head_dim, max_position=loaded.max_position_embeddings,
        base=parameters["rope_theta"], rope_scaling=parameters, is_neox_style=True, dtype=torch.float32,
    )  # fmt: skip
    rows = rope.cos_sin_cache[torch.tensor(positions)].float()
    cos, sin = rows.chunk(2, dim=-1)
    return {"cos": cos.tolist(), "sin": sin.tolist()}


def main() -> None:
    """Answers on stdout's last line."""
    asked = json.load(sys.stdin)
    answer: dict = {"layers": [], "ropes": []}
    for architecture, ids in asked["layers"]:
        answer["layers"].append(capture_points(architecture, ids))
    if asked["ropes"]:
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
        answer["ropes"] = [rope_rows(config, asked["positions"]) for config in asked["ropes"]]
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
