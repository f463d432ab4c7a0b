"""What the drafter would propose after a text: the same greedy chain a serving engine runs with top-k 1."""

import torch
from torch import Tensor

from drafter.batch import Row
from drafter.model import Eagle3Drafter
from drafter.slots import plan_slots


@torch.no_grad()
def propose(drafter: Eagle3Drafter, ids: Tensor, aux: Tensor, embedding: Tensor, steps: int) -> list[int]:
    """The `steps` target ids the drafter proposes to follow `ids`.

    Args:
        ids: [S] the committed tokens; the last one is the target's own newest, whose states do not exist yet.
        aux: [S - 1, A, H] captured states of the tokens before it.
        embedding: [V, H], the target's.
    """
    slot, drafted = len(ids) - 2, []
    draft_ids = drafter.draft_ids
    for step in range(steps):
        n = len(ids)
        used = torch.zeros(step + 1, n, dtype=torch.bool)
        used[step, slot] = True  # the one slot that drafts; earlier ones give their step-0 keys and values
        states = torch.cat([aux, aux.new_zeros(n - len(aux), *aux.shape[1:])])
        where = torch.arange(n)
        text = Row(ids, used[0], states, states[:, 0], torch.zeros_like(where), where, ["text"])
        *_, newest = drafter.unroll(text, plan_slots(used, text.doc_ids), embedding, embedding.dtype)
        logits = newest @ drafter.lm_head.weight.to(embedding.dtype).T
        drafted.append(int(draft_ids[logits[0].argmax()]))
        ids = torch.cat([ids, ids.new_tensor(drafted[-1:])])
    return drafted
