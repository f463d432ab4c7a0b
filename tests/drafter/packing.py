"""Packed rows for the drafter's tests: the same fields as `hidden_states.stream.PackedBatch`, random documents."""

import torch

from drafter.batch import Row
from drafter.config import DrafterConfig
from drafter.model import Eagle3Drafter, TargetWeights


def document(generator: torch.Generator, length: int, config: DrafterConfig, share: float = 0.6) -> dict:
    """One random document; about `share` of its tokens are to learn, in runs."""
    learn, on = [], False
    for _ in range(length):
        if torch.rand((), generator=generator) < 0.3:
            on = bool(torch.rand((), generator=generator) < share)
        learn.append(int(on))
    blocks, h = len(config.after_block), config.hidden_size
    return {
        "ids": torch.randint(config.vocab_size, (length,), generator=generator),
        "learn": torch.tensor(learn),
        "aux": torch.randn(length, blocks, h, generator=generator, dtype=torch.float64),
        "final": torch.randn(length, h, generator=generator, dtype=torch.float64),
    }


def pack(documents: list[dict], dtype: torch.dtype = torch.float64, names: list[str] | None = None) -> Row:
    """Documents one after the other in one row."""
    lengths = [len(d["ids"]) for d in documents]
    return Row(
        torch.cat([d["ids"] for d in documents]),
        torch.cat([d["learn"] for d in documents]),
        torch.cat([d["aux"] for d in documents]).to(dtype),
        torch.cat([d["final"] for d in documents]).to(dtype),
        torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]),
        torch.cat([torch.arange(n) for n in lengths]),
        names or [f"sample-{i}" for i in range(len(documents))],
    )


def small_config(**changes: object) -> DrafterConfig:
    """A drafter of a few thousand weights."""
    values: dict = {
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "rms_norm_eps": 1e-5, "vocab_size": 40, "draft_vocab_size": 24, "max_position_embeddings": 128,
        "rope": {"rope_type": "default", "rope_theta": 10000.0}, "after_block": (0, 2, 4),
        "target_architecture": "LlamaForCausalLM", "target_blocks": 6, **changes,
    }  # fmt: skip
    return DrafterConfig(**values)


def random_drafter(
    config: DrafterConfig, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> tuple[Eagle3Drafter, TargetWeights]:
    """A drafter with random weights (norms too), a draft vocabulary with holes, and a random target."""
    chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    drafter = Eagle3Drafter(config, chosen - torch.arange(len(chosen))).to(dtype)
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(1 + 0.2 * noise if weight.dim() == 1 else noise * weight.shape[1] ** -0.5)
    shape = (config.vocab_size, config.hidden_size)
    target = TargetWeights(*(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)))
    return drafter, target
