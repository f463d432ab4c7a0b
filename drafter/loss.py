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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafter.product import backward_product
from drafter.values import refuse_values

LossKind = Literal["soft_ce", "kl", "lk"]
OutOfVocab = Literal["drop", "renormalise"]

# The draft's logits are made in units of log 2: the CPU's exp2 takes half the time of its softmax.
_LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class LossConfig:
    """kind: see above. decay: weight of step j is decay^j. out_of_vocab: what becomes of positions whose teacher
    arg-max is outside the draft vocabulary: `drop` leaves them out of the loss, `renormalise` trains on the teacher's
    distribution within the draft vocabulary. chunk_rows: positions whose logits exist at once."""

    kind: LossKind = "soft_ce"
    decay: float = 0.8
    out_of_vocab: OutOfVocab = "drop"
    chunk_rows: int = 1_792

    def __post_init__(self) -> None:
        refuse_values(
            "train.loss", self,
            kind=self.kind in get_args(LossKind), decay=0 < self.decay <= 1,
            out_of_vocab=self.out_of_vocab in get_args(OutOfVocab), chunk_rows=self.chunk_rows >= 1,
        )  # fmt: skip

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


@dataclass(frozen=True)
class TeacherLogits:
    """What T tokens teach, known by its k largest logits only: `logits` [T, k] at `ids` [T, k] of the draft vocabulary,
    D for an id that is not in it. All other tokens have no chance."""

    ids: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def dense(self, first: int, last: int, width: int) -> Tensor:
        """[last - first, D] of teachers first..last-1. Other logits are low, not infinite: 0 x log 0 is NaN."""
        logits = self.logits[first:last]
        out = logits.new_full((last - first, width + 1), -1e4)
        return out.scatter_(1, self.ids[first:last], logits)[:, :width]


def head_loss(
    rows: Sequence[Tensor],
    head: Tensor,
    teacher_states: Tensor | TeacherLogits,
    teacher_head: Tensor,
    weights: Sequence[float],
    teacher_of: Sequence[Tensor],
    kind: LossKind,
    chunk_rows: int,
) -> HeadOutput:
    """Loss of draft states against the teacher's distribution.

    Args:
        rows: per step, normed draft states [R_j, H].
        head: [D, H], the draft head.
        teacher_states: [T, H], final states of the distinct tokens that teach, ascending; or their largest logits.
        teacher_head: [D, H], the target head's rows of the draft vocabulary.
        weights: per step, the weight of one row's loss.
        teacher_of: per step, which of the T teaches a row [R_j]; ascending.
    """
    out = _HeadLoss.apply(
        torch.cat(list(rows)), head, teacher_states, teacher_head, tuple(weights), tuple(teacher_of), kind, chunk_rows
    )
    return HeadOutput(*out)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        head: Tensor,
        teacher_states: Tensor | TeacherLogits,
        teacher_head: Tensor,
        weights: tuple[float, ...],
        teacher_of: tuple[Tensor, ...],
        kind: LossKind,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        sizes = [len(t) for t in teacher_of]
        weight = torch.cat([rows.new_full((n,), w, dtype=wide) for n, w in zip(sizes, weights, strict=True)])
        wants_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        per_row, entropy = torch.empty_like(weight), torch.empty_like(weight)
        hit = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        grad_rows = torch.empty_like(rows) if wants_grad else None
        grad_head: Tensor | None = None
        most = max(1, chunk_rows // len(sizes))
        chunks = max(1, math.ceil(len(teacher_states) / most))
        teachers = max(1, math.ceil(len(teacher_states) / chunks))  # even: no small rest
        # Buffers for all chunks: fresh memory of this size costs as much, by its page faults, as a pass over it.
        room, width = min(teachers * len(sizes), len(rows)), len(head)
        narrow = rows.new_empty(room, width)
        wide_logits = narrow if rows.dtype == wide else narrow.new_empty(room, width, dtype=wide)
        p_of = narrow.new_empty(min(teachers, len(teacher_states)), width, dtype=wide)
        scratch = torch.empty_like(p_of)
        for first in range(0, len(teacher_states), teachers):
            last = min(first + teachers, len(teacher_states))
            teacher, p = scratch[: last - first], p_of[: last - first]
            if isinstance(teacher_states, TeacherLogits):
                teacher.copy_(teacher_states.dense(first, last, width))
            else:
                _product(teacher_states[first:last], teacher_head, teacher)
            top, best = teacher.max(-1)
            torch.softmax(teacher, -1, out=p)
            entropy_of = _log_sum(top, p) - teacher.mul_(p).sum(-1)
            pieces = _pieces(teacher_of, first, last)
            x = torch.cat([rows[piece] for piece, _ in pieces])
            logits = _product(x, head, wide_logits[: len(x)], narrow[: len(x)], _LOG2_E)
            scale, begin = weight.new_empty(len(x), 1), 0
            for piece, local in pieces:
                part = slice(begin, begin := begin + piece.stop - piece.start)
                entropy[piece] = entropy_of[local]
                per_row[piece], hit[piece], share = _loss_and_gradient(
                    logits[part], p[local], best[local], kind, scratch, rounded=rows.dtype != wide
                )
                torch.mul(share, weight[piece, None], out=scale[part])
            if kind == "kl":
                for piece, _ in pieces:
                    per_row[piece] -= entropy[piece]
            if grad_rows is not None:  # `logits` are their own gradients by now, up to `scale`
                grad = logits if rows.dtype == wide else narrow[: len(x)].copy_(logits)
                x.mul_(scale)
                grad_head = grad.T @ x if grad_head is None else grad_head.addmm_(grad.T, x)
                grad_x, begin = backward_product(grad, head).mul_(scale), 0
                for piece, _ in pieces:
                    grad_rows[piece] = grad_x[begin : (begin := begin + piece.stop - piece.start)]
        ctx.save_for_backward(grad_rows, grad_head)
        ctx.mark_non_differentiable(per_row, entropy, hit)
        return torch.dot(per_row, weight), per_row, entropy, hit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows, grad_head = ctx.saved_tensors
        if bool(grad != 1):
            grad_rows, grad_head = grad_rows * grad, grad_head * grad
        return (grad_rows, grad_head, *(None,) * 6)


def _pieces(teacher_of: Sequence[Tensor], first: int, last: int) -> list[tuple[slice, slice | Tensor]]:
    """Per step, the rows (of all steps' one after the other) that teachers first..last-1 teach, and which of these
    teachers does: a slice where they are consecutive, as nearly always, so that no distribution is copied."""
    pieces: list[tuple[slice, slice | Tensor]] = []
    offset = 0
    for taught in teacher_of:
        bounds = torch.tensor([first, last], device=taught.device)
        begin, end = torch.searchsorted(taught, bounds).tolist()
        if begin < end:
            low, high = int(taught[begin]), int(taught[end - 1]) + 1
            consecutive = high - low == end - begin
            local = slice(low - first, high - first) if consecutive else taught[begin:end] - first
            pieces.append((slice(offset + begin, offset + end), local))
        offset += len(taught)
    return pieces


def _product(x: Tensor, head: Tensor, out: Tensor, narrow: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """scale * x @ head.T into `out`, which may be of a wider dtype; `narrow`: room for it in the dtype of x."""
    if x.dtype == out.dtype:
        return torch.addmm(out, x, head.T, beta=0, alpha=scale, out=out)
    narrow = x.new_empty(out.shape) if narrow is None else narrow
    return out.copy_(torch.addmm(narrow, x, head.T, beta=0, alpha=scale, out=narrow))


def _log_sum(top: Tensor, share: Tensor) -> Tensor:
    """log sum exp of logits, from the largest of them and of their softmax, which is 1 / sum of exp(logit - top)."""
    return top - share.amax(-1).log_()


def _loss_and_gradient(
    logits: Tensor, p: Tensor, best: Tensor, kind: LossKind, scratch: Tensor, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each row [R], whether its largest logit is the teacher's best token [R], and a factor [R, 1]: times it,
    what stands in `logits` [R, D] afterwards is the loss's gradient with respect to the logits. (A factor of a row
    costs nothing on the row's H states, and a pass on its D logits.)

    Args:
        logits: in units of log 2; overwritten.
        scratch: [>= R, D], overwritten.
        rounded: the logits come from a narrower dtype, in which many are equal: an engine proposes one of these.
    """
    top = logits.amax(-1, keepdim=True)
    hit = logits.argmax(-1) == best if rounded else logits.gather(-1, best[:, None])[:, 0] >= top[:, 0]
    scratch = scratch[: len(logits)]
    along = torch.mul(p, logits, out=scratch).sum(-1, keepdim=True) if kind != "lk" else None
    q = logits.sub_(top).exp2_()  # times its sum
    total = q.sum(-1, keepdim=True)
    if along is not None:
        loss = (top + total.log2() - along).div_(_LOG2_E)
        q.addcmul_(p, total, value=-1)
        return loss[:, 0], hit, total.reciprocal_()
    q.div_(total)
    accept = torch.minimum(p, q, out=scratch).sum(-1, keepdim=True).clamp_min_(torch.finfo(p.dtype).tiny)
    short = (q < p) * q  # where more of q is more acceptance
    q.mul_(short.sum(-1, keepdim=True)).sub_(short).div_(accept)  # not by the factor: both may be tiny
    return accept.log()[:, 0].neg_(), hit, torch.ones_like(accept)
