"""Published drafters: into the trainer from every layout, and out again for either engine."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.config import LatentSizes
from drafter.export import export_drafter
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
