"""Run by a test under torchrun: one rank's share of four trainings. Writes what it saw and the first rank's weights.

torchrun --nproc-per-node 2 -m tests.drafter.two_ranks OUT_FOLDER

whole      six steps from the start
second     goes on from step 2, saved by one rank
first      stops after step 3, for one rank to go on
epochs     two epochs, its rate falling with them
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from drafter.course import StepMetrics, TrainConfig
from drafter.ranks import leave, whole_weights
from drafter.trainer import Trainer
from tests.drafter.test_trainer import COURSE, EPOCHS, Positioned, rows_of, world

SIX_STEPS = replace(COURSE, max_steps=6)


def train(folder: Path, stop_after: int | None = None, course: TrainConfig = SIX_STEPS) -> dict:
    """Five packed rows an epoch, so that one rank runs out first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    drafter, target, documents = world()
    losses: dict[int, float] = {}
    norms: list[float] = []
    rates: list[float] = []

    def batches(epoch: int) -> Positioned:
        return Positioned(rows_of(documents), rank, ranks)

    def note(metrics: StepMetrics) -> None:
        losses[metrics.step] = metrics.loss
        norms.append(metrics.grad_norm)
        rates.append(metrics.lr)

    result = Trainer(
        replace(course, validate_every=3), drafter, target, batches, folder,
        validation=lambda: batches(0), on_step=note, stop=lambda: stop_after in losses,
    ).run()  # fmt: skip
    held = sum(w.to_local().numel() for w in drafter.parameters())  # type: ignore[attr-defined]
    weights = whole_weights(drafter)
    if rank == 0:
        torch.save(weights, folder.with_suffix(".pt"))
    validation = result.validation.flat() if result.validation else None
    said = {"losses": losses, "norms": norms, "rates": rates, "validation": validation}
    return {**said, "tokens": result.tokens, "held": held}


def main() -> None:
    """The four trainings."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = Path(sys.argv[1])
    said = {"whole": train(out / "whole"), "second": train(out / "second"), "first": train(out / "first", 3)}
    said["epochs"] = train(out / "epochs", course=EPOCHS)
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(said))
    leave(0)


if __name__ == "__main__":
    main()
