"""A dataset is committed whole or not at all, by any number of workers, and proves every byte of itself."""

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hidden_states.dataset import Dataset, DatasetWriter, list_datasets, remove_dataset
from hidden_states.errors import DatasetError, StoreError
from hidden_states.fingerprint import Fingerprint
from hidden_states.plan import plan_batches
from hidden_states.samples import is_held_out
from hidden_states.shard import pack_shard
from hidden_states.store import ObjectExists, Store, open_store
from hidden_states.store_s3 import S3Store
from hidden_states.vocab import build_vocab_map, count_tokens
from tests.fault_proxy import Fault, fault_proxy, poor_store
from tests.hidden_states.stored import FINGERPRINT, Capture, make_dataset, make_samples
from tests.object_store import RunningStore

LENGTHS = [3, 9, 1, 14, 5, 5, 8, 2, 11, 6]


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def test_every_sample_comes_back_as_captured(store: Store, tmp_path: Path) -> None:
    made = make_dataset(store, tmp_path, LENGTHS, shard_tokens=20)
    assert made.dataset.manifest.samples == len(LENGTHS) and made.dataset.manifest.tokens == sum(LENGTHS)
    assert len(made.dataset.manifest.shards) == len(made.batches) > 3
    for sample_id in made.samples:
        made.assert_equal(sample_id, made.dataset.read(sample_id))
    for full in (True, False):
        report = made.dataset.verify(full=full)
        assert report.problems == [] and report.shards == len(made.batches) and report.bytes_read > 0
    with pytest.raises(DatasetError, match="no sample 'ffff'"):
        made.dataset.read("ffff")


def test_the_table_has_a_row_a_sample_with_what_proves_it(folder_store: Store, tmp_path: Path) -> None:
    made = make_dataset(folder_store, tmp_path, LENGTHS, shard_tokens=20, held_out_share=0.4)
    rows = made.dataset.samples.to_pylist()
    assert {row["id"] for row in rows} == set(made.samples)
    for row in rows:
        sample = made.samples[row["id"]]
        assert (row["source"], row["digest"], row["tokens"]) == (sample.source, sample.digest, len(sample))
        assert row["loss_tokens"] == sum(sample.loss_mask)
        assert row["split"] == ("held_out" if is_held_out(sample.digest, 0.4) else "train")
        said = made.dumps[row["id"]].record.checksums
        assert row["checksums"] == [said[name] for name in made.dataset.manifest.captured_tensors()]
    held_out = sum(row["split"] == "held_out" for row in rows)
    assert 0 < held_out < len(rows) and made.dataset.manifest.held_out_samples == held_out


def test_committing_the_same_again_is_the_same_commit(store: Store, tmp_path: Path) -> None:
    samples = make_samples(LENGTHS)
    dumps = Capture(tmp_path / "dumps").dumps(samples)
    batches = plan_batches(samples, 20)
    vocab = build_vocab_map(count_tokens(samples, 1000), 64)
    digests = []
    for _ in range(2):
        writer = DatasetWriter(store, "data", FINGERPRINT)
        for batch in batches:
            writer.commit_batch(pack_shard(batch, dumps, tmp_path / "shard"))
        manifest = writer.commit_manifest(
            [batch.id for batch in batches], vocab_map=vocab.to_bytes(), coverage=vocab.coverage, extra={"k": 64}
        )
        digests.append(manifest.digest)
    assert digests[0] == digests[1] == Dataset.open(store, "data").digest
    assert torch.equal(Dataset.open(store, "data").vocab_map().t2d, vocab.t2d)
    with pytest.raises(DatasetError, match=r"committed already, with other content .* differ in .*extra"):
        writer.commit_manifest([batch.id for batch in batches], vocab_map=vocab.to_bytes(), extra={"k": 65})
    assert Dataset.open(store, "data").digest == digests[0]
    assert Dataset.open(store, "data").verify().problems == []


def test_nothing_of_a_run_is_in_a_manifest_or_sidecar(folder_store: Store, tmp_path: Path) -> None:
    """Two captures of the same content in other folders, in another order of batches, commit the same bytes."""
    objects = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        store = open_store((tmp_path / name / "store").as_uri())
        samples = make_samples(LENGTHS)
        dumps = Capture(tmp_path / name / "dumps").dumps(samples)
        writer = DatasetWriter(store, "data", FINGERPRINT)
        batches = plan_batches(samples, 20)
        for batch in batches if name == "one" else reversed(batches):
            writer.commit_batch(pack_shard(batch, dumps, tmp_path / name / f"{name}.shard"))
        writer.commit_manifest(batch.id for batch in batches)
        objects.append({info.key: store.get_bytes(info.key) for info in store.list()})
    assert objects[0] == objects[1]


def test_a_batch_is_done_when_its_sidecar_and_shard_are_there(folder_store: Store, tmp_path: Path) -> None:
    samples = make_samples(LENGTHS)
    dumps = Capture(tmp_path / "dumps").dumps(samples)
    batches = plan_batches(samples, 20)
    writer = DatasetWriter(folder_store, "data", FINGERPRINT)
    for batch in batches[:3]:
        writer.commit_batch(pack_shard(batch, dumps, tmp_path / "shard"))
    again = DatasetWriter(folder_store, "data", FINGERPRINT)
    assert set(again.done()) == {batch.id for batch in batches[:3]}
    folder_store.delete(writer.shard_key(batches[0].id))  # a sidecar without its shard
    folder_store.delete(writer.shard_key(batches[1].id, "json"))  # a shard without its sidecar
    assert set(again.done()) == {batches[2].id}
    with pytest.raises(DatasetError, match=f"{len(batches) - 1} of {len(batches)} batches are not committed"):
        again.commit_manifest([batch.id for batch in batches])
    with pytest.raises(DatasetError, match="no manifest, 2 batches there"):
        Dataset.open(folder_store, "data")
    for batch in batches:
        again.commit_batch(pack_shard(batch, dumps, tmp_path / "shard"))
    again.commit_manifest([batch.id for batch in batches])
    assert Dataset.open(folder_store, "data").verify().problems == []


def test_a_truncated_shard_is_not_done_and_is_replaced(store: Store, tmp_path: Path) -> None:
    samples = make_samples([5, 6])
    dumps = Capture(tmp_path / "dumps").dumps(samples)
    (batch,) = plan_batches(samples, 20)
    writer = DatasetWriter(store, "data", FINGERPRINT)
    info = pack_shard(batch, dumps, tmp_path / "shard")
    writer.commit_batch(info)
    store.put_bytes(writer.shard_key(batch.id), (tmp_path / "shard").read_bytes()[:-1])
    assert writer.done() == {}
    writer.commit_batch(info)
    assert set(writer.done()) == {batch.id}
    writer.commit_manifest([batch.id])
    assert Dataset.open(store, "data").verify().problems == []


def test_the_second_of_two_workers_takes_the_first_ones_shard(store: Store, tmp_path: Path) -> None:
    """Two captures of a batch differ in their last bits. Whatever the order of steps, shard and sidecar are of one."""
    samples = make_samples([5, 6])
    capture = Capture(tmp_path / "dumps")
    (batch,) = plan_batches(samples, 20)
    first = pack_shard(batch, capture.dumps(samples, seed=1), tmp_path / "first")
    second = pack_shard(batch, capture.dumps(samples, seed=2), tmp_path / "second")
    assert first.sha256 != second.sha256
    writer = DatasetWriter(store, "data", FINGERPRINT)
    # The first worker dies between shard and sidecar; or is merely slow, and writes its sidecar later.
    store.put_file(writer.shard_key(batch.id), tmp_path / "first", if_none_match=True)
    taken = writer.commit_batch(second)
    assert taken.info == replace(first, path=None)
    before = store.get_bytes(writer.shard_key(batch.id, "json"))
    DatasetWriter(store, "data", FINGERPRINT).commit_batch(first)
    assert store.get_bytes(writer.shard_key(batch.id, "json")) == before
    writer.commit_manifest([batch.id])
    assert Dataset.open(store, "data").verify().problems == []


def test_a_damaged_shard_under_the_name_is_replaced_by_ours(store: Store, tmp_path: Path) -> None:
    samples = make_samples([5, 6])
    (batch,) = plan_batches(samples, 20)
    info = pack_shard(batch, Capture(tmp_path / "dumps").dumps(samples), tmp_path / "shard")
    data = bytearray((tmp_path / "shard").read_bytes())
    data[-20] ^= 1
    writer = DatasetWriter(store, "data", FINGERPRINT)
    store.put_bytes(writer.shard_key(batch.id), bytes(data))
    assert writer.commit_batch(info).info.sha256 == info.sha256
    assert store.get_bytes(writer.shard_key(batch.id)) == (tmp_path / "shard").read_bytes()


def test_many_workers_commit_one_dataset(store: Store, tmp_path: Path) -> None:
    """Every batch by three workers at once, each with its own capture; then the manifest by all of them."""
    samples = make_samples(LENGTHS)
    capture = Capture(tmp_path / "dumps")
    batches = plan_batches(samples, 20)
    dumps = [capture.dumps(samples, seed) for seed in range(3)]
    start = threading.Barrier(3)

    def work(number: int) -> str:
        writer = DatasetWriter(store, "data", FINGERPRINT)
        start.wait(60)
        for batch in batches:
            writer.commit_batch(pack_shard(batch, dumps[number], tmp_path / f"shard-{number}"))
        start.wait(60)
        return writer.commit_manifest([batch.id for batch in batches]).digest

    with ThreadPoolExecutor(3) as pool:
        digests = set(pool.map(work, range(3)))
    dataset = Dataset.open(store, "data")
    assert digests == {dataset.digest}
    assert dataset.verify().problems == []
    assert all(dataset.read(sample.id).input_ids.tolist() == sample.input_ids for sample in samples)


def test_a_commit_whose_answer_was_lost_has_succeeded(s3_server: RunningStore, tmp_path: Path) -> None:
    with fault_proxy(s3_server.url) as proxy:
        store = s3_server.store("lost-commit", endpoint_url=proxy.url)
        proxy.faults.append(Fault("lost", lambda method, path: method == "PUT" and path.endswith("manifest.json")))
        made = make_dataset(store, tmp_path, [5, 6], shard_tokens=20)
        assert proxy.faults[0].reached.is_set()
        assert made.dataset.verify().problems == []


def test_another_fingerprint_is_refused_by_its_fields(store: Store, tmp_path: Path) -> None:
    make_dataset(store, tmp_path, [5, 6], shard_tokens=20)
    other = Fingerprint({**FINGERPRINT.fields, "weights": "full:5678", "sglang_version": "0.5.24"})
    writer = DatasetWriter(store, "data", other)
    samples = make_samples([7], seed=1)
    (batch,) = plan_batches(samples, 20)
    info = pack_shard(batch, Capture(tmp_path / "other").dumps(samples), tmp_path / "shard")
    expected = r"sglang_version: 0.5.24 / \(absent\); weights: full:5678 / full:1234"
    for call in (writer.done, lambda: writer.commit_batch(info), lambda: writer.commit_manifest([batch.id])):
        with pytest.raises(DatasetError, match=expected):
            call()
    assert [info.key for info in store.list("data/shards/") if other.short in info.key] == []


def test_a_shard_that_contradicts_the_fingerprint_is_refused(folder_store: Store, tmp_path: Path) -> None:
    samples = make_samples([5])
    (batch,) = plan_batches(samples, 20)
    info = pack_shard(batch, Capture(tmp_path / "dumps").dumps(samples), tmp_path / "shard")
    other = Fingerprint({**FINGERPRINT.fields, "after_block": [1, 3, 5]})
    with pytest.raises(DatasetError, match=r"after_block is \[1, 3, 6\]; expected \[1, 3, 5\]"):
        DatasetWriter(folder_store, "data", other).commit_batch(info)


def test_left_out_samples_are_in_the_manifest_with_their_reasons(folder_store: Store, tmp_path: Path) -> None:
    samples = make_samples([5, 6])
    (batch,) = plan_batches(samples, 20)
    lost, kept = batch.samples
    writer = DatasetWriter(folder_store, "data", FINGERPRINT)
    dumps = Capture(tmp_path / "dumps").dumps([kept])
    writer.commit_batch(pack_shard(batch, dumps, tmp_path / "shard", left_out={lost.id: "NaN, three times"}))
    manifest = writer.commit_manifest([batch.id])
    assert manifest.left_out == {lost.id: "NaN, three times"} and manifest.samples == 1


def damage(store: Store, key: str, change: Callable[[bytes], bytes]) -> None:
    store.put_bytes(key, change(store.get_bytes(key)))


def test_verify_finds_every_kind_of_damage(store: Store, tmp_path: Path) -> None:
    made = make_dataset(store, tmp_path, LENGTHS, shard_tokens=20)
    shards = [made.dataset.key(record) for record in made.dataset.manifest.shards]
    flipped, cut, gone, bare = shards[:4]
    damage(store, flipped, lambda data: data[:-30] + bytes([data[-30] ^ 1]) + data[-29:])
    damage(store, cut, lambda data: data[:-1])
    store.delete(gone)
    store.delete(bare.replace(".safetensors", ".json"))
    problems = Dataset.open(store, "data").verify().problems
    assert len(problems) == 4
    for key, word in ((flipped, "sha256"), (cut, "bytes; expected"), (gone, "missing"), (bare[:-12], "not found")):
        assert any(key in problem and word in problem for problem in problems), problems
    with pytest.raises(DatasetError, match="expected the bytes that were captured"):
        for sample_id in made.samples:
            if (
                made.dataset.manifest.shards[made.dataset.entry(made.dataset.sample_ids.index(sample_id))[0]].key
                in flipped
            ):
                made.dataset.read(sample_id)


def test_verify_by_sample_finds_a_flipped_bit_in_a_sample(folder_store: Store, tmp_path: Path) -> None:
    made = make_dataset(folder_store, tmp_path, LENGTHS, shard_tokens=20)
    key = made.dataset.key(made.dataset.manifest.shards[0])
    damage(folder_store, key, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    report = made.dataset.verify(full=False)
    assert len(report.problems) == 1 and "mask differ" in report.problems[0]


def test_a_damaged_table_or_manifest_is_refused(folder_store: Store, tmp_path: Path) -> None:
    make_dataset(folder_store, tmp_path, [5, 6], shard_tokens=20)
    damage(folder_store, "data/samples.parquet", lambda data: data[:-1] + b"x")
    with pytest.raises(DatasetError, match=r"samples.parquet.*another sha256"):
        _ = Dataset.open(folder_store, "data").samples
    damage(folder_store, "data/manifest.json", lambda data: data.replace(b"eyas-dataset/1", b"eyas-dataset/9"))
    with pytest.raises(DatasetError, match="format eyas-dataset/9"):
        Dataset.open(folder_store, "data")


def test_a_store_without_conditions_is_refused_before_anything_is_sent(s3_server: RunningStore, tmp_path: Path) -> None:
    samples = make_samples([5])
    (batch,) = plan_batches(samples, 20)
    info = pack_shard(batch, Capture(tmp_path / "dumps").dumps(samples), tmp_path / "shard")
    with poor_store() as url, pytest.raises(StoreError, match="If-None-Match"):
        S3Store(s3_server.bucket, "x", endpoint_url=url).put_file(
            "x", tmp_path / "shard", info.digest, if_none_match=True
        )


def test_datasets_are_listed_and_removed(store: Store, tmp_path: Path) -> None:
    made = make_dataset(store, tmp_path, [5, 6], shard_tokens=20)
    store.put_bytes("half/shards/x-0000000000000000.json", b"{}")
    assert [(dataset.name, dataset.digest) for dataset in list_datasets(store)] == [("data", made.dataset.digest)]
    assert remove_dataset(store, "data") == 4
    assert list(store.list("data/")) == [] and list(list_datasets(store)) == []
    with pytest.raises(DatasetError, match="nothing there"):
        Dataset.open(store, "data")


def test_a_manifest_is_readable_json_without_secrets_or_times(folder_store: Store, tmp_path: Path) -> None:
    make_dataset(folder_store, tmp_path, [5, 6], shard_tokens=20)
    facts = json.loads(folder_store.get_bytes("data/manifest.json"))
    assert facts["fingerprint"] == dict(FINGERPRINT.fields)
    assert str(tmp_path) not in folder_store.get_bytes("data/manifest.json").decode()
    assert not any("time" in key or "date" in key for key in facts)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b"])
def test_a_dataset_name_is_one_plain_folder(folder_store: Store, name: str) -> None:
    with pytest.raises(DatasetError, match="not a name"):
        DatasetWriter(folder_store, name, FINGERPRINT)


def test_of_two_commits_with_other_content_the_loser_damages_nothing(folder_store: Store, tmp_path: Path) -> None:
    """The loser has checked that there is no manifest, then the winner commits, then the loser goes on."""
    samples = make_samples(LENGTHS)
    dumps = Capture(tmp_path / "dumps").dumps(samples)
    batches = plan_batches(samples, 20)
    writer = DatasetWriter(folder_store, "data", FINGERPRINT)
    for batch in batches:
        writer.commit_batch(pack_shard(batch, dumps, tmp_path / "shard"))
    ids = [batch.id for batch in batches]

    class Slow(DatasetWriter):
        def _refuse_other_manifest(self, manifest: object) -> None:
            super()._refuse_other_manifest(manifest)  # type: ignore[arg-type]
            if not committed:
                committed.append(writer.commit_manifest(ids, held_out_share=0.2))

    committed: list[object] = []
    with pytest.raises(DatasetError, match=r"differ in .*held_out"):
        Slow(folder_store, "data", FINGERPRINT).commit_manifest(ids, held_out_share=0.6)
    assert Dataset.open(folder_store, "data").verify().problems == []


def test_a_full_copy_of_a_dataset_folder_is_the_dataset(tmp_path: Path, folder_store: Store) -> None:
    made = make_dataset(folder_store, tmp_path, [5, 6], shard_tokens=20)
    shutil.copytree(tmp_path / "store/data", tmp_path / "elsewhere/data")
    moved = Dataset.open_uri((tmp_path / "elsewhere/data").as_uri())
    assert moved.digest == made.dataset.digest and moved.verify().problems == []
    with pytest.raises(ObjectExists):
        moved.store.put_bytes("data/manifest.json", b"", if_none_match=True)
