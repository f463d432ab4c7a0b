"""Run by a test under torchrun: one rank's share of a training. Writes its losses and the first rank's weights.

torchrun --nproc-per-node 2 -m tests.drafter.two_ranks OUT_FOLDER
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from drafter.trainer import StepMetrics, Trainer
from tests.drafter.packing import Packed
from tests.drafter.test_trainer import COURSE, rows_of, world


def main() -> None:
    """Trains on every second packed row; five rows, so that one rank runs out first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    drafter, target, documents = world()
    losses: list[float] = []
    norms: list[float] = []

    def batches(epoch: int) -> list[Packed]:
        return rows_of(documents)[rank::ranks]

    def note(metrics: StepMetrics) -> None:
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)

    out = Path(sys.argv[1])
    course = replace(COURSE, max_steps=6, validate_every=3)
    result = Trainer(
        course, drafter, target, batches, out / "checkpoints", validation=lambda: batches(0), on_step=note
    ).run()  # fmt: skip
    assert result.validation is not None
    (out / f"rank-{rank}.json").write_text(
        json.dumps({"losses": losses, "norms": norms, "validation": result.validation.flat(), "tokens": result.tokens})
    )
    torch.save(drafter.state_dict(), out / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
