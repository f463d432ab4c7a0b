"""Quarantine is bounded and not for good: what a sick host gave up, another host or a later run may still store."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hidden_states.dataset_writer import DatasetWriter
from hidden_states.errors import GateError
from hidden_states.plan import Batch, plan_batches
from hidden_states.shard import pack_shard
from hidden_states.store import Store, open_store
from tasks import quarantine
from tasks.job import Job
from tasks.ledger import Ledger
from tests.hidden_states.stored import FINGERPRINT, Capture, make_samples


class Extraction:
    """Four batches of one sample pair each: two stored whole, one with a sample left out, one given up."""

    def __init__(self, folder: Path, allowed: float) -> None:
        self.store: Store = open_store(f"file://{folder}/store")
        self.ledger = Ledger.choose(self.store, "data", {"inputs": "x"}, "reuse")
        self.writer = DatasetWriter(self.store, self.ledger.name, FINGERPRINT)
        self.samples = make_samples([5] * 8)
        self.batches: list[Batch] = plan_batches(self.samples, 10)
        self.capture, self.folder = Capture(folder / "dumps"), folder
        for batch in self.batches[:2]:
            self.commit(batch)
        self.commit(self.batches[2], lost=1)
        self.ledger.keep_quarantined(self.batches[3].id, dict.fromkeys([s.id for s in self.batches[3].samples], "disk"))
        self.job = cast(Job, SimpleNamespace(
            writer=self.writer, ledger=self.ledger, samples=SimpleNamespace(samples=self.samples), quarantined=0,
            recipe=SimpleNamespace(extract=SimpleNamespace(max_quarantined_share=allowed)),
        ))  # fmt: skip

    def commit(self, batch: Batch, lost: int = 0) -> None:
        dumps = self.capture.dumps(batch.samples[lost:])
        left_out = {sample.id: "no dump" for sample in batch.samples[:lost]}
        self.writer.commit_batch(pack_shard(batch, dumps, self.folder / "shard", left_out=left_out))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "get_run_logger", lambda: logging.getLogger("test"))


def test_four_batches_hold_two_samples_each(tmp_path: Path) -> None:
    assert [len(batch.samples) for batch in Extraction(tmp_path, 0.0).batches] == [2, 2, 2, 2]


@pytest.mark.parametrize(("allowed", "again"), [(0.0, True), (0.37, True), (0.375, False), (1.0, False)])
def test_too_much_of_it_is_captured_again_by_the_next_run(
    tmp_path: Path, quiet: Any, allowed: float, again: bool
) -> None:
    """3 of 8 samples, 0.375 of them."""
    there = Extraction(tmp_path, allowed)
    unusable = quarantine.unusable_batches(there.job)
    taken_back = quarantine.try_again(there.job, there.writer.done(), unusable)
    touched = {batch.id for batch in there.batches[2:]}
    assert taken_back == (touched if again else set())
    assert set(there.writer.done()) == {b.id for b in there.batches[: 2 if again else 3]}
    assert set(there.ledger.quarantined_batches()) == (set() if again else {there.batches[3].id})


def test_a_batch_that_any_host_has_stored_is_not_given_up(tmp_path: Path) -> None:
    there = Extraction(tmp_path, 1.0)
    assert set(quarantine.unusable_batches(there.job)) == {there.batches[3].id}
    there.commit(there.batches[3])
    assert quarantine.unusable_batches(there.job) == {}
    manifest = there.writer.commit_manifest([batch.id for batch in there.batches])
    assert set(quarantine.quarantined(there.job, manifest)) == {there.batches[2].samples[0].id}


@pytest.mark.parametrize(("lost", "refused"), [(0, False), (2, False), (3, True), (8, True)])
def test_the_share_is_a_bound(tmp_path: Path, lost: int, refused: bool) -> None:
    there = Extraction(tmp_path, 0.25)
    there.job.quarantined = lost
    if refused:
        with pytest.raises(GateError, match=f"{lost} of 8 samples.*run again"):
            quarantine.refuse_many_quarantined(there.job)
    else:
        quarantine.refuse_many_quarantined(there.job)
