"""Which slot predicts which token, which slots count, and which must be computed at all. The only place that shifts.

Everything is stored unshifted. Slot i joins the captured states of token i with the embedding of token i+1 and predicts
token i+2; its teacher is lm_head(final) at token i+1. At step j of training-time test the same slot sees token i+1+j,
predicts token i+2+j, and its teacher sits on token i+1+j:

    slot i, step 0     states h_i                embedding x_{i+1}      teacher final_{i+1}      predicts x_{i+2}
    slot i, step j     its own output, step j-1  embedding x_{i+1+j}    teacher final_{i+1+j}    predicts x_{i+2+j}

A slot counts at step j when both x_{i+1+j} and x_{i+2+j} are tokens to learn, in the slot's own document. The first
token of a reply is never predicted: in serving the target emits it itself, and the drafter starts from it. Two turns,
`.` prompt, `#` to learn:

    token      0 1 2 3 4 5 6 7 8 9
    to learn   . . # # # . . # # #
    step 0     . # # . . . # # . .     slot 1 predicts token 3, slot 2 token 4; slot 6 token 8, slot 7 token 9
    step 1     # # . . . # # . . .     one to the left
    step 2     # . . . # # . . . .

Symptom of a wrong shift: the loss falls as usual, served acceptance stays near 1 at every step after the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def seen_token(slot: Tensor, step: int) -> Tensor:
    """The token whose embedding a slot sees at a step, which is also the token its teacher sits on."""
    return slot + 1 + step


def counted_slots(loss_mask: Tensor, doc_ids: Tensor, steps: int) -> Tensor:
    """bool [K, N]: does slot i count at step j. `loss_mask` [N], 1 = token to learn; `doc_ids` [N], contiguous."""
    n = len(loss_mask)
    learn = loss_mask.bool()
    counted = torch.zeros(steps, n, dtype=torch.bool, device=loss_mask.device)
    for j in range(min(steps, n - 2)):
        last = n - 2 - j  # slots that have a token to predict in this row of documents
        counted[j, :last] = learn[1 + j : -1] & learn[2 + j :] & (doc_ids[:last] == doc_ids[2 + j :])
    return counted


_BLOCK_SCORES = 1 << 20  # most scores of one attention block and head


@dataclass(frozen=True)
class SlotPlan:
    """What one packed row of documents must compute, and nothing else (exact, see `plan_slots`).

    context: slots that need a step-0 key and value, ascending; [C].
    rows: per step, the slots computed there; ascending, each a subset of the one before.
    keep: per step j >= 1, where rows[j] lies in rows[j-1]; None when nothing fell away.
    scored: per step, which of rows[j] have a loss; None for all of them.
    blocks: per step, (first query, one past the last, first key, one past the last) of the attention, in rows of
        `rows[j]` and of `context`: queries of one document, and the keys up to the last query's own.
    context_of: per step, the place of each of rows[j] in `context`.
    """

    context: Tensor
    rows: tuple[Tensor, ...]
    keep: tuple[Tensor | None, ...]
    scored: tuple[Tensor | None, ...]
    blocks: tuple[tuple[tuple[int, int, int, int], ...], ...]
    context_of: tuple[Tensor, ...]

    @property
    def steps(self) -> int:
        """Steps with at least one slot to compute."""
        return len(self.rows)

    def scored_slots(self, step: int) -> Tensor:
        """The slots that have a loss at a step."""
        rows, scored = self.rows[step], self.scored[step]
        return rows if scored is None else rows[scored]


def plan_slots(used: Tensor, doc_ids: Tensor, query_block: int = 128) -> SlotPlan:
    """Plans the slots of one row. `used` bool [K, N]: the slots with a loss at each step.

    Slot i at step j depends only on its own earlier steps and on the step-0 keys and values of slots <= i of its
    document. So a slot is computed at step j only when it has a loss at some step >= j, and a slot without any loss
    needs its step-0 key and value only if a later slot of its document has one.
    """
    steps = used.shape[0]
    needed = used.flip(0).cummax(0).values.flip(0)  # [K, N]: a loss at this step or a later one
    while steps and not bool(needed[steps - 1].any()):
        steps -= 1
    every = torch.arange(used.shape[1], device=used.device)
    if not steps:
        empty = every[:0]
        return SlotPlan(empty, (), (), (), (), ())
    last_of_doc = torch.full((int(doc_ids.max()) + 1,), -1, device=used.device)
    first = needed[0].nonzero()[:, 0]
    last_of_doc.scatter_reduce_(0, doc_ids[first].long(), first, "amax")
    context = (every <= last_of_doc[doc_ids.long()]).nonzero()[:, 0]
    place = torch.full_like(every, -1)
    place[context] = torch.arange(len(context), device=used.device)
    rows = tuple(needed[j].nonzero()[:, 0] for j in range(steps))
    keep: list[Tensor | None] = [None]
    for j in range(1, steps):
        stays = needed[j][rows[j - 1]]
        keep.append(None if bool(stays.all()) else stays.nonzero()[:, 0])
    scored = []
    for j in range(steps):
        here = used[j][rows[j]]
        scored.append(None if bool(here.all()) else here.nonzero()[:, 0])
    context_of = tuple(place[r] for r in rows)
    start_of_doc = _document_starts(doc_ids[context])
    blocks = tuple(
        _query_blocks(doc_ids[r].tolist(), c.tolist(), start_of_doc, query_block)
        for r, c in zip(rows, context_of, strict=True)
    )
    return SlotPlan(context, rows, tuple(keep), tuple(scored), blocks, context_of)


def _document_starts(doc_ids: Tensor) -> dict[int, int]:
    """First row of every document."""
    new = torch.ones_like(doc_ids, dtype=torch.bool)
    new[1:] = doc_ids[1:] != doc_ids[:-1]
    starts = new.nonzero()[:, 0]
    return dict(zip(doc_ids[starts].tolist(), starts.tolist(), strict=True))


def _query_blocks(
    docs: Sequence[int], places: Sequence[int], start_of_doc: dict[int, int], size: int
) -> tuple[tuple[int, int, int, int], ...]:
    """Cuts the queries into blocks of one document and at most `size` rows; fewer where the keys are many, so that a
    block's scores stay small at any length."""
    blocks, begin = [], 0
    for end in range(1, len(docs) + 1):
        keys = places[end - 1] + 1 - start_of_doc[docs[begin]]
        full = end - begin >= max(1, min(size, _BLOCK_SCORES // keys))
        if end == len(docs) or docs[end] != docs[begin] or full:
            blocks.append((begin, end, start_of_doc[docs[begin]], places[end - 1] + 1))
            begin = end
    return tuple(blocks)
