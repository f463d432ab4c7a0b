"""What a training begins with: a fresh drafter for a target, or a published one that is trained further."""

import json
from pathlib import Path

import pytest
import torch

from drafter.config import DrafterConfig
from drafter.export import export_drafter
from drafter.model import Eagle3Drafter
from drafter.published import published_config
from drafter.start import first_config, first_drafter
from hidden_states.errors import DataError, TrainingError
from tests.drafter.packing import random_drafter

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": 40, "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}  # fmt: skip
HEAD = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
D2T = torch.zeros(24, dtype=torch.int64)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


def published(folder: Path, format: str = "sglang", **changes: object) -> Eagle3Drafter:
    config = DrafterConfig.from_target(SHAPE, (1, 2, 4), 20, **changes)
    drafter, _ = random_drafter(config, torch.Generator().manual_seed(1), torch.float32)
    export_drafter(drafter, folder, format)
    return drafter


@pytest.mark.parametrize("format", ["sglang", "vllm"])
def test_a_published_drafter_is_the_first_one_with_its_own_shape_and_vocabulary(tmp_path, target, format) -> None:
    theirs = published(tmp_path / "theirs", format, num_key_value_heads=4, intermediate_size=40)
    ours = first_drafter(target, HEAD, (1, 2, 4), D2T, seed=0, start_from=tmp_path / "theirs")
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())
    assert ours.config.intermediate_size == 40 and len(ours.d2t) == 20


def test_a_fresh_drafter_has_what_was_asked_for(target) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
    drafter = first_drafter(target, HEAD, [1, 2, 4], D2T, 3, overrides={"fc_norm": True, "rope": rope})
    again = first_drafter(target, HEAD, [1, 2, 4], D2T, 3, overrides={"fc_norm": True, "rope": rope})
    assert drafter.config.fc_norm and drafter.config.rope["beta_fast"] == 32, "nothing left to an engine's default"
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("start_from", "overrides", "says"),
    [
        (None, {"after_block": [1, 2]}, "after_block; expected fields that the dataset does not decide"),
        (None, {"draft_vocab_size": 5}, "draft_vocab_size; expected fields that the dataset does not decide"),
        (None, {"fc_nrom": True}, "fc_nrom"),
        (None, {"rope": "yarn"}, "rope"),
        (None, {"rope": {"rope_type": "yarn", "rope_theta": "x"}}, "rope"),
        (None, {"num_attention_heads": "4"}, "num_attention_heads"),
        ("theirs", {"fc_norm": True}, "fc_norm beside start_from"),
        ("other-blocks", {}, r"reads the outputs of blocks \[1, 3, 4\].*blocks \[1, 2, 4\]"),
        ("nowhere", {}, "nowhere"),
    ],
)
def test_what_cannot_be_trained_on_this_data_is_refused_by_name(tmp_path, target, start_from, overrides, says) -> None:
    published(tmp_path / "theirs")
    config = DrafterConfig.from_target(SHAPE, (1, 3, 4), 20)
    export_drafter(random_drafter(config, torch.Generator().manual_seed(1))[0], tmp_path / "other-blocks")
    with pytest.raises(TrainingError, match=says):
        first_config(target, (1, 2, 4), 24, start_from and tmp_path / start_from, overrides)


@pytest.mark.parametrize(
    ("name", "harmless"),
    [
        ("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1), ("lm_head_multiplier", None),
        ("dim_model_base", SHAPE["hidden_size"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("start_from", [None, "theirs"])
def test_a_target_whose_logits_are_more_than_its_head_is_refused(tmp_path, target, name, harmless, start_from) -> None:
    published(tmp_path / "theirs")
    before = start_from and tmp_path / start_from
    (target / "config.json").write_text(json.dumps({**SHAPE, name: 0.25}))
    with pytest.raises(DataError, match=f"{name} is 0.25"):
        first_config(target, (1, 2, 4), 24, before)
    (target / "config.json").write_text(json.dumps({**SHAPE, name: harmless}))
    first_config(target, (1, 2, 4), 24, before)


def test_a_drafter_for_such_a_target_can_still_be_read(tmp_path) -> None:
    published(tmp_path / "theirs")
    assert published_config(tmp_path / "theirs", {**SHAPE, "logit_scale": 0.25}).after_block == (1, 2, 4)
