"""The exported drafter, served by real SGLang, proposes what `drafter/` computes: layers, norms, rope, vocabulary map,
shift and recurrence are the same in training and in serving, or this fails."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter.config import DrafterConfig, read_target_config
from drafter.export import export_drafter
from drafter.inspect import inspect_drafter
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.proposal import propose
from infra.client import SGLangClient
from tests.servers import running_server
from tests.tiny_models import VOCAB, make_tiny

STEPS = 3
OUTPUT = 24


def random_drafter(config: DrafterConfig) -> Eagle3Drafter:
    """Random weights, norms included, and a draft vocabulary with holes."""
    generator = torch.Generator().manual_seed(5)
    chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    drafter = Eagle3Drafter(config, chosen - torch.arange(len(chosen)))
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise * 1.5 * weight.shape[1] ** -0.5)
    return drafter


def captured(target: Path, ids: list[int], blocks: tuple[int, ...]) -> torch.Tensor:
    """[S, A, H] outputs of blocks, by transformers: entry k + 1 of its hidden states is the output of block k."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([states[k + 1][0] for k in blocks], dim=1)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS = [
    # A Llama target; rope scaling that bends within the test's length; grouped heads.
    ("llama", (1, 2, 4), {"rope": LLAMA3}),
    # A DeepSeek target, whose layer ids SGLang takes literally; EAGLE-3.1's norms.
    ("deepseek_v3", (2, 3, 4), {"fc_norm": True, "norm_output": True, "head_dim": 32, "num_key_value_heads": 2}),
    # The same target; a drafter with its latent attention, in yarn's rope.
    ("deepseek_v3", (2, 3, 4), {"latent_attention": True, "fc_norm": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "blocks", "overrides"), VARIANTS, ids=["llama", "deepseek", "latent"])
def test_what_sglang_proposes_is_what_the_drafter_computes(tmp_path, kind, blocks, overrides) -> None:
    target = make_tiny(kind, tmp_path / "target")
    config = DrafterConfig.from_target(read_target_config(target), blocks, 300, **overrides)
    drafter = random_drafter(config)
    folder = export_drafter(drafter, tmp_path / "drafter")
    assert inspect_drafter(folder, target).problems == []
    prompts = {
        "short": [(7 * i + 3) % VOCAB for i in range(5)],
        "long": [(11 * i + i * i) % VOCAB for i in range(90)],
    }
    log = tmp_path / "proposals.jsonl"
    with (
        running_server(target, tmp_path, draft=folder, env={"EYAS_CPU_PROPOSALS_LOG": str(log)}) as server,
        SGLangClient(server.base_url) as client,
    ):
        answers = {
            rid: client.generate(ids, rid=rid, max_new_tokens=OUTPUT, sampling={"ignore_eos": True})
            for rid, ids in prompts.items()
        }
    embedding = TargetWeights.load(target).embedding
    compared = 0
    for rid, prompt in prompts.items():
        text = prompt + answers[rid].output_ids
        aux = captured(target, text, blocks)
        for line in map(json.loads, log.read_text().splitlines()):
            length = line["length"]
            if line["rid"] != rid or length > len(text):
                continue
            assert line["last_token"] == text[length - 1]
            ids = torch.tensor(text[:length])
            assert propose(drafter, ids, aux[: length - 1], embedding, STEPS) == line["drafted"], (rid, length)
            compared += 1
    assert compared >= OUTPUT
