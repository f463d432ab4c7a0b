"""The exported folder: the keys SGLang consumes and no other, configs engines read, and what inspection says of it."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from drafter.config import DrafterConfig, LatentSizes, resolve_rope
from drafter.export import compare_keys, engine_config, expected_shapes, export_drafter
from drafter.inspect import inspect_drafter
from drafter.model import TargetWeights
from drafter.naming import load_drafter
from hidden_states.errors import TrainingError
from tests.drafter.packing import random_drafter, small_config

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "num_hidden_layers": 30, "vocab_size": 49152, "rms_norm_eps": 1e-5, "head_dim": 64,
    "max_position_embeddings": 8192, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}  # fmt: skip
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 61, "vocab_size": 163840,
        "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "max_position_embeddings": 262144, "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
}  # fmt: skip
LATENT = LatentSizes(6, 5, 3, 4, 2)
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
TARGET = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "vocab_size": 40, "num_hidden_layers": 6,
    "max_position_embeddings": 128, "rope_theta": 10000.0,
}  # fmt: skip


def exported(folder: Path, **changes: object) -> Path:
    drafter, _ = random_drafter(small_config(**changes), torch.Generator().manual_seed(0), torch.float32)
    return export_drafter(drafter, folder / "drafter")


def target_folder(folder: Path, **changes: object) -> Path:
    path = folder / "target"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**TARGET, **changes}))
    return path


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


@pytest.mark.parametrize("latent", [None, LATENT])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_the_key_set_is_exactly_what_sglang_consumes(tmp_path, fc_norm, latent) -> None:
    folder = exported(tmp_path, fc_norm=fc_norm, latent=latent)
    weights = load_file(folder / "model.safetensors")
    assert {n: tuple(w.shape) for n, w in weights.items()} == expected_shapes(
        small_config(fc_norm=fc_norm, latent=latent)
    )
    assert ("fc_norm.2.weight" in weights) is fc_norm
    assert ("midlayer.self_attn.kv_b_proj.weight" in weights) is bool(latent)
    assert inspect_drafter(folder, target_folder(tmp_path)).problems == []


@pytest.mark.parametrize("spoil", ["missing", "unknown", "shape"])
def test_a_key_set_that_differs_is_refused_by_name(spoil) -> None:
    drafter, _ = random_drafter(small_config(), torch.Generator().manual_seed(0), torch.float32)
    weights = dict(drafter.state_dict())
    if spoil == "missing":
        del weights["midlayer.hidden_norm.weight"]
    elif spoil == "unknown":
        weights["midlayer.hidden_nrom.weight"] = torch.ones(16)
    else:
        weights["fc.weight"] = torch.ones(16, 16)
    named = {"missing": "hidden_norm.weight is missing", "unknown": "hidden_nrom", "shape": r"fc.weight is \[16, 16\]"}
    with pytest.raises(TrainingError, match=named[spoil]):
        compare_keys(weights, drafter.config)


def test_weights_survive_export_and_return(tmp_path) -> None:
    drafter, _ = random_drafter(small_config(fc_norm=True), torch.Generator().manual_seed(0), torch.float32)
    for format in ("sglang", "vllm"):
        if format == "vllm":
            drafter, _ = random_drafter(small_config(), torch.Generator().manual_seed(0), torch.float32)
        folder = export_drafter(drafter, tmp_path / format, format=format)
        again = load_drafter(folder, drafter.config)
        assert all(torch.equal(again.state_dict()[n], w) for n, w in drafter.state_dict().items())


def test_layouts_of_other_trainers_are_read(tmp_path) -> None:
    drafter, target = random_drafter(small_config(), torch.Generator().manual_seed(0), torch.float32)
    weights = {n: w.clone() for n, w in drafter.state_dict().items()}
    weights["embed_tokens.weight"] = target.embedding
    weights["t2d"] = torch.zeros(40, dtype=torch.bool)
    layouts = {
        "specforge": weights,
        "speculators": {n.replace("midlayer.", "layers.0."): w for n, w in weights.items()},
        "automodel": {
            (n if n in ("lm_head.weight", "d2t", "t2d") else "model." + n.replace("midlayer.", "layers.0.")): w
            for n, w in weights.items()
        },
    }
    for name, layout in layouts.items():
        folder = tmp_path / name
        folder.mkdir()
        save_file(layout, folder / "model.safetensors")
        again = load_drafter(folder, drafter.config)
        assert all(torch.equal(again.state_dict()[n], w) for n, w in drafter.state_dict().items()), name


def test_the_dtype_asked_for_is_exported_and_the_vocabulary_map_stays_whole_numbers(tmp_path) -> None:
    drafter, _ = random_drafter(small_config(), torch.Generator().manual_seed(0), torch.float32)
    folder = export_drafter(drafter, tmp_path, dtype=torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    assert weights["fc.weight"].dtype == torch.bfloat16 and weights["d2t"].dtype == torch.int64
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_vllm_gets_boundaries_and_its_own_names(tmp_path) -> None:
    drafter, _ = random_drafter(small_config(), torch.Generator().manual_seed(0), torch.float32)
    folder = export_drafter(drafter, tmp_path, format="vllm")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["norm_before_residual"] is False and config["eagle_config"]["use_aux_hidden_state"] is True
    assert not any("midlayer" in name for name in load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(
    "changes", [{"fc_norm": True}, {"norm_output": True}, {"latent": LATENT}, {"after_block": (1, 3)}]
)
def test_what_vllm_cannot_express_is_refused(tmp_path, changes) -> None:
    drafter, _ = random_drafter(small_config(**changes), torch.Generator().manual_seed(0), torch.float32)
    with pytest.raises(TrainingError, match="SGLang"):
        export_drafter(drafter, tmp_path, format="vllm")


def test_rope_is_written_in_both_forms_and_transformers_reads_one() -> None:
    config = DrafterConfig.from_target(KIMI, (2, 30, 58), 32000)
    written = engine_config(config, torch.bfloat16, "sglang")
    assert resolve_rope(written) == config.rope
    only_old = {k: v for k, v in written.items() if k != "rope_parameters"}
    assert resolve_rope(only_old) == config.rope
    read = AutoConfig.for_model(**written)
    assert resolve_rope(read.to_dict()) == config.rope


def test_a_config_follows_its_target() -> None:
    small = DrafterConfig.from_target(SMOLLM2, [1, 14, 26], 4096)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (9, 3, 64)
    assert small.rope == {"rope_type": "default", "rope_theta": 100000.0}
    kimi = DrafterConfig.from_target(KIMI, [2, 30, 58], 32000)
    assert (kimi.hidden_size, kimi.head_dim, kimi.num_key_value_heads) == (7168, 128, 8)
    assert kimi.target_architecture == "KimiK25ForConditionalGeneration"
    ids = engine_config(kimi, torch.bfloat16, "sglang")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [3, 31, 59]
    assert DrafterConfig.from_json(kimi.to_json()) == kimi
    sizes = {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    with_sizes = {**KIMI, "text_config": {**KIMI["text_config"], **sizes}}
    latent = DrafterConfig.from_target(with_sizes, [2, 30, 58], 32000, latent_attention=True)
    assert latent.latent == LatentSizes(1536, 512, 128, 64, 128) and latent.rope_dim == 64
    assert DrafterConfig.from_json(latent.to_json()) == latent
    assert DrafterConfig.from_target(SMOLLM2, [1], 100, intermediate_size=64).intermediate_size == 64


@pytest.mark.parametrize(
    ("changes", "blocks", "vocab", "overrides", "says"),
    [
        ({}, [1, 14, 30], 4096, {}, "below 30"),
        ({}, [14, 1], 4096, {}, "ascending"),
        ({}, [], 4096, {}, "ascending"),
        ({}, [1], 50000, {}, "1 to 49152"),
        ({}, [1], 4096, {"num_key_value_heads": 2}, "multiple"),
        ({}, [1], 4096, {"num_key_value_heads": 0}, "`num_key_value_heads` is 0"),
        ({}, [1], 4096, {"head_dim": -64}, "`head_dim` is -64"),
        ({}, [1], 4096, {"intermediate_size": 1.5}, "is 1.5"),
        ({}, [1], 4096, {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, [1], 4096, {}, "rms_norm_eps"),
        ({}, [1], 4096, {"hidden_size": 512}, "576"),
        ({}, [1], 4096, {"width": 512}, "width"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, [1], 4096, {}, "longrope"),
        ({}, [1], 4096, {"latent_attention": True}, "without q_lora_rank"),
        ({}, [1], 4096, {"latent": LATENT, "rope": LINEAR_ROPE}, "takes any other scaling"),
    ],
)
def test_configs_that_cannot_work_are_refused(changes, blocks, vocab, overrides, says) -> None:
    with pytest.raises(TrainingError, match=says):
        DrafterConfig.from_target({**SMOLLM2, **changes}, blocks, vocab, **overrides)


def test_inspection_finds_that_a_drafter_fits(tmp_path) -> None:
    found = inspect_drafter(exported(tmp_path), target_folder(tmp_path))
    assert found.problems == []
    assert found.facts["SGLang will feed it the outputs of blocks"] == [0, 2, 4]
    assert found.text().endswith("fits")


@pytest.mark.parametrize(
    ("drafter", "target", "says"),
    [
        ({}, {"hidden_size": 32}, "hidden_size is 16, the target's is 32"),
        ({}, {"vocab_size": 50}, "vocab_size is 40"),
        ({}, {"architectures": ["DeepseekV3ForCausalLM"]}, r"trained on the outputs of blocks \[0, 2, 4\]"),
        ({}, {"num_hidden_layers": 4}, "block 4 is beyond"),
        ({}, {"max_position_embeddings": 4096}, "max_position_embeddings is 128"),
        ({"intermediate_size": 25}, {}, r"gate_proj.weight is \[24, 16\]; the config asks for \[25, 16\]"),
        ({"fc_norm": True}, {}, "fc_norm.0.weight is missing"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "LlamaForCausalLMEagle3"),
        ({"eagle_config": {}}, {}, "names no layer ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, {}, "names no layer ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 2, 0]}}, {}, "do not ascend"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 4]}}, {}, "do not ascend"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}, {}, "is 3; there are 2 layer ids"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "eyas": None},
            {"architectures": ["DeepseekV3ForCausalLM"]},
            "^block -1 is beyond the target's 6 blocks",
        ),
        ({"num_hidden_layers": None}, {}, "num_hidden_layers is None"),
        ({"num_hidden_layers": 2}, {}, "is 2; an EAGLE-3"),
        ({"rope_parameters": {"rope_type": "foo"}}, {}, "rope_type is 'foo'; SGLang knows default"),
        ({"attention_bias": True}, {}, "o_proj.bias is missing"),
        ({"bias": True}, {}, "fc.bias is missing"),
        ({"norm_before_fc": True}, {}, "input_norm.weight is missing"),
    ],
)
def test_inspection_names_what_does_not_fit(tmp_path, drafter, target, says) -> None:
    folder = exported(tmp_path)
    change_config(folder, **drafter)
    found = inspect_drafter(folder, target_folder(tmp_path, **target))
    assert any(re.search(says, problem) for problem in found.problems), found.problems


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("hidden_size", "num_attention_heads", "vocab_size", "num_aux_hidden_states")
          for value in (0, -3, True, 1.0, "3", [3])),
        *({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} for ids in (3, "024", {"a": 1}, [0, 2, "4"],
                                                                                [0.0, 2.0, 4.0], [False, 2, 4], [[0]])),
        *({"rms_norm_eps": value} for value in ("x", 0, -1e-6, True, [1e-6])),
        {"architectures": "LlamaForCausalLMEagle3"}, {"eagle_config": [1]}, {"eyas": "x"},
    ],
)  # fmt: skip
def test_inspection_refuses_values_of_another_kind(tmp_path, change) -> None:
    folder = exported(tmp_path)
    change_config(folder, **change)
    with pytest.raises(TrainingError, match="of another kind"):
        inspect_drafter(folder, target_folder(tmp_path))


def test_inspection_asks_for_no_head_that_is_the_targets(tmp_path) -> None:
    folder = exported(tmp_path, draft_vocab_size=40)
    weights = load_file(folder / "model.safetensors")
    save_file({n: w for n, w in weights.items() if n not in ("lm_head.weight", "d2t")}, folder / "model.safetensors")
    assert any("lm_head.weight is missing" in problem for problem in inspect_drafter(folder).problems)
    for change in ({"tie_word_embeddings": True}, {"tie_word_embeddings": False, "draft_vocab_size": None}):
        change_config(folder, **change)
        assert inspect_drafter(folder, target_folder(tmp_path)).problems == []


def test_inspection_names_weights_sglang_would_skip(tmp_path) -> None:
    folder = exported(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["midlayer.self_attn.q_norm.weight"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors")
    assert any("q_norm" in problem and "skips" in problem for problem in inspect_drafter(folder).problems)


def test_a_target_lends_its_embedding_and_head_tied_or_not(tmp_path) -> None:
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    save_file({"model.embed_tokens.weight": a, "model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    tied = TargetWeights.load(tmp_path)
    assert tied.head is tied.embedding and tied.to("cpu", torch.bfloat16).head.dtype == torch.bfloat16
    save_file({"language_model.lm_head.weight": b}, tmp_path / "model-2.safetensors")
    assert torch.equal(TargetWeights.load(tmp_path).head, b)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match="embed_tokens"):
        TargetWeights.load(tmp_path / "empty")
