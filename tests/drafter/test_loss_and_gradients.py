"""The trainer's loss and every gradient, against the plain reference."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter.acceptance import Tally
from drafter.batch import Row
from drafter.config import LatentSizes
from drafter.loss import LossConfig
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.objective import Teacher, batch_loss, plan_work
from tests.drafter.packing import document, pack, random_drafter, small_config
from tests.drafter.reference import reference_loss


def ours(
    drafter: Eagle3Drafter,
    target: TargetWeights,
    rows: list[Row],
    steps: int,
    loss: LossConfig,
    recompute: bool = False,
) -> tuple[float, Tally, dict[str, torch.Tensor]]:
    """Loss, tally and gradients of packed rows that share one optimiser step."""
    teacher = Teacher(target, drafter.draft_ids)
    works = [plan_work(row, teacher, steps, loss) for row in rows]
    weights = loss.step_weights([sum(w.scored()[j] for w in works) for j in range(steps)])
    drafter.zero_grad()
    tally, total = Tally.zeros(steps), 0.0
    for row, work in zip(rows, works, strict=True):
        value, part = batch_loss(drafter, row, work, teacher, weights, loss, torch.float64, recompute)
        if value.requires_grad:
            value.backward()
        tally.add(part)
        total += float(value.detach())
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in drafter.named_parameters()}
    return total, tally, grads


def reference(
    drafter: Eagle3Drafter, target: TargetWeights, documents: list[dict], steps: int, loss: LossConfig
) -> dict:
    c = drafter.config
    weights = {n: v.detach().clone().requires_grad_(v.is_floating_point()) for n, v in drafter.state_dict().items()}
    out = reference_loss(
        weights, documents, target.embedding, target.head, heads=c.num_attention_heads, kv_heads=c.num_key_value_heads,
        steps=steps, theta=c.rope["rope_theta"], eps=c.rms_norm_eps, decay=loss.decay, fc_norm=c.fc_norm,
        norm_output=c.norm_output, out_of_vocab=loss.out_of_vocab, kind=loss.kind,
        latent=asdict(c.latent) if c.latent else None,
    )  # fmt: skip
    if out["loss"].requires_grad:
        out["loss"].backward()
    out["grads"] = {
        n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in weights.items() if v.is_floating_point()
    }
    return out


def assert_equal(drafter, target, documents, steps, loss, recompute=False) -> None:
    expected = reference(drafter, target, documents, steps, loss)
    value, tally, grads = ours(drafter, target, [pack(documents)], steps, loss, recompute)
    assert value == pytest.approx(float(expected["loss"]), rel=1e-8)
    largest = max(float(g.abs().max()) for g in expected["grads"].values())
    for name, grad in grads.items():
        assert torch.allclose(grad, expected["grads"][name], rtol=1e-8, atol=1e-8 * largest), name
    for ours_name, theirs in (("counted", "counted"), ("scored", "used"), ("hits", "hits"), ("reached", "reached"),
                              ("accepted", "accepted")):  # fmt: skip
        assert getattr(tally, ours_name).tolist() == expected[theirs], ours_name
    figures = tally.figures(loss.decay)
    for name, figure in figures_by_definition(expected, loss.decay).items():
        assert getattr(figures, name) == pytest.approx(figure, rel=1e-8, abs=1e-12), name


def figures_by_definition(expected: dict, decay: float) -> dict:
    """What `Figures` says its fields mean, from the reference's sums; replayed lengths have a test of theirs."""

    def share(part: list, whole: list) -> list[float]:
        return [a / b if b else 0.0 for a, b in zip(part, whole, strict=True)]

    loss = share(expected["sums"], expected["used"])
    conditional = share(expected["accepted"], expected["reached"])
    chains = [math.prod(conditional[: n + 1]) for n in range(len(conditional))]
    return {
        "loss": sum(decay**j * x for j, x in enumerate(loss)),
        "loss_per_step": loss,
        "top1": share(expected["hits"], expected["counted"]),
        "top1_in_vocab": share(expected["hits"], expected["in_vocab"]),
        "conditional_acceptance": conditional,
        "acceptance_length": 1 + sum(chains),
        "teacher_in_vocab": share(expected["in_vocab"], expected["counted"])[0],
        "coverage": expected["covered"] / expected["learned"] if expected["learned"] else 0.0,
        "teacher_entropy": share(expected["entropy"], expected["used"])[0],
        "positions": expected["counted"][0],
    }


@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 4),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    draft_vocab=st.integers(3, 40),
    fc_norm=st.booleans(),
    norm_output=st.booleans(),
    out_of_vocab=st.sampled_from(["drop", "renormalise"]),
    kind=st.sampled_from(["soft_ce", "kl", "lk"]),
    blocks=st.sampled_from([(0, 2, 4), (1, 3)]),
    chunk_rows=st.sampled_from([1, 3, 512]),
    recompute=st.booleans(),
    latent=st.sampled_from([None, None, LatentSizes(6, 5, 3, 4, 2), LatentSizes(4, 8, 2, 2, 5)]),
)
def test_loss_every_gradient_and_every_count_equal_the_plain_reference(
    seed, steps, heads, lengths, draft_vocab, fc_norm, norm_output, out_of_vocab, kind, blocks, chunk_rows, recompute,
    latent,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    config = small_config(
        num_attention_heads=heads[0], num_key_value_heads=heads[1], draft_vocab_size=draft_vocab, fc_norm=fc_norm,
        norm_output=norm_output, after_block=blocks, latent=latent,
    )  # fmt: skip
    drafter, target = random_drafter(config, generator)
    documents = [document(generator, n, config) for n in lengths]
    loss = LossConfig(kind=kind, decay=0.7, out_of_vocab=out_of_vocab, chunk_rows=chunk_rows)
    assert_equal(drafter, target, documents, steps, loss, recompute)
