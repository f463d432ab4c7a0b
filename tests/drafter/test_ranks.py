"""Two ranks do what one rank with the same optimiser steps does."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from drafter.checkpoint import CheckpointFolder
from drafter.trainer import Trainer
from tests.drafter.test_trainer import COURSE, rows_of, world
from tests.servers import REPOSITORY


@pytest.mark.slow
def test_two_ranks_give_the_losses_and_weights_of_one(tmp_path) -> None:
    """Five packed rows over two ranks: in the third step of an epoch one rank has nothing left."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "tests.drafter.two_ranks", str(tmp_path)],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    drafter, target, documents = world()
    losses: list[float] = []
    alone = Trainer(
        replace(COURSE, max_steps=6, validate_every=3, accumulate=2), drafter, target, lambda e: rows_of(documents),
        validation=lambda: rows_of(documents), on_step=lambda m: losses.append(m.loss),
    ).run()  # fmt: skip
    assert alone.validation is not None
    for rank in (0, 1):
        said = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert said["losses"] == pytest.approx(losses, rel=1e-5)
        assert said["tokens"] == alone.tokens
        assert said["validation"] == pytest.approx(alone.validation.flat(), rel=1e-4)
        weights = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)
        assert all(torch.allclose(weights[n], w, rtol=1e-4, atol=1e-5) for n, w in drafter.state_dict().items())
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == [6]
