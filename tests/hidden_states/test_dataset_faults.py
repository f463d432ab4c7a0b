"""What befalls a dataset from outside: captures of others over its keys, kills in mid-upload, missing permissions."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from hidden_states.dataset import Dataset, DatasetWriter
from hidden_states.errors import DatasetError, StoreError
from hidden_states.fingerprint import Fingerprint
from hidden_states.plan import plan_batches
from hidden_states.shard import pack_shard
from hidden_states.shard_layout import ShardInfo
from hidden_states.store import Store
from hidden_states.stream import SampleStream
from tests.fault_proxy import Fault, fault_proxy
from tests.hidden_states.stored import FINGERPRINT, Capture, make_dataset, make_samples
from tests.object_store import RunningStore


def test_a_shard_overwritten_by_another_capture_is_never_read_as_this_one(store: Store, tmp_path: Path) -> None:
    """Same samples, same size, a sound shard in itself: but of another fingerprint, written over this dataset's key."""
    made = make_dataset(store, tmp_path, [5, 6], shard_tokens=20)
    (batch,) = made.batches
    theirs = pack_shard(batch, Capture(tmp_path / "other").dumps(batch.samples, seed=9), tmp_path / "theirs")
    key = made.dataset.key(made.dataset.manifest.shards[0])
    assert theirs.bytes == made.dataset.manifest.total_bytes
    store.put_bytes(key, (tmp_path / "theirs").read_bytes())
    (problem,) = made.dataset.verify().problems
    assert key in problem and "sha256" in problem
    with pytest.raises(DatasetError, match=f"{key}.*expected the bytes that were captured"):
        made.dataset.read(batch.samples[0].id)
    with pytest.raises(DatasetError, match="nothing was trained on these rows"):
        list(SampleStream(made.dataset, batch_tokens=20, cache_dir=tmp_path / "cache"))


def test_a_worker_killed_in_its_upload_leaves_a_batch_not_done_and_its_parts_are_swept(
    s3_server: RunningStore, tmp_path: Path
) -> None:
    samples = make_samples([300])
    dumps = Capture(tmp_path / "dumps", hidden_size=8192).dumps(samples)
    (batch,) = plan_batches(samples, 1000)
    info = pack_shard(batch, dumps, tmp_path / "shard")
    hold = Fault("hold", lambda method, path: method == "PUT" and "partNumber=2" in path)
    with fault_proxy(s3_server.url) as proxy:
        proxy.faults.append(hold)
        worker = multiprocessing.get_context("fork").Process(
            target=_commit, args=(s3_server.store("killed-batch", proxy.url), info)
        )
        worker.start()
        assert hold.reached.wait(60)
        worker.kill()
        worker.join(60)
    writer = DatasetWriter(s3_server.store("killed-batch"), "data", FINGERPRINT)
    assert writer.done() == {} and writer.sweep() == ()  # it may be another worker's, and alive
    assert writer.sweep(older_than_s=-60) == (writer.shard_key(batch.id),)
    writer.commit_batch(info)
    writer.commit_manifest([batch.id])
    assert Dataset.open(writer.store, "data").verify().problems == []


def _commit(store: Store, info: ShardInfo) -> None:
    DatasetWriter(store, "data", FINGERPRINT).commit_batch(info)


def test_a_bucket_that_may_not_be_listed_says_so_before_anything_is_sent(
    s3_server: RunningStore, tmp_path: Path
) -> None:
    samples = make_samples([5])
    (batch,) = plan_batches(samples, 20)
    info = pack_shard(batch, Capture(tmp_path / "dumps").dumps(samples), tmp_path / "shard")
    with fault_proxy(s3_server.url) as proxy:
        at = f"/{s3_server.bucket}"
        proxy.faults.append(Fault("error", lambda _, path: path.partition("?")[0] == at, 99, 403, "AccessDenied"))
        writer = DatasetWriter(s3_server.store("unlisted", proxy.url), "data", FINGERPRINT)
        for call in (writer.done, lambda: writer.commit_batch(info)):
            with pytest.raises(StoreError, match=r"cannot list.*expected s3:ListBucket"):
                call()
    assert list(s3_server.store("unlisted").list("data/")) == []


@pytest.mark.parametrize("lost_by", ["the second", "the first", "each another"])
def test_of_two_workers_that_lost_other_samples_of_a_batch_the_first_counts(
    store: Store, tmp_path: Path, lost_by: str
) -> None:
    """The first shard is intact and stays, though the manifest that names it may be committed by then."""
    samples = make_samples([5, 6, 7])
    capture = Capture(tmp_path / "dumps")
    (batch,) = plan_batches(samples, 20)
    lost = {"the second": ([], [0]), "the first": ([0], []), "each another": ([0], [1])}[lost_by]
    shards = []
    for number, missing in enumerate(lost):
        dumps = capture.dumps([s for n, s in enumerate(samples) if n not in missing], seed=number)
        left_out = {samples[n].id: "no dump" for n in missing}
        shards.append(pack_shard(batch, dumps, tmp_path / f"{number}", left_out=left_out))
    slow, quick = DatasetWriter(store, "data", FINGERPRINT), DatasetWriter(store, "data", FINGERPRINT)
    assert slow.committed(batch.id) is None
    quick.commit_batch(shards[0])
    quick.commit_manifest([batch.id])
    store.delete(slow.shard_key(batch.id, "json"))  # the second looked before this was there
    assert slow.commit_batch(shards[1]).info == replace(shards[0], path=None)
    assert slow.commit_manifest([batch.id]).digest == Dataset.open(store, "data").digest
    assert Dataset.open(store, "data").verify().problems == []


def test_a_damaged_shard_of_a_committed_dataset_is_not_replaced(store: Store, tmp_path: Path) -> None:
    samples = make_samples([5, 6])
    capture = Capture(tmp_path / "dumps")
    (batch,) = plan_batches(samples, 20)
    writer = DatasetWriter(store, "data", FINGERPRINT)
    writer.commit_batch(pack_shard(batch, capture.dumps(samples), tmp_path / "first"))
    writer.commit_manifest([batch.id])
    damaged = (tmp_path / "first").read_bytes()[:-1] + b"x"
    store.put_bytes(writer.shard_key(batch.id), damaged)
    store.delete(writer.shard_key(batch.id, "json"))
    with pytest.raises(DatasetError, match="is damaged, and its dataset is committed"):
        writer.commit_batch(pack_shard(batch, capture.dumps(samples, seed=1), tmp_path / "second"))
    assert store.get_bytes(writer.shard_key(batch.id)) == damaged
    with pytest.raises(DatasetError, match="committed"):
        writer.discard(batch.id)


def test_a_batch_is_taken_back_until_the_dataset_is_committed(store: Store, tmp_path: Path) -> None:
    samples = make_samples([5, 6])
    (batch,) = plan_batches(samples, 20)
    writer = DatasetWriter(store, "data", FINGERPRINT)
    info = pack_shard(batch, Capture(tmp_path / "dumps").dumps(samples), tmp_path / "shard")
    writer.commit_batch(info)
    writer.discard(batch.id)
    assert writer.done() == {} and writer.committed(batch.id) is None
    writer.commit_batch(info)
    assert set(writer.done()) == {batch.id}


def test_another_fingerprint_is_refused_before_there_is_a_batch(store: Store) -> None:
    """Two hosts with other weights, or another SGLang: one of them hears it before it captures for days."""
    DatasetWriter(store, "data", FINGERPRINT).claim()
    DatasetWriter(store, "data", Fingerprint(dict(FINGERPRINT.fields))).claim()
    with pytest.raises(DatasetError, match="weights"):
        DatasetWriter(store, "data", Fingerprint({**FINGERPRINT.fields, "weights": "full:other"})).claim()
