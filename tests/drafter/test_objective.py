"""What is read of a target, and what a position teaches."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter.loss import LossConfig
from drafter.model import TargetWeights
from drafter.objective import Teacher, batch_loss, plan_work
from hidden_states.errors import TrainingError
from hidden_states.top_k import TopLogits, top_logits
from tests.drafter.packing import document, pack, random_drafter, small_config

EMBEDDING, HEAD = torch.ones(4, 2), torch.full((4, 2), 2.0)


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"tie_word_embeddings": True},
        {},
        {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
    ],
    ids=str,
)
def test_a_target_without_a_head_has_its_embedding_for_one_where_its_config_agrees(tmp_path: Path, config) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDING}, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    weights = TargetWeights.load(tmp_path)
    assert weights.head is weights.embedding


@pytest.mark.parametrize("config", [{"tie_word_embeddings": False}, {"text_config": {"tie_word_embeddings": False}}])
def test_a_missing_shard_is_not_taken_for_tied_weights(tmp_path: Path, config) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": EMBEDDING}, tmp_path / "model-1.safetensors")
    with pytest.raises(TrainingError, match=r"lm_head\.weight.*tie_word_embeddings false"):
        TargetWeights.load(tmp_path)
    save_file({"lm_head.weight": HEAD}, tmp_path / "model-2.safetensors")
    assert torch.equal(TargetWeights.load(tmp_path).head, HEAD)


def test_a_torn_shard_is_named(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDING}, tmp_path / "model-1.safetensors")
    whole = (tmp_path / "model-1.safetensors").read_bytes()
    (tmp_path / "model-2.safetensors").write_bytes(whole[:-5])
    with pytest.raises(TrainingError, match=r"model-2\.safetensors: it cannot be read"):
        TargetWeights.load(tmp_path)


def test_a_position_whose_known_logits_are_all_outside_the_draft_vocabulary_teaches_nothing() -> None:
    """With `renormalise` it would teach an even distribution, which the target never had."""
    generator = torch.Generator().manual_seed(0)
    config = small_config(draft_vocab_size=10)
    drafter, target = random_drafter(config, generator, torch.float32)
    row = pack([document(generator, 40, config, share=1.0)], torch.float32)
    row.loss_mask[:] = 1
    top = top_logits(row.final, target.head, 3)
    row = replace(row, top=top)
    teacher = Teacher(target, drafter.draft_ids)
    work = plan_work(row, teacher, 2, LossConfig(out_of_vocab="renormalise"))
    something = torch.isin(top.ids, drafter.draft_ids.int()).any(1)
    for j in range(2):
        slots = torch.arange(40 - 2 - j)
        assert work.plan.scored_slots(j).tolist() == slots[something[slots + 1 + j]].tolist()
    assert 0 < int(something.sum()) < 40
    nothing = replace(row, top=TopLogits.nothing(40, 3))
    assert plan_work(nothing, teacher, 2, LossConfig(out_of_vocab="renormalise")).scored() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hit_is_the_token_that_an_engine_would_propose(dtype: torch.dtype) -> None:
    """In bfloat16 the largest logits are often equal, and an engine takes one of them."""
    generator = torch.Generator().manual_seed(0)
    config = small_config(vocab_size=4000, draft_vocab_size=4000)
    drafter, target = random_drafter(config, generator, torch.float32)
    with torch.no_grad():
        drafter.lm_head.weight.mul_(0.01).add_(1.0)  # rows so alike that rounding makes their logits equal
    row = pack([document(generator, 200, config, share=1.0)], torch.float32)
    row.loss_mask[:] = 1
    teacher, loss = Teacher(target.to("cpu", dtype), drafter.draft_ids), LossConfig()
    work = plan_work(row, teacher, 1, loss)
    with torch.no_grad():
        _, tally = batch_loss(drafter, row, work, teacher, [1.0], loss, dtype)
        (states,) = drafter(row, work.plan, teacher.embedding, dtype)
        proposed = (states @ drafter.lm_head.weight.to(dtype).T).argmax(-1)
        wanted = (row.final[work.plan.scored_slots(0) + 1].to(dtype) @ teacher.draft_head.T).argmax(-1)
    assert int(tally.hits[0]) == int((proposed == wanted).sum())
