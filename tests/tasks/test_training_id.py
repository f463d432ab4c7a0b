"""Which checkpoints a training may go on from: those of the same data, the same course and the same first weights."""

import hashlib
import json

import torch

from drafter.config import DrafterConfig
from infra.recipe import Train
from tasks.training import training_id
from tests.drafter.packing import random_drafter
from tests.drafter.test_start import SHAPE


def drafter(seed: int = 0):
    return random_drafter(DrafterConfig.from_target(SHAPE, (1, 2, 4), 20), torch.Generator().manual_seed(seed))[0]


def test_keys_that_a_recipe_leaves_out_do_not_count() -> None:
    said = Train(steps=4).model_dump(mode="json")
    before = {name: value for name, value in said.items() if name not in ("start_from", "drafter")}
    was = hashlib.sha256(json.dumps(["data", before], sort_keys=True).encode()).hexdigest()[:16]
    assert training_id("data", Train(steps=4), drafter()) == was


def test_a_drafter_to_start_from_counts_by_its_weights_and_not_by_its_place() -> None:
    here = training_id("data", Train(steps=4, start_from="/a"), drafter(1))
    assert here == training_id("data", Train(steps=4, start_from="/b"), drafter(1))
    assert here != training_id("data", Train(steps=4, start_from="/a"), drafter(2))
    assert here != training_id("data", Train(steps=4), drafter(1))


def test_whatever_changes_the_training_changes_the_folder() -> None:
    ids = [
        training_id("data", Train(steps=4), drafter()),
        training_id("other data", Train(steps=4), drafter()),
        training_id("data", Train(steps=5), drafter()),
        training_id("data", Train(steps=4, seed=1), drafter()),
        training_id("data", Train(steps=4, drafter={"fc_norm": True}), drafter()),
    ]
    assert len(set(ids)) == len(ids)
