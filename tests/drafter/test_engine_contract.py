"""What the exported config makes the installed SGLang do: asked of SGLang itself, in its own environment."""

import json
import os
import subprocess
from typing import Any

import pytest
import torch

from drafter.config import DrafterConfig, resolve_rope
from drafter.export import engine_config
from drafter.layer_ids import blocks_sglang_captures, sglang_layer_ids
from drafter.rope import RopeTable
from hidden_states.errors import TrainingError
from infra.server import CPU_ENV
from tests.drafter.packing import small_config
from tests.drafter.sglang_probe import MODULES
from tests.servers import REPOSITORY, SGLANG_PYTHON

BLOCKS = [(1, 14, 26), (1, 29, 57), (2, 30, 58), (5, 6, 7), (3, 31, 59)]
POSITIONS = [0, 1, 7, 100, 1000, 4095]
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1}
ROPES: list[dict[str, Any]] = [
    {"rope_theta": 100000.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "rope_theta": 1.0},
    {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 10000.0, "rope_scaling": YARN},
    {"rope_theta": 50000.0, "rope_scaling": {**YARN, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    {"rope_theta": 50000.0, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 1}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7000.0}, "sliding_attention": {}}},
]


def drafter_with(rope: dict[str, Any]) -> DrafterConfig:
    return small_config(head_dim=64, max_position_embeddings=8192, rope=resolve_rope(rope))


@pytest.fixture(scope="module")
def sglang() -> dict[str, Any]:
    """The engine's answers, all from one process: importing it takes most of the time."""
    asked = {
        "layers": [(a, sglang_layer_ids(blocks, a)) for a in MODULES for blocks in BLOCKS],
        "ropes": [engine_config(drafter_with(rope), torch.float32, "sglang") for rope in ROPES],
        "positions": POSITIONS,
    }

    done = subprocess.run(
        [SGLANG_PYTHON, "-m", "tests.drafter.sglang_probe"], input=json.dumps(asked), capture_output=True, text=True,
        env={**os.environ, **CPU_ENV}, cwd=REPOSITORY, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
def test_sglang_captures_the_very_blocks_the_drafter_was_trained_on(sglang) -> None:
    """Capture point p is what enters block p: the output of block p - 1."""
    expected = [[block + 1 for block in blocks] for _ in MODULES for blocks in BLOCKS]
    assert sglang["layers"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROPES)))
def test_rope_is_what_sglang_builds_from_the_exported_config(sglang, number) -> None:
    config = drafter_with(ROPES[number])
    cos, sin = RopeTable(config.rope, config.head_dim).at(torch.tensor(POSITIONS), torch.float32)
    given = sglang["ropes"][number]
    # SGLang's angles are float32: at position 4,095 they are off by up to 4095 * 2^-24 rad
    assert torch.allclose(cos[:, 0], torch.tensor(given["cos"]), atol=5e-4)
    assert torch.allclose(sin[:, 0], torch.tensor(given["sin"]), atol=5e-4)


@pytest.mark.parametrize(
    ("architecture", "blocks", "ids"),
    [
        ("LlamaForCausalLM", (1, 14, 26), [1, 14, 26]),
        ("Qwen3ForCausalLM", (2, 18, 33), [2, 18, 33]),
        ("DeepseekV3ForCausalLM", (2, 30, 58), [3, 31, 59]),
        ("KimiK25ForConditionalGeneration", (2, 30, 58), [3, 31, 59]),
        ("DeepseekV3ForCausalLM", (1, 29, 57), [1, 29, 57]),
    ],
)
def test_the_table_of_layer_ids(architecture, blocks, ids) -> None:
    assert sglang_layer_ids(blocks, architecture) == ids
    assert blocks_sglang_captures(ids, architecture) == list(blocks)


def test_block_0_of_a_deepseek_target_is_refused_rather_than_shifted() -> None:
    with pytest.raises(TrainingError, match="block 0"):
        sglang_layer_ids((0, 3), "DeepseekV3ForCausalLM")
    assert sglang_layer_ids((0, 3), "LlamaForCausalLM") == [0, 3]
