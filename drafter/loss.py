"""The loss of the draft head, its gradient in the same pass, and what the metrics need from it.

With teacher distribution p over the draft vocabulary (D entries) and draft distribution q, per counted position:

    soft_ce   -sum p log q                     forward KL plus the teacher's entropy: the same gradient (EAGLE-3)
    kl        sum p (log p - log q)            zero when the drafter equals the teacher
    lk        -log sum min(p, q)               minus the log of the chance that a sampled draft token is accepted
                                               (Leviathan et al. 2023; as a loss: "LK Losses", arXiv 2602.23881)

total = sum over steps j of decay^j * (sum over positions of the loss) / (counted positions at step j). The divisor is
counted over everything one optimiser step sees, all micro-batches and ranks: padding, packing and accumulation do not
change it.

Logits exist for a chunk of positions at a time. The gradient with respect to them is formed in the forward pass, as the
softmax is at hand there, and leaves as the gradients of the rows and of the head: [R, H] and [D, H].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LossKind = Literal["soft_ce", "kl", "lk"]
OutOfVocab = Literal["drop", "renormalise"]


@dataclass(frozen=True)
class LossConfig:
    """kind: see above. decay: weight of step j is decay^j. out_of_vocab: what becomes of positions whose teacher
    arg-max is outside the draft vocabulary: `drop` leaves them out of the loss, `renormalise` trains on the teacher's
    distribution within the draft vocabulary. chunk_rows: positions whose logits exist at once."""

    kind: LossKind = "soft_ce"
    decay: float = 0.8
    out_of_vocab: OutOfVocab = "drop"
    chunk_rows: int = 512

    def step_weights(self, counts: Sequence[int]) -> list[float]:
        """What one position's loss weighs at each step; `counts` are the positions with a loss over the whole step."""
        return [self.decay**j / max(1, n) for j, n in enumerate(counts)]


@dataclass
class HeadOutput:
    """loss: the weighted sum, differentiable. per_row, entropy, hit: per row given, detached: the unweighted loss, the
    teacher's entropy within the draft vocabulary (nats), and whether both have the same arg-max."""

    loss: Tensor
    per_row: Tensor
    entropy: Tensor
    hit: Tensor


def head_loss(
    rows: Tensor, head: Tensor, teacher_states: Tensor, teacher_head: Tensor, weights: Tensor, teacher_of: Tensor,
    kind: LossKind, chunk_rows: int,
) -> HeadOutput:  # fmt: skip
    """Loss of draft states against the teacher's distribution.

    Args:
        rows: [R, H], normed draft states, every step's one after the other.
        head: [D, H], the draft head.
        teacher_states: [T, H], final states of the distinct tokens that teach, ascending.
        teacher_head: [D, H], the target head's rows of the draft vocabulary.
        weights: [R], the weight of each row's loss.
        teacher_of: [R], which of the T teaches a row.
    """
    out = _HeadLoss.apply(rows, head, teacher_states, teacher_head, weights, teacher_of, kind, chunk_rows)
    return HeadOutput(*out)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, head: Tensor, teacher_states: Tensor, teacher_head: Tensor, weights: Tensor,
        teacher_of: Tensor, kind: LossKind, chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        wants_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        per_row, entropy = weights.new_empty(len(rows)), weights.new_empty(len(rows))
        hit = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        grad_rows = torch.empty_like(rows) if wants_grad else None
        grad_head: Tensor | None = None
        # Rows by their teacher's token: a teacher's distribution is made once and serves its slots of all steps.
        order = teacher_of.argsort(stable=True)
        for part in order.split(chunk_rows):
            begin, end = int(teacher_of[part[0]]), int(teacher_of[part[-1]]) + 1
            teacher = (teacher_states[begin:end] @ teacher_head.T).to(weights.dtype)
            best = teacher.argmax(-1)
            log_p = torch.log_softmax(teacher, -1)
            p = log_p.exp()
            h_teacher = torch.linalg.vecdot(p, log_p).neg_()
            local = teacher_of[part] - begin
            x = rows[part]
            logits = (x @ head.T).to(weights.dtype)
            top = logits.amax(-1)
            hit[part] = logits.gather(-1, best[local][:, None])[:, 0] >= top
            entropy[part] = h_teacher[local]
            p = p[local]
            log_q = torch.log_softmax(logits, -1)
            if kind == "lk":
                loss, grad = _lk(p, log_q, wants_grad)
            else:
                loss = torch.linalg.vecdot(p, log_q).neg_()
                grad = log_q.exp_().sub_(p) if wants_grad else None
                if kind == "kl":
                    loss = loss - entropy[part]
            per_row[part] = loss
            if grad is not None and grad_rows is not None:
                grad = grad.to(rows.dtype)
                weight = weights[part, None].to(rows.dtype)
                grad_rows[part] = (grad @ head).mul_(weight)
                if grad_head is None:
                    grad_head = grad.T @ (x * weight)
                else:
                    grad_head.addmm_(grad.T, x * weight)
        ctx.save_for_backward(grad_rows, grad_head)
        ctx.mark_non_differentiable(per_row, entropy, hit)
        return torch.dot(per_row, weights), per_row, entropy, hit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows, grad_head = ctx.saved_tensors
        if grad_rows is None:
            return (None,) * 8
        if bool(grad != 1):
            grad_rows = grad_rows * grad
            grad_head = None if grad_head is None else grad_head * grad
        return (grad_rows, grad_head, *(None,) * 6)


def _lk(p: Tensor, log_q: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
    """-log of the acceptance sum min(p, q), and its gradient with respect to the logits."""
    q = log_q.exp()
    accept = torch.minimum(p, q).sum(-1, keepdim=True).clamp_min_(torch.finfo(p.dtype).tiny)
    if not wants_grad:
        return accept.log()[:, 0].neg_(), None
    short = (q < p) * q  # where more of q is more acceptance
    grad = (q * short.sum(-1, keepdim=True) - short) / accept
    return accept.log()[:, 0].neg_(), grad
