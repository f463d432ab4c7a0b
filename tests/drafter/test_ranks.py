"""Two ranks, each with half of every weight, do what one rank with the same optimiser steps does."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter.checkpoint import CheckpointFolder
from drafter.course import TrainConfig
from drafter.trainer import Trainer
from hidden_states.errors import TrainingError
from tests.drafter.test_trainer import COURSE, EPOCHS, Positioned, rows_of, world
from tests.servers import REPOSITORY


def alone(
    folder: Path | None = None, stop_after: int | None = None, positioned: bool = True, course: TrainConfig = COURSE
) -> dict:
    """One rank taking two rows a step, as two ranks take one each."""
    course = course if course.epochs else replace(course, max_steps=6)
    rates: list[float] = []
    drafter, target, documents = world()
    losses: dict[int, float] = {}
    result = Trainer(
        replace(course, validate_every=3, accumulate=2), drafter, target,
        lambda epoch: Positioned(rows_of(documents)) if positioned else rows_of(documents), folder,
        validation=lambda: rows_of(documents), on_step=lambda m: (losses.update({m.step: m.loss}), rates.append(m.lr)),
        stop=lambda: stop_after in losses,
    ).run()  # fmt: skip
    return {"losses": losses, "rates": rates, "result": result, "weights": drafter.state_dict()}


def by_step(losses: dict) -> dict[int, float]:
    return {int(step): loss for step, loss in losses.items()}


@pytest.mark.slow
def test_two_ranks_give_the_losses_and_weights_of_one_and_each_goes_on_from_the_other(tmp_path) -> None:
    """Five packed rows over two ranks: in the third step of an epoch one rank has nothing left."""
    alone(tmp_path / "second", stop_after=2)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "tests.drafter.two_ranks", str(tmp_path)],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one = alone()
    saw = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for said in saw:
        assert by_step(said["whole"]["losses"]) == pytest.approx(one["losses"], rel=1e-5)
        assert said["whole"]["tokens"] == said["second"]["tokens"] == one["result"].tokens
        assert said["whole"]["validation"] == pytest.approx(one["result"].validation.flat(), rel=1e-4)
        assert by_step(said["second"]["losses"]) == pytest.approx(
            {n: x for n, x in one["losses"].items() if n > 2}, rel=1e-5
        )
    by_epochs = alone(course=EPOCHS)
    for said in saw:
        assert said["epochs"]["rates"] == pytest.approx(by_epochs["rates"]) and len(by_epochs["rates"]) == 6
        assert by_step(said["epochs"]["losses"]) == pytest.approx(by_epochs["losses"], rel=1e-5)
        assert said["epochs"]["tokens"] == by_epochs["result"].tokens, "every row of every epoch"
    for name in ("whole", "second"):
        weights = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert all(torch.allclose(weights[n], w, rtol=1e-4, atol=1e-5) for n, w in one["weights"].items())
    best = CheckpointFolder(tmp_path / "whole").load_best()
    assert best is not None and set(best[0]) == set(one["weights"])

    every = sum(p.numel() for p in world()[0].parameters())
    assert sum(said["whole"]["held"] for said in saw) == every
    assert max(said["whole"]["held"] for said in saw) < 0.6 * every

    shutil.copytree(tmp_path / "first", tmp_path / "unpositioned")
    rest = alone(tmp_path / "first")
    assert rest["losses"] == pytest.approx({n: x for n, x in one["losses"].items() if n > 3}, rel=1e-5)
    with pytest.raises(TrainingError, match="checkpoint of 2 ranks"):
        alone(tmp_path / "unpositioned", positioned=False)
