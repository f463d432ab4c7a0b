"""A manifest or a sidecar that somebody has edited: refused by its name, or named by `verify`; never a traceback, and
never called intact."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hidden_states.dataset import Dataset
from hidden_states.errors import DatasetError, StoreError
from hidden_states.manifest import Manifest, Sidecar
from hidden_states.store import Store, open_store
from hidden_states.stream import SampleStream
from tests.hidden_states.stored import edits, make_dataset

UNPROVED = ("coverage", "extra", "held_out_share", "name")  # of the manifest: nothing else in the dataset says it


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("manifest")
    store = open_store((folder / "store").as_uri())
    make_dataset(store, folder, [5, 6, 9, 7, 3], shard_tokens=10, held_out_share=0.3)
    return store


def verified(store: Store, full: bool) -> bool:
    return not Dataset.open(store, "data").verify(full).problems


def read(store: Store) -> bool:
    """Whether it reads to its end; what it reads is proved by itself."""
    return bool(list(SampleStream(Dataset.open(store, "data"), batch_tokens=64)))


USES: dict[str, Callable[[Store], bool]] = {
    "verify": lambda store: verified(store, True), "sample": lambda store: verified(store, False), "read": read,
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_an_edited_manifest_is_refused_or_named(store: Store, use: str) -> None:
    good = store.get_bytes("data/manifest.json")
    try:
        for place, edited in edits(json.loads(good)):
            store.put_bytes("data/manifest.json", json.dumps(edited).encode())
            with contextlib.suppress(DatasetError, StoreError):
                assert not USES[use](store) or use == "read" or place[0] in UNPROVED, (place, edited)
    finally:
        store.put_bytes("data/manifest.json", good)
    assert USES[use](store)


def test_an_edited_sidecar_is_named_by_verify(store: Store) -> None:
    key = next(info.key for info in store.list("data/shards/") if info.key.endswith(".json"))
    good = store.get_bytes(key)
    try:
        for place, edited in edits(json.loads(good)):
            store.put_bytes(key, json.dumps(edited).encode())
            in_a_row = place[:2] == ("samples", 0) and len(place) > 2  # the table has them too, and is what is read
            assert not verified(store, True) or in_a_row, (place, edited)
    finally:
        store.put_bytes(key, good)
    assert verified(store, True)


NO_LEDGERS = (
    "", "null", "5", '"x"', "[]", "{}", "[" * 100_000, '{"format":' * 900 + "1" + "}" * 900, "\ud800",
    '{"format": []}', '{"format": "eyas-dataset/1"}',
)  # fmt: skip


@pytest.mark.parametrize("of", [Manifest, Sidecar])
@pytest.mark.parametrize("text", NO_LEDGERS)
def test_what_is_no_ledger_at_all_is_refused(of: type[Manifest | Sidecar], text: str) -> None:
    with pytest.raises(DatasetError, match=r"^here: not a (manifest|sidecar)"):
        of.from_bytes(text.encode("utf-8", "surrogatepass"), "here")


def test_a_manifest_without_crc32_is_refused_before_anything_is_read(store: Store, tmp_path: Path) -> None:
    fields = json.loads(store.get_bytes("data/manifest.json"))
    for shard in fields["shards"]:
        del shard["crc32"]
    with pytest.raises(DatasetError, match=r"crc32.*Another version wrote it"):
        Manifest.from_bytes(json.dumps(fields).encode(), "here")
