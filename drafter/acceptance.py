"""What training says about acceptance: tallies that add up over batches and ranks, and the figures made from them."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from drafter.slots import SlotPlan


@dataclass
class Tally:
    """Sums over positions, per step [K] (float64); the last two are single sums. Add them, then make `figures`."""

    counted: Tensor  # positions that count
    scored: Tensor  # of these, with a loss
    in_vocab: Tensor  # of these, whose teacher arg-max the draft vocabulary holds
    hits: Tensor  # of these, where the drafter's arg-max is the teacher's
    reached: Tensor  # slots counted at every step up to here, all earlier steps hits
    accepted: Tensor  # of these, hits here too
    verifications: Tensor  # of a server that drafts this many tokens at a time (1 to K), replayed over the replies
    replayed: Tensor  # drafted tokens these accept
    loss: Tensor
    entropy: Tensor
    learned: Tensor  # [] tokens to learn
    covered: Tensor  # [] of these, in the draft vocabulary

    @classmethod
    def zeros(cls, steps: int) -> "Tally":
        """An empty tally of K steps."""
        sizes = {"learned": (), "covered": ()}
        return cls(**{f.name: torch.zeros(sizes.get(f.name, (steps,)), dtype=torch.float64) for f in fields(cls)})

    def add(self, other: "Tally") -> None:
        """Adds another tally of as many steps."""
        for field in fields(self):
            getattr(self, field.name).add_(getattr(other, field.name))

    def flat(self) -> Tensor:
        """All sums in one vector, for an all-reduce."""
        return torch.cat([getattr(self, f.name).reshape(-1) for f in fields(self)])

    def load_flat(self, values: Tensor) -> None:
        """Takes back what `flat` gave, reduced."""
        begin = 0
        for field in fields(self):
            part: Tensor = getattr(self, field.name)
            part.copy_(values[begin : begin + part.numel()].reshape(part.shape))
            begin += part.numel()

    def figures(self, decay: float) -> "Figures":
        """The figures these sums stand for."""

        def share(part: Tensor, whole: Tensor) -> list[float]:
            return [p / w if w else 0.0 for p, w in zip(part.tolist(), whole.tolist(), strict=True)]

        loss = share(self.loss, self.scored)
        conditional = share(self.accepted, self.reached)
        return Figures(
            loss=sum(decay**j * x for j, x in enumerate(loss)),
            loss_per_step=loss,
            top1=share(self.hits, self.counted),
            top1_in_vocab=share(self.hits, self.in_vocab),
            conditional_acceptance=conditional,
            acceptance_length=simulated_acceptance_length(conditional),
            replayed_acceptance_length=[1.0 + x for x in share(self.replayed, self.verifications)],
            teacher_in_vocab=share(self.in_vocab, self.counted)[0],
            coverage=float(self.covered / self.learned) if self.learned else 0.0,
            teacher_entropy=share(self.entropy, self.scored)[0],
            positions=int(self.counted[0]),
        )


@dataclass(frozen=True)
class Figures:
    """loss: sum of decay^j x the mean at step j. top1: over all counted positions, a teacher arg-max outside the draft
    vocabulary is a miss; top1_in_vocab: over the others. conditional_acceptance: hits where all earlier steps hit.
    acceptance_length: simulated, tokens per verification (1 = the drafter never helps). replayed_acceptance_length: of
    a server that drafts 1, 2, ... K tokens at a time and verifies only where the last leap ended: what it would measure
    on replies that the target wrote itself, greedily. teacher_in_vocab: share of counted positions whose teacher
    arg-max the draft vocabulary holds. coverage: share of tokens to learn it holds.
    teacher_entropy: nats, at step 0, within the draft vocabulary. positions: counted at step 0."""

    loss: float
    loss_per_step: list[float]
    top1: list[float]
    top1_in_vocab: list[float]
    conditional_acceptance: list[float]
    acceptance_length: float
    replayed_acceptance_length: list[float]
    teacher_in_vocab: float
    coverage: float
    teacher_entropy: float
    positions: int

    def flat(self) -> dict[str, float]:
        """Names and numbers for a metrics store: lists become `top1_0`, `top1_1`, ..."""
        out: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, list):
                out.update({f"{name}_{j}": x for j, x in enumerate(value)})
            else:
                out[name] = float(value)
        return out


def simulated_acceptance_length(conditional: list[float]) -> float:
    """1 + sum over k of the product of the first k conditional acceptances: the token the target adds itself, and as
    many of the chain as survive."""
    length, alive = 1.0, 1.0
    for share in conditional:
        alive *= share
        length += alive
    return length


def tally_batch(
    counted: Tensor, in_vocab: Tensor, plan: SlotPlan, per_step: list[Any], learned: Tensor, covered: Tensor
) -> Tally:
    """The tally of one packed row.

    Args:
        counted, in_vocab: bool [K, N], by slot.
        plan: what was computed.
        per_step: (loss, entropy, hit) of the scored slots of each computed step.
        learned, covered: counts of tokens to learn, and of those in the draft vocabulary.
    """
    steps = counted.shape[0]
    tally = Tally.zeros(steps)
    tally.learned += learned.cpu()
    tally.covered += covered.cpu()
    hits = torch.zeros_like(counted)
    for j, (loss, entropy, hit) in enumerate(per_step):
        slots = plan.scored_slots(j)
        hits[j, slots] = hit
        tally.scored[j] += len(slots)
        tally.loss[j] += float(loss.double().sum())
        tally.entropy[j] += float(entropy.double().sum())
    here = counted & in_vocab
    hits &= here
    unbroken = counted.cummin(0).values  # counted at every step up to this one
    alive = hits.cummin(0).values & unbroken
    reached = unbroken.clone()
    reached[1:] &= alive[:-1]
    tally.counted += counted.sum(1).cpu()
    tally.in_vocab += here.sum(1).cpu()
    tally.hits += hits.sum(1).cpu()
    tally.reached += reached.sum(1).cpu()
    tally.accepted += alive.sum(1).cpu()
    for limit, (verifications, accepted) in enumerate(replay(counted[0], alive)):
        tally.verifications[limit] += verifications
        tally.replayed[limit] += accepted
    return tally


def replay(begins: Tensor, alive: Tensor) -> list[tuple[int, int]]:
    """Verifications and accepted tokens of a server that drafts 1, 2, ... K tokens, over whole replies.

    A verification at a slot accepts the tokens drafted there up to the first miss and adds one of the target's own; the
    next is as many slots further on. Averages over *all* slots are higher: easy stretches are passed in one leap.

    Args:
        begins: bool [N], slots a verification may be at; each run of them is one reply.
        alive: bool [K, N], hit at this step and all earlier ones.
    """
    can_begin, runs = begins.tolist(), alive.sum(0).tolist()
    out = []
    for limit in range(1, len(alive) + 1):
        verifications = accepted = slot = 0
        while slot < len(runs):
            if not can_begin[slot]:
                slot += 1
                continue
            leap = min(runs[slot], limit)
            verifications, accepted = verifications + 1, accepted + leap
            slot += leap + 1  # replies lie two slots or more apart: this never passes over the next one's first
        out.append((verifications, accepted))
    return out
