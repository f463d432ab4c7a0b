"""A cache folder that several readers share, and files that change under a reader: nothing lost, nothing unverified."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hidden_states import shard_cache
from hidden_states.dataset import Dataset
from hidden_states.errors import DatasetError, StoreError
from hidden_states.shard_file import MappedShard
from hidden_states.store_local import LocalStore
from hidden_states.stream import SampleStream
from tests.hidden_states.stored import Made, make_dataset


class Far(LocalStore):
    """A folder that is read like a bucket: everything is fetched into the cache."""

    def local_path(self, key: str) -> Path | None:
        return None


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """20 samples in shards that are mostly rows, so that a reader of all of them fetches them whole."""
    return make_dataset(Far(tmp_path / "store"), tmp_path, [5 + n % 7 for n in range(20)], shard_tokens=40,
                        hidden_size=256)  # fmt: skip


def read(stream: SampleStream, made: Made) -> int:
    """Samples of an epoch, each compared with its capture."""
    count = 0
    for batch in stream:
        for number, sample_id in enumerate(batch.sample_ids):
            own = batch.doc_ids == number
            names = ("input_ids", "loss_mask", "aux", "final")
            made.assert_equal(sample_id, type("Rows", (), {name: getattr(batch, name)[own] for name in names}))
            count += 1
    return count


def test_readers_that_evict_each_others_shards_all_see_every_sample(made: Made, tmp_path: Path) -> None:
    """Each has room for a few shards, counts the others' files too, and removes them as they are about to be read."""
    largest = max(shard.size for shard in made.dataset.manifest.shards)
    found: list[object] = []

    def reader(seed: int) -> None:
        dataset = Dataset.open(made.dataset.store, "data")
        try:
            for epoch in range(40):
                stream = SampleStream(dataset, batch_tokens=40, seed=seed, epoch=epoch, window_shards=1,
                                      cache_dir=tmp_path / "cache", cache_bytes=4 * largest)  # fmt: skip
                found.append(sum(len(batch.sample_ids) for batch in stream))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {20} and len(found) == 160


@pytest.mark.parametrize("moment", ["MappedShard", "crc32_file"])
def test_a_shard_evicted_between_two_steps_is_fetched_again(
    made: Made, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(SampleStream(made.dataset, batch_tokens=40, cache_dir=tmp_path / "cache"), made)
    gone: set[Path] = set()
    true = getattr(shard_cache, moment)

    def evicted_once(path: Path, *more: object) -> MappedShard | int:
        if path not in gone:
            gone.add(path)
            path.unlink()
        return true(path, *more)

    monkeypatch.setattr(shard_cache, moment, evicted_once)
    assert read(SampleStream(made.dataset, batch_tokens=40, cache_dir=tmp_path / "cache"), made) == 20
    assert len(gone) == len(made.dataset.manifest.shards)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)


def replaced(path: Path) -> None:
    """By a file of the same size, as another writer's rename would."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    flip(other)
    os.replace(other, path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip, "replaced": replaced, "truncated": lambda path: os.truncate(path, 100),
    "emptied": lambda path: os.truncate(path, 0), "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "gone": lambda path: path.unlink(),
}  # fmt: skip


@pytest.mark.parametrize("world", [1, 3], ids=["whole", "rows"])
@pytest.mark.parametrize("place", ["cache", "store"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_between_two_epochs_is_never_delivered(
    made: Made, tmp_path: Path, change: str, place: str, world: int
) -> None:
    """By the very reader that has verified it an epoch ago: it is fetched again, or refused."""
    dataset = made.dataset if place == "cache" else Dataset.open(LocalStore(tmp_path / "store"), "data")
    streams = [
        SampleStream(dataset, batch_tokens=40, rank=rank, world=world, cache_dir=tmp_path / "cache")
        for rank in range(world)
    ]
    assert sum(read(stream, made) for stream in streams) == 20
    for path in (tmp_path / place).rglob("*.safetensors"):
        CHANGES[change](path)
    mapped = place == "store"
    refused = 0
    for stream in streams:
        stream.set_epoch(1)
        try:
            read(stream, made)
        except DatasetError as error:
            refused += 1
            assert mapped or "fetches it again" in str(error)
    if mapped and (world == 1 or change != "flipped"):  # the one flipped bit may lie in no rank's rows
        assert refused
    elif change in ("truncated", "emptied", "longer", "gone"):
        assert not refused


def test_a_shard_that_may_not_be_read_is_no_full_cache(made: Made, tmp_path: Path) -> None:
    shard = next((tmp_path / "store").rglob("*.safetensors"))
    shard.unlink()
    shard.mkdir()
    with pytest.raises(StoreError, match=f"store/data: .*{shard.name}.*Check its owner"):
        list(SampleStream(Dataset.open(LocalStore(tmp_path / "store"), "data"), batch_tokens=40))
