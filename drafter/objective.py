"""From a packed row to a loss: which slots, which teacher, which weights, and the tally of what came out."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.acceptance import Tally, tally_batch
from drafter.batch import Batch
from drafter.loss import LossConfig, TeacherLogits, head_loss
from drafter.model import Eagle3Drafter, TargetWeights
from drafter.slots import SlotPlan, counted_slots, plan_slots, seen_token
from hidden_states.top_k import TopLogits

_ARGMAX_ROWS = 128  # rows of full-vocabulary logits at once


class Teacher:
    """The target's distribution over the draft vocabulary, and whether its arg-max lies within.

    The arg-max needs the head over the whole vocabulary, the dearest product of all; it depends on the sample alone, so
    it is kept per sample (a byte a token, up to `cache_tokens`) and costs nothing from the second epoch on.
    """

    def __init__(self, target: TargetWeights, draft_ids: Tensor, cache_tokens: int = 64_000_000) -> None:
        self.embedding, self.head = target.embedding, target.head
        self.draft_head = target.head[draft_ids.to(target.head.device)].contiguous()  # [D, H]
        self.holds = torch.zeros(len(target.head), dtype=torch.bool, device=target.head.device)  # [V]
        self.holds[draft_ids] = True
        self.draft_of = torch.full((len(target.head),), len(draft_ids), device=target.head.device)  # [V], D = none
        self.draft_of[draft_ids] = torch.arange(len(draft_ids), device=target.head.device)
        self._room = cache_tokens
        self._known: dict[str, Tensor] = {}

    @torch.no_grad()
    def in_vocab(self, batch: Batch, needed: Tensor) -> Tensor:
        """bool [N]: is the teacher's arg-max at this token in the draft vocabulary; only said where `needed` [N]."""
        out = torch.zeros_like(needed)
        lengths = torch.bincount(batch.doc_ids.long()).tolist()
        ask = needed.clone()
        begin = 0
        for sample, length in zip(batch.sample_ids, lengths, strict=True):
            known = self._known.get(sample)
            if known is not None and len(known) == length:
                out[begin : begin + length] = known.to(out.device)
                ask[begin : begin + length] = False
            begin += length
        where = ask.nonzero()[:, 0]
        if not len(where):
            return out
        for part in where.split(_ARGMAX_ROWS):
            top = top_of(batch)
            best = (batch.final[part].to(self.head.dtype) @ self.head.T).argmax(-1) if top is None else top.ids[part, 0]
            out[part] = self.holds[best]
        begin = 0
        for sample, length in zip(batch.sample_ids, lengths, strict=True):
            if sample not in self._known and self._room >= length:
                self._known[sample] = out[begin : begin + length].cpu()
                self._room -= length
            begin += length
        return out

    def teaching(self, batch: Batch, tokens: Tensor, dtype: torch.dtype) -> Tensor | TeacherLogits:
        """What these tokens [T] teach: their final states, or the largest logits where the dataset keeps those."""
        top = top_of(batch)
        if top is None:
            return batch.final[tokens].to(dtype)
        return TeacherLogits(self.draft_of[top.ids[tokens].long()], top.logits[tokens].float())


def placed(batch: Batch, device: torch.device) -> Batch:
    """The row with its tensors on a device; itself when they are there."""
    if batch.input_ids.device == device:
        return batch
    there: dict[str, Any] = {
        name: value.to(device, non_blocking=True) for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    if (top := top_of(batch)) is not None:
        there["top"] = TopLogits(top.ids.to(device), top.logits.to(device))
    moved = copy.copy(batch)
    vars(moved).update(there)
    return moved


def top_of(batch: Batch) -> TopLogits | None:
    """A row's largest teacher logits, where it has them in place of final states; most rows do not know the word."""
    return getattr(batch, "top", None)


@dataclass(frozen=True)
class Work:
    """What one packed row asks for: counted, in_vocab bool [K, N]; the plan of the slots that have a loss."""

    counted: Tensor
    in_vocab: Tensor
    plan: SlotPlan

    def scored(self) -> list[int]:
        """Positions with a loss, per step [K]."""
        counts = [len(self.plan.scored_slots(j)) for j in range(self.plan.steps)]
        return counts + [0] * (self.counted.shape[0] - self.plan.steps)


def plan_work(batch: Batch, teacher: Teacher, steps: int, loss: LossConfig) -> Work:
    """Counts and plans a packed row, before anything differentiable happens."""
    counted = counted_slots(batch.loss_mask, batch.doc_ids, steps)
    return work_for(counted, batch, teacher, loss)


def work_for(counted: Tensor, batch: Batch, teacher: Teacher, loss: LossConfig) -> Work:
    """The same for counted slots [K, N] given from outside (another trainer's rule, in a comparison)."""
    steps, n = counted.shape
    teaches = torch.zeros(n + steps + 1, dtype=torch.bool, device=counted.device)
    slots = torch.arange(n, device=counted.device)
    for j in range(steps):
        teaches[seen_token(slots, j)] |= counted[j]
    known = torch.zeros_like(teaches)
    known[:n] = teacher.in_vocab(batch, teaches[:n])
    in_vocab = torch.stack([known[seen_token(slots, j)] for j in range(steps)])
    used = counted & in_vocab if loss.out_of_vocab == "drop" else counted
    if (top := top_of(batch)) is not None:
        # Where none of the largest logits is in the draft vocabulary, nothing is known of the distribution within it.
        known[:n] = (teacher.holds[top.ids.long()] & (top.ids >= 0)).any(1)
        used = used & torch.stack([known[seen_token(slots, j)] for j in range(steps)])
    return Work(counted, in_vocab, plan_slots(used, batch.doc_ids))


def batch_loss(
    drafter: Eagle3Drafter, batch: Batch, work: Work, teacher: Teacher, step_weights: Sequence[float], loss: LossConfig,
    dtype: torch.dtype = torch.float32, recompute: bool = False,
) -> tuple[Tensor, Tally]:  # fmt: skip
    """Weighted loss of one packed row (a scalar, differentiable) and its tally.

    Args:
        step_weights: what one position weighs at each step [K], from `LossConfig.step_weights` over everything that
            one optimiser step sees.
        dtype: of the matrix products.
        recompute: see `Eagle3Drafter.unroll`.
    """
    plan = work.plan
    wide = torch.promote_types(dtype, torch.float32)
    learn = batch.loss_mask.bool()
    learned, covered = learn.sum(), teacher.holds[batch.input_ids[learn]].sum()
    if not plan.steps:
        nothing = torch.zeros((), dtype=wide, device=learn.device)
        return nothing, tally_batch(work.counted, work.in_vocab, plan, [], learned, covered)
    rows = drafter(batch, plan, teacher.embedding, dtype, recompute)
    taught_by = [seen_token(plan.scored_slots(j), j) for j in range(plan.steps)]
    teaching, teacher_of = torch.cat(taught_by).unique(sorted=True, return_inverse=True)
    sizes = [len(r) for r in rows]
    out = head_loss(
        rows, drafter.lm_head.weight.to(dtype), teacher.teaching(batch, teaching, dtype), teacher.draft_head.to(dtype),
        step_weights[: plan.steps], teacher_of.split(sizes), loss.kind, loss.chunk_rows,
    )  # fmt: skip
    per_step = list(zip(out.per_row.split(sizes), out.entropy.split(sizes), out.hit.split(sizes), strict=True))
    return out.loss, tally_batch(work.counted, work.in_vocab, plan, per_step, learned, covered)
