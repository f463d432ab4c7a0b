"""Every sample once an epoch, whoever reads and wherever they stop; nothing unverified; bounded and little on disk."""

import copy
import json
import os
import pickle
import resource
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hidden_states import stream as stream_module
from hidden_states.dataset import Dataset
from hidden_states.errors import DatasetError, RecipeError, StoreError, TrainingError
from hidden_states.order import epoch_batches
from hidden_states.store import Store, open_store
from hidden_states.store_s3 import S3Store
from hidden_states.stream import PackedBatch, SampleStream
from tests.hidden_states.stored import Made, make_dataset
from tests.object_store import RunningStore

LONGEST = 20


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
    """Datasets of 1 to 9 shards of 1 to 30 samples, in folders."""
    made = []
    draw = torch.Generator().manual_seed(0)
    for index, (samples, shard_tokens) in enumerate([(1, 50), (7, 500), (9, 30), (30, 60), (30, 100), (24, 20)]):
        lengths = torch.randint(1, LONGEST + 1, (samples,), generator=draw).tolist()
        folder = tmp_path_factory.mktemp(f"pool-{index}")
        store = open_store((folder / "store").as_uri())
        made.append(make_dataset(store, folder, lengths, shard_tokens=shard_tokens, hidden_size=2, seed=index))
    return made


def as_worker(stream: SampleStream, worker: int, workers: int) -> Iterator[PackedBatch]:
    """What a DataLoader's worker process would deliver."""
    with pytest.MonkeyPatch.context() as patch:
        info = SimpleNamespace(id=worker, num_workers=workers)
        patch.setattr(stream_module, "get_worker_info", lambda: info if workers else None)
        yield from copy.copy(stream)  # a worker process has its own


def read_rank(stream: SampleStream, workers: int) -> Iterator[PackedBatch]:
    """What a DataLoader over this many workers yields: one batch of each in turn, until all have ended."""
    sources = [as_worker(stream, worker, workers) for worker in range(max(1, workers))]
    lists = [list(source) for source in sources]
    for position in range(max(map(len, lists))):
        yield from (batches[position] for batches in lists if position < len(batches))


@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 5), epoch=st.integers(0, 3), window=st.integers(1, 10))
def test_every_sample_is_seen_once_an_epoch_whoever_reads_and_wherever_it_stops(
    pool: list[Made], data: st.DataObject, seed: int, epoch: int, window: int
) -> None:
    """Random ranks and workers read some steps, stop, and another number of ranks and workers reads the rest."""
    made = data.draw(st.sampled_from(pool))
    batch_tokens = data.draw(st.integers(LONGEST, 80))
    settings_ = {"seed": seed, "epoch": epoch, "window_shards": window, "batch_tokens": batch_tokens}
    seen: Counter[str] = Counter()
    state: dict[str, Any] | None = None
    for part in range(data.draw(st.integers(1, 3), label="parts")):
        world, workers = data.draw(st.integers(1, 5), label="ranks"), data.draw(st.integers(0, 3), label="workers")
        streams = [SampleStream(made.dataset, rank=rank, world=world, **settings_) for rank in range(world)]
        if state is not None:
            for stream in streams:
                stream.load_state_dict(state)
        lengths = [len(stream) for stream in streams]
        assert max(lengths) - min(lengths) <= 1
        read = [list(read_rank(stream, workers)) for stream in streams]
        assert list(map(len, read)) == lengths
        steps = max(lengths) if part == 2 or not lengths[0] else data.draw(st.integers(0, max(lengths)), label="steps")
        after = None
        for batches in read:
            for batch in batches[:steps]:
                seen.update(batch.sample_ids)
                check_batch(made, batch, batch_tokens)
            if steps and len(batches) >= steps:
                after = batches[steps - 1]
        if after is not None:
            state = json.loads(json.dumps(streams[0].state_dict(after)))
    rest = SampleStream(made.dataset, **settings_)
    if state is not None:
        rest.load_state_dict(state)
    for batch in rest:
        seen.update(batch.sample_ids)
    assert seen == Counter(list(made.samples))


def check_batch(made: Made, batch: PackedBatch, batch_tokens: int) -> None:
    lengths = [len(made.samples[sample_id]) for sample_id in batch.sample_ids]
    assert 0 < sum(lengths) == len(batch.input_ids) <= batch_tokens
    assert batch.doc_ids.tolist() == [doc for doc, length in enumerate(lengths) for _ in range(length)]
    assert batch.positions.tolist() == [position for length in lengths for position in range(length)]
    for doc, sample_id in enumerate(batch.sample_ids):
        rows = {name: getattr(batch, name)[batch.doc_ids == doc] for name in ("input_ids", "loss_mask", "aux", "final")}
        made.assert_equal(sample_id, SimpleNamespace(**rows))


def order_of(made: Made, **settings_: Any) -> list[list[str]]:
    wanted = {"seed": 0, "epoch": 0, "batch_tokens": 40, "window_shards": 4} | settings_
    return [batch.sample_ids for batch in SampleStream(made.dataset, **wanted)]


def test_the_order_is_a_function_of_seed_and_epoch(pool: list[Made]) -> None:
    assert order_of(pool[3]) == order_of(pool[3])
    orders = [order_of(pool[3], seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)]
    assert len({json.dumps(order) for order in orders}) == len(orders)


def test_the_order_is_the_same_on_every_machine() -> None:
    """A checkpoint resumes years later elsewhere: the order must not hang on a library's random generator."""
    columns = {"id": [f"s{n}" for n in range(9)], "shard": [n // 3 for n in range(9)], "tokens": [4] * 9}
    table = pa.table(columns | {"split": ["train"] * 9})
    rows = epoch_batches(table, seed=1, epoch=2, split="train", window_shards=2, batch_tokens=8)
    assert rows == [[7, 0], [1, 6], [8, 2], [5, 3], [4]]


def test_a_window_mixes_its_shards_and_no_others(pool: list[Made]) -> None:
    made = pool[3]
    shard_of = {made.dataset.sample_ids[row]: made.dataset.place(row)[0] for row in range(len(made.samples))}
    for window in (1, 3):
        shards = [shard_of[sample_id] for ids in order_of(made, window_shards=window) for sample_id in ids]
        live = {shard: (shards.index(shard), len(shards) - shards[::-1].index(shard)) for shard in shards}
        spans = list(live.values())
        assert max(sum(first <= at < last for first, last in spans) for at in range(len(shards))) <= window
    assert len(set(shards)) == len(made.dataset.manifest.shards) > 5


def test_held_out_samples_are_only_in_their_own_split(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    made = make_dataset(store, tmp_path, [5] * 20, shard_tokens=30, held_out_share=0.4)
    splits = {
        split: {i for batch in SampleStream(made.dataset, batch_tokens=9, split=split) for i in batch.sample_ids}
        for split in ("train", "held_out")
    }
    assert splits["train"] | splits["held_out"] == set(made.samples) and not splits["train"] & splits["held_out"]
    assert len(splits["held_out"]) == made.dataset.manifest.held_out_samples > 0


def test_a_position_without_loader_workers_needs_no_batch(pool: list[Made]) -> None:
    stream = SampleStream(pool[3].dataset, batch_tokens=40)
    whole = order_of(pool[3])
    batches = iter(stream)
    head = [next(batches).sample_ids for _ in range(3)]
    state = stream.state_dict()
    batches.close()  # type: ignore[attr-defined]
    again = SampleStream(pool[3].dataset, batch_tokens=40)
    again.load_state_dict(state)
    assert len(again) == len(whole) - 3
    assert head + [batch.sample_ids for batch in again] == whole
    assert list(again) == []  # the epoch is over
    again.set_epoch(1)
    assert [batch.sample_ids for batch in again] == order_of(pool[3], epoch=1)


def test_a_position_in_another_order_is_refused_by_what_differs(pool: list[Made]) -> None:
    state = SampleStream(pool[3].dataset, batch_tokens=40, seed=1).state_dict()
    for changed in ({"seed": 2}, {"batch_tokens": 41}, {"window_shards": 3}, {"split": "held_out"}):
        other = SampleStream(pool[3].dataset, **({"batch_tokens": 40, "seed": 1} | changed))
        with pytest.raises(TrainingError, match=f"saved with {next(iter(changed))} "):
            other.load_state_dict(state)
    with pytest.raises(TrainingError, match="saved with dataset"):
        SampleStream(pool[4].dataset, batch_tokens=40, seed=1).load_state_dict(state)


def test_what_cannot_work_is_refused_with_the_figures(pool: list[Made], s3_store: S3Store, tmp_path: Path) -> None:
    longest = max(len(sample) for sample in pool[3].samples.values())
    with pytest.raises(RecipeError, match=f"{longest - 1}, and sample .* has {longest} tokens"):
        next(iter(SampleStream(pool[3].dataset, batch_tokens=longest - 1)))
    with pytest.raises(RecipeError, match="'held_out': no samples in it"):
        next(iter(SampleStream(pool[3].dataset, batch_tokens=40, split="held_out")))
    made = make_dataset(s3_store, tmp_path, [5, 6], shard_tokens=20)
    with pytest.raises(RecipeError, match="cache_bytes"):
        next(iter(SampleStream(made.dataset, batch_tokens=40, cache_dir=tmp_path / "cache", cache_bytes=100)))
    with pytest.raises(RecipeError, match="cache_dir: not set"):
        next(iter(SampleStream(made.dataset, batch_tokens=40)))


def test_a_real_loader_with_workers_delivers_the_rank_in_order(s3_store: S3Store, tmp_path: Path) -> None:
    made = make_dataset(s3_store, tmp_path, [5, 9, 3, 8, 8, 2, 7, 6], shard_tokens=20)
    settings_: dict[str, Any] = {"batch_tokens": 12, "seed": 3, "cache_dir": tmp_path / "cache"}
    plain = list(SampleStream(made.dataset, **settings_))
    loader = DataLoader(
        SampleStream(made.dataset, **settings_), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    loaded = list(loader)
    assert [batch.sample_ids for batch in loaded] == [batch.sample_ids for batch in plain]
    assert [batch.resume_at for batch in loaded] == list(range(1, len(plain) + 1))
    for batch in loaded:
        check_batch(made, batch, 12)


# -- what is fetched, kept and verified


class Counting:
    """A store that counts the bytes asked of it. (Wraps, so that it can also change them.)"""

    def __init__(self, store: Store) -> None:
        self.store, self.bytes, self.flip = store, 0, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read_into(self, key: str, start: int, room: memoryview) -> None:
        self.bytes += len(room)
        self.store.read_into(key, start, room)
        if self.flip and self.flip in key:
            room[-1] ^= 1

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return Store.get_range(self, key, start, length)  # type: ignore[arg-type]

    def download(self, key: str, size: int, path: Path) -> Any:
        return Store.download(self, key, size, path)  # type: ignore[arg-type]

    def copy_range(self, *given: Any) -> int:
        return Store.copy_range(self, *given)  # type: ignore[arg-type]

    def fetch(self, *given: Any) -> Any:
        return Store.fetch(self, *given)  # type: ignore[arg-type]

    def blocks(self, *given: Any) -> Iterator[memoryview]:
        return Store.blocks(self, *given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def in_bucket(s3_server: RunningStore, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """32 samples of 1.5 MB in 11 shards."""
    folder = tmp_path_factory.mktemp("in-bucket")
    store = s3_server.store("in-bucket")
    return make_dataset(store, folder, [350 + n for n in range(32)], shard_tokens=1100, hidden_size=512)


@pytest.fixture
def remote(in_bucket: Made) -> tuple[Made, Counting]:
    """The dataset in the bucket, behind a counter of its own."""
    counting = Counting(in_bucket.dataset.store)
    dataset = Dataset(counting, "data", in_bucket.dataset.manifest)  # type: ignore[arg-type]
    return replace(in_bucket, dataset=dataset), counting


def test_a_rank_fetches_its_own_rows_and_hardly_more(remote: tuple[Made, Counting], tmp_path: Path) -> None:
    made, counting = remote
    seen: Counter[str] = Counter()
    for rank in range(4):
        stream = SampleStream(made.dataset, batch_tokens=400, rank=rank, world=4, cache_dir=tmp_path / "cache")
        for batch in stream:
            seen.update(batch.sample_ids)
            check_batch(made, batch, 400)
    assert seen == Counter(list(made.samples))
    assert counting.bytes < 1.3 * made.dataset.manifest.total_bytes
    assert not list((tmp_path / "cache").rglob(".part-*"))  # ranges leave nothing behind


def test_a_second_epoch_fetches_nothing_when_the_cache_holds_it(remote: tuple[Made, Counting], tmp_path: Path) -> None:
    made, counting = remote
    stream = SampleStream(made.dataset, batch_tokens=800, cache_dir=tmp_path / "cache")
    first = [batch.sample_ids for batch in stream]
    fetched = counting.bytes
    assert fetched < 1.01 * made.dataset.manifest.total_bytes
    stream.set_epoch(1)
    second = [batch.sample_ids for batch in stream]
    assert counting.bytes == fetched and second != first
    for batch in SampleStream(made.dataset, batch_tokens=800, cache_dir=tmp_path / "cache"):  # another process, say
        check_batch(made, batch, 800)
    assert counting.bytes == fetched


def test_the_cache_keeps_its_bound(remote: tuple[Made, Counting], tmp_path: Path) -> None:
    made, _ = remote
    bound = 4 * max(shard.size for shard in made.dataset.manifest.shards)
    stream = SampleStream(
        made.dataset, batch_tokens=800, window_shards=2, cache_dir=tmp_path / "cache", cache_bytes=bound
    )
    for epoch in range(2):
        stream.set_epoch(epoch)
        for batch in stream:
            kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
            assert sum(os.stat(path).st_size for path in kept if path.exists()) <= bound
            check_batch(made, batch, 800)


@pytest.mark.parametrize("world", [1, 4], ids=["whole", "ranges"])
def test_bytes_that_changed_in_the_bucket_are_never_delivered(
    remote: tuple[Made, Counting], tmp_path: Path, world: int
) -> None:
    made, counting = remote
    counting.flip = made.dataset.manifest.shards[0].key
    ids = {made.dataset.sample_ids[row] for row in range(32) if made.dataset.place(row)[0] == 0}
    failed = 0
    for rank in range(world):
        stream = SampleStream(made.dataset, batch_tokens=800, rank=rank, world=world, cache_dir=tmp_path / "cache")
        try:
            for batch in stream:
                assert not ids & set(batch.sample_ids) or world > 1
                check_batch(made, batch, 800)
        except DatasetError as error:
            failed += 1
            assert made.dataset.manifest.shards[0].key in str(error)
    assert failed >= 1


def test_a_cached_file_that_rotted_is_noticed_and_fetched_again(remote: tuple[Made, Counting], tmp_path: Path) -> None:
    made, counting = remote
    settings_: dict[str, Any] = {"batch_tokens": 800, "cache_dir": tmp_path / "cache"}
    list(SampleStream(made.dataset, **settings_))
    rotten = next((tmp_path / "cache").rglob("*.safetensors"))
    with open(rotten, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DatasetError, match=str(rotten)):
        list(SampleStream(made.dataset, **settings_))
    fetched = counting.bytes
    assert len(list(SampleStream(made.dataset, **settings_))) > 0
    assert counting.bytes > fetched


def test_a_damaged_shard_in_a_folder_is_refused(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    made = make_dataset(store, tmp_path, [5, 9, 3], shard_tokens=40)
    key = made.dataset.key(made.dataset.manifest.shards[0])
    data = store.get_bytes(key)
    for changed, words in ((data[:-1] + bytes([data[-1] ^ 1]), "mask differ|crc32"), (data[:-1], "truncated")):
        store.put_bytes(key, changed)
        for world in (1, 3):
            with pytest.raises(DatasetError):
                for rank in range(world):
                    list(SampleStream(made.dataset, batch_tokens=10, rank=rank, world=world))
        with pytest.raises(DatasetError, match=words):
            list(SampleStream(made.dataset, batch_tokens=17))
    store.delete(key)
    with pytest.raises(DatasetError, match="missing"):
        list(SampleStream(made.dataset, batch_tokens=17))


def test_a_full_or_unusable_cache_disk_is_reported_as_such(remote: tuple[Made, Counting], tmp_path: Path) -> None:
    made, _ = remote
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=f"cache {tmp_path / 'file'}.*Not a directory"):
        list(SampleStream(made.dataset, batch_tokens=800, cache_dir=tmp_path / "file" / "cache"))
    with pytest.raises(StoreError, match=r"cache /sys/.*(Read-only|not permitted|denied).*another cache folder"):
        list(SampleStream(made.dataset, batch_tokens=800, cache_dir=Path("/sys/kernel")))  # nobody may write there
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, before[1]))
    try:
        with pytest.raises(StoreError, match=r"cache .*File too large.*Free space"):
            list(SampleStream(made.dataset, batch_tokens=800, cache_dir=tmp_path / "cache"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_stopping_early_ends_the_prefetch(remote: tuple[Made, Counting], tmp_path: Path) -> None:
    made, _ = remote
    batches = iter(SampleStream(made.dataset, batch_tokens=800, cache_dir=tmp_path / "cache"))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "eyas-prefetch"]


def test_a_stream_travels_to_another_process_without_its_table(pool: list[Made]) -> None:
    stream = SampleStream(pool[4].dataset, batch_tokens=40)
    whole = [batch.sample_ids for batch in stream]
    copy = pickle.loads(pickle.dumps(SampleStream(Dataset.open(pool[4].dataset.store, "data"), batch_tokens=40)))
    assert [batch.sample_ids for batch in copy] == whole


def test_batches_a_reader_keeps_are_never_overwritten(remote: tuple[Made, Counting], tmp_path: Path) -> None:
    made, _ = remote
    batches = list(SampleStream(made.dataset, batch_tokens=1600, cache_dir=tmp_path / "cache"))
    assert max(batch.aux.nbytes for batch in batches) > 2 << 20
    for batch in batches:
        check_batch(made, batch, 1600)
