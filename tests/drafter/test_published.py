"""Published drafters: into the trainer from every layout, and out again for either engine."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import published
from drafter.config import LatentSizes
from drafter.export import export_drafter
from drafter.inspect import inspect_drafter
from drafter.published import load_published, published_config
from hidden_states.errors import TrainingError
from tests.drafter.packing import random_drafter, small_config
from tests.drafter.test_export import TARGET, change_config, target_folder
from tests.servers import REPOSITORY

INNER = {**TARGET, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
LATENT = LatentSizes(6, 5, 3, 4, 2)


def drafter_of(**changes: object):
    return random_drafter(small_config(**changes), torch.Generator().manual_seed(0), torch.float32)[0]


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True}, {"latent": LATENT}])
def test_a_drafter_comes_back_as_it_was_exported(tmp_path, changes) -> None:
    drafter = drafter_of(**changes)
    target = target_folder(tmp_path, **INNER)
    again = load_published(export_drafter(drafter, tmp_path / "drafter"), target)
    meaningless = ("head_dim", "num_key_value_heads") if "latent" in changes else ()
    same = {name: value for name, value in vars(drafter.config).items() if name not in meaningless}
    assert {name: getattr(again.config, name) for name in same} == same
    assert all(torch.equal(again.state_dict()[n], w) for n, w in drafter.state_dict().items())


@pytest.mark.parametrize(("layout", "ids"), [("specforge", [0, 2, 4]), ("vllm", [1, 3, 5]), ("speculators", [1, 3, 5])])
def test_layer_ids_mean_the_same_blocks_in_every_layout(tmp_path, layout, ids) -> None:
    drafter = drafter_of()
    folder = export_drafter(drafter, tmp_path / "drafter", format="sglang" if layout == "specforge" else "vllm")
    config = json.loads((folder / "config.json").read_text())
    del config["eyas"]
    if layout == "speculators":
        nested = {k: config.pop(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
                                             "intermediate_size", "hidden_size", "rope_parameters", "vocab_size",
                                             "max_position_embeddings")}  # fmt: skip
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": nested, "norm_before_residual": False,
                  "draft_vocab_size": 24, "eagle_aux_hidden_state_layer_ids": ids}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    again = load_published(folder, target_folder(tmp_path, **INNER))
    assert again.config == drafter.config


def test_a_block_of_another_kind_is_refused(tmp_path) -> None:
    folder = export_drafter(drafter_of(), tmp_path / "drafter")
    change_config(folder, norm_before_residual=True)
    with pytest.raises(TrainingError, match="norm_before_residual"):
        published_config(folder, INNER)


def test_without_ids_the_blocks_are_the_engines_default(tmp_path) -> None:
    folder = export_drafter(drafter_of(), tmp_path / "drafter")
    change_config(folder, eagle_config=None, eyas=None)
    config = json.loads((folder / "config.json").read_text())
    del config["eyas"]
    (folder / "config.json").write_text(json.dumps(config))
    assert published_config(folder, {**INNER, "num_hidden_layers": 30}).after_block == (1, 14, 26)


def test_the_command_writes_a_drafter_in_vllms_names(tmp_path) -> None:
    folder = export_drafter(drafter_of(), tmp_path / "drafter")
    target = target_folder(tmp_path, **INNER)
    out = tmp_path / "vllm"
    command = [sys.executable, "-m", "drafter.published", folder, "--target", target, "--out", out, "--format", "vllm"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    weights = load_file(out / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in weights and not any("midlayer" in name for name in weights)
    weights["fc.weight"] = weights["fc.weight"][:, :8].contiguous()
    save_file(weights, out / "model.safetensors")
    refused = subprocess.run(
        [*command[:3], out, *command[4:]], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1 and "fc.weight" in refused.stderr


Weights = dict[str, torch.Tensor]


def change_weights(folder: Path, change: Callable[[Weights], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def cast(name: str, dtype: torch.dtype) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: weights[name].to(dtype)})


def moved(by: int) -> Callable[[Weights], object]:
    return lambda weights: weights.update(d2t=weights["d2t"] + by)


BAD_WEIGHTS: dict[str, tuple[Callable[[Weights], object], str]] = {
    "map too high": (moved(30), "d2t maps .* tokens that do not exist"),
    "map below 0": (moved(-30), "d2t maps .* tokens that do not exist"),
    "map of floats": (cast("d2t", torch.float32), "d2t holds float32, not whole numbers"),
    "map of truths": (cast("d2t", torch.bool), "d2t holds bool, not whole numbers"),
    "whole numbers": (cast("fc.weight", torch.int8), "fc.weight holds"),
    "under two names": (
        lambda w: w.update({"layers.0.hidden_norm.weight": torch.ones(16)}),
        "midlayer.hidden_norm.weight",
    ),
}


@pytest.mark.parametrize("bad", BAD_WEIGHTS)
def test_weights_and_maps_that_are_none_are_named_by_inspection_and_not_loaded(tmp_path, bad) -> None:
    change, says = BAD_WEIGHTS[bad]
    folder, target = export_drafter(drafter_of(), tmp_path / "drafter"), target_folder(tmp_path, **INNER)
    change_weights(folder, change)
    found = inspect_drafter(folder, target).problems
    assert len(found) == 1 and re.match(says, found[0]), found
    with pytest.raises(TrainingError, match=says):
        load_published(folder, target)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 100,
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 9 * 10**7) + b"{",
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_files_that_are_no_safetensors_are_named(tmp_path, content) -> None:
    folder, target = export_drafter(drafter_of(), tmp_path / "drafter"), target_folder(tmp_path, **INNER)
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors cannot be read" in inspect_drafter(folder, target).problems[0]
    with pytest.raises(TrainingError, match=r"model\.safetensors: it cannot be read"):
        load_published(folder, target)


@pytest.mark.parametrize("missing", [False, True])
def test_shards_are_read_together(tmp_path, missing) -> None:
    drafter, target = drafter_of(), target_folder(tmp_path, **INNER)
    folder = export_drafter(drafter, tmp_path / "drafter")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, names in enumerate((sorted(weights)[:5], sorted(weights)[5:])):
        if not (missing and number):
            save_file({name: weights[name] for name in names}, folder / f"model-0000{number + 1}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    found = inspect_drafter(folder, target).problems
    if missing:
        assert found and all("is missing" in problem for problem in found)
        with pytest.raises(TrainingError, match="is missing"):
            load_published(folder, target)
    else:
        again = load_published(folder, target).state_dict()
        assert not found and all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_the_older_names_of_the_norms_before_fc_are_read(tmp_path) -> None:
    folder, target = export_drafter(drafter_of(fc_norm=True), tmp_path / "drafter"), target_folder(tmp_path, **INNER)
    change_config(folder, fc_norm=None, use_aux_norm=True)
    norms = load_file(folder / "model.safetensors")
    older = [f"aux_norm_{name}.weight" for name in ("low", "mid", "high")]
    change_weights(folder, lambda w: w.update({name: w.pop(f"fc_norm.{n}.weight") for n, name in enumerate(older)}))
    assert inspect_drafter(folder, target).problems == []
    again = load_published(folder, target).state_dict()
    assert all(torch.equal(again[f"fc_norm.{n}.weight"], norms[f"fc_norm.{n}.weight"]) for n in range(3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"), ({"rope_is_neox_style": False}, "neox"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 2.0}}, "attn_factor 2.0"),
        ({"norm_before_fc": True}, "norm_before_fc"), ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc"),
        ({"num_attention_heads": ...}, "of another kind"), ({"num_attention_heads": None}, "`num_attention_heads` is"),
        ({"intermediate_size": ...}, "of another kind"), ({"intermediate_size": None}, "`intermediate_size` is None"),
        ({"eagle_config": [1]}, "of another kind"), ({"eagle_config": "x"}, "of another kind"),
        ({"eyas": []}, "of another kind"), ({"eyas": {}}, "of another kind"), ({"eyas": "x"}, "of another kind"),
        ({"transformer_layer_config": [1]}, "of another kind"), ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"), ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_type and numbers"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_type and numbers"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_type and numbers"),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": float("inf")}}, "and numbers"),
    ],
)  # fmt: skip
def test_a_config_that_is_none_or_of_another_model_is_refused(tmp_path, change, says) -> None:
    folder = export_drafter(drafter_of(), tmp_path / "drafter")
    change_config(folder, **change)
    with pytest.raises(TrainingError, match=says):
        load_published(folder, target_folder(tmp_path, **INNER))


@pytest.mark.parametrize("dtype", ["float99", "int8", "load", 3])
def test_the_command_refuses_a_dtype_that_is_none_of_weights(tmp_path, dtype, monkeypatch, capsys) -> None:
    folder = export_drafter(drafter_of(), tmp_path / "drafter")
    change_config(folder, torch_dtype=dtype)
    target = target_folder(tmp_path, **INNER)
    monkeypatch.setattr(
        sys, "argv", ["published", str(folder), "--target", str(target), "--out", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit, match="1"):
        published.main()
    assert repr(dtype) in capsys.readouterr().err and not (tmp_path / "out").exists()
