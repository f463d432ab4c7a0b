"""Reading a committed dataset: its manifest, its samples, the rows of any of them, and whether all of it is intact."""

import hashlib
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from eyas_capture import contract
from hidden_states.dataset_writer import MANIFEST, DatasetWriter, check_name
from hidden_states.errors import DatasetError
from hidden_states.fingerprint import Fingerprint
from hidden_states.manifest import HELD_OUT, Blob, Manifest, ShardRecord, Sidecar, read_table
from hidden_states.samples import sample_digest
from hidden_states.shard_file import SampleRows, StoredRows, rows_from_bytes
from hidden_states.shard_layout import SampleEntry, Span
from hidden_states.store import ObjectMissing, Store, open_store
from hidden_states.vocab import VocabMap

__all__ = ["Dataset", "DatasetWriter", "Verification", "list_datasets", "remove_dataset"]


@dataclass
class Verification:
    """What a look at the stored bytes found. `problems` is empty when all that was looked at is intact."""

    full: bool
    shards: int = 0
    samples_read: int = 0
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)


class Dataset:
    """A committed dataset. Made by `Dataset.open`; cheap to pickle."""

    def __init__(self, store: Store, name: str, manifest: Manifest) -> None:
        self.store, self.name, self.manifest = store, name, manifest

    @classmethod
    def open(cls, store: Store, name: str) -> "Dataset":
        """Raises DatasetError when there is no committed dataset of that name, StoreError when the store fails."""
        check_name(name)
        where = store.object_uri(f"{name}/{MANIFEST}")
        try:
            data = store.get_bytes(f"{name}/{MANIFEST}")
        except ObjectMissing:
            batches = sum(info.key.endswith(".json") for info in store.list(f"{name}/shards/"))
            found = f"no manifest, {batches} batches" if batches else "nothing"
            raise DatasetError(
                store.object_uri(name),
                f"{found} there",
                "a committed dataset",
                "Run the extraction to its end." if batches else "Check name and prefix.",
            ) from None
        return cls(store, name, Manifest.from_bytes(data, where))

    @classmethod
    def open_uri(cls, uri: str, **access: Any) -> "Dataset":
        """The dataset at `s3://bucket/prefix/name` or `file:///folder/name`; `access` as for `open_store`."""
        prefix, _, name = uri.rstrip("/").rpartition("/")
        return cls.open(open_store(prefix, **access), name)

    @property
    def uri(self) -> str:
        return self.store.object_uri(self.name)

    @property
    def digest(self) -> str:
        """Hex sha256 of the manifest's bytes: the identity of the dataset's content."""
        return self.manifest.digest

    @property
    def fingerprint(self) -> Fingerprint:
        return self.manifest.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "name": self.name, "manifest": self.manifest}

    @cached_property
    def samples(self) -> pa.Table:
        """A row a sample: id, source, tokens, loss_tokens, shard (index into the manifest's), row, split, digest,
        checksums (in the order of `Manifest.captured_tensors`)."""
        table = read_table(self._blob(self.manifest.table), self.uri, self.manifest.encoding)
        shards = 1 + max(table["shard"].to_pylist(), default=-1)
        if (len(table), shards) != (self.manifest.samples, len(self.manifest.shards)):
            raise DatasetError(
                self.uri, f"a table of {len(table)} samples in {shards} shards",
                f"{self.manifest.samples} in {len(self.manifest.shards)}, as the manifest says",
                "Verify the dataset; its manifest was edited or is of another one.",
            )  # fmt: skip
        return table

    @cached_property
    def sample_ids(self) -> list[str]:
        """Of all samples, in the order of `samples`."""
        return self.samples["id"].to_pylist()

    @cached_property
    def _index(self) -> dict[str, int]:
        return {id: index for index, id in enumerate(self.sample_ids)}

    def vocab_map(self) -> VocabMap:
        """Raises DatasetError when the dataset was committed without one."""
        if self.manifest.vocab_map is None:
            raise DatasetError(self.uri, "no vocabulary map in it", None, "Commit the dataset with one.")
        return VocabMap.from_bytes(self._blob(self.manifest.vocab_map), self.uri)

    def key(self, record: ShardRecord) -> str:
        """The shard's key in the store."""
        return f"{self.name}/{record.key}"

    @cached_property
    def _places(self) -> list[list[int]]:
        return [self.samples[name].to_pylist() for name in ("shard", "row", "tokens")]

    def place(self, index: int) -> tuple[int, int, int]:
        """Shard index, first row and tokens of row `index` of `samples`; cheaper than `entry`."""
        shards, rows, tokens = self._places
        return shards[index], rows[index], tokens[index]

    @cached_property
    def _final_places(self) -> list[list[int]]:
        names = [name for name in ("final_row", "final_rows") if name in self.samples.column_names]
        return [self.samples[name].to_pylist() for name in names] or self._places[1:]

    def span(self, index: int) -> Span:
        """Where row `index` of `samples` lies in its shard."""
        _, rows, tokens = self._places
        final_rows, final_counts = self._final_places
        return Span(rows[index], tokens[index], final_rows[index], final_counts[index])

    def entry(self, index: int) -> tuple[int, SampleEntry]:
        """Shard index and entry of row `index` of `samples`."""
        row = self.samples.slice(index, 1).to_pylist()[0]
        checksums = dict(zip(self.manifest.captured_tensors(), row["checksums"], strict=True))
        names = ("id", "digest", "source", "row", "tokens", "loss_tokens", "final_row", "final_rows")
        return row["shard"], SampleEntry(**{name: row[name] for name in names if name in row}, checksums=checksums)

    def read(self, sample_id: str) -> SampleRows:
        """One sample's rows, fetched by range and verified against the digests from their capture.

        Raises:
            DatasetError: no such sample, or its rows are damaged.
        """
        return self.read_stored(sample_id).decoded()

    def read_tokens(self, sample_id: str) -> tuple[list[int], list[int]]:
        """One sample's token ids and loss mask, without its states.

        Raises:
            DatasetError: no such sample, or they are damaged.
        """
        shard, entry = self._entry_of(sample_id)
        key, spans = self.key(self.manifest.shards[shard]), self.manifest.layout(shard).sample_spans(*entry.span)
        ids, mask = (self.store.get_range(key, *spans[name]) for name in (contract.INPUT_IDS, "loss_mask"))
        found = memoryview(ids).cast("q").tolist(), list(mask)
        if sample_digest(*found) != entry.digest:
            raise damaged(self.store.object_uri(key), f"sample {sample_id}: tokens or mask differ from its digest")
        return found

    def read_stored(self, sample_id: str) -> StoredRows:
        """One sample's rows as they are kept; else as `read`."""
        shard, entry = self._entry_of(sample_id)
        record, layout = self.manifest.shards[shard], self.manifest.layout(shard)
        spans = layout.sample_spans(*entry.span)
        raw = {name: self.store.get_range(self.key(record), *span) for name, span in spans.items()}
        rows = rows_from_bytes(layout, raw)
        if problem := rows.problem(entry):
            raise damaged(self.store.object_uri(self.key(record)), f"sample {sample_id}: {problem}")
        return rows

    def _entry_of(self, sample_id: str) -> tuple[int, SampleEntry]:
        if sample_id not in self._index:
            raise DatasetError(self.uri, f"no sample {sample_id!r}", f"one of {self.manifest.samples} ids")
        return self.entry(self._index[sample_id])

    def verify(self, full: bool = True, samples: int = 64) -> Verification:
        """Re-reads what proves the dataset; `problems` has one line for each thing wrong.

        Sizes, sidecars, table and vocabulary map are always looked at. `full` reads every byte and compares each
        shard's sha256; otherwise `samples` samples, the same ones every time, are read and compared with the digests
        from their capture.
        """
        report = Verification(full)
        with ThreadPoolExecutor(4, thread_name_prefix="eyas-verify") as pool:
            numbers = range(len(self.manifest.shards))
            sidecars = []
            for problems, bytes_read, sidecar in pool.map(lambda number: self._verify_shard(number, full), numbers):
                report.shards += 1
                report.bytes_read += bytes_read
                report.problems += problems
                sidecars.append(sidecar)
        for blob in filter(None, (self.manifest.table, self.manifest.vocab_map)):
            try:
                self._blob(blob)
            except (DatasetError, ObjectMissing) as exc:
                report.problems.append(str(exc))
        if not report.problems:
            try:
                report.problems += self._misstated([sidecar for sidecar in sidecars if sidecar is not None])
            except DatasetError as exc:
                report.problems.append(str(exc))
        if not full and not report.problems:
            count = min(samples, self.manifest.samples)
            for sample_id in random.Random(self.digest).sample(self.sample_ids, count):
                try:
                    rows = self.read_stored(sample_id)
                except DatasetError as exc:
                    report.problems.append(str(exc))
                else:
                    report.bytes_read += sum(tensor.nbytes for tensor in rows.tensors.values())
                report.samples_read += 1
        return report

    def _misstated(self, sidecars: list[Sidecar]) -> list[str]:
        """What the manifest and the table say of the whole, and the sidecars do not."""
        entries = [entry for sidecar in sidecars for entry in sidecar.info.samples]
        splits = self.samples["split"].to_pylist()
        made = {
            "samples": len(entries),
            "held_out_samples": splits.count(HELD_OUT),
            "tokens": sum(entry.tokens for entry in entries),
            "loss_tokens": sum(entry.loss_tokens for entry in entries),
            "total_bytes": sum(sidecar.info.bytes for sidecar in sidecars),
            "left_out": {id: reason for sidecar in sidecars for id, reason in sidecar.info.left_out.items()},
        }
        where = self.store.object_uri(f"{self.name}/{MANIFEST}")
        problems = [
            f"{where}: {name} is {getattr(self.manifest, name)}; its parts make it {value}"
            for name, value in made.items()
            if getattr(self.manifest, name) != value
        ]
        if self.sample_ids != [entry.id for entry in entries]:
            problems.append(f"{self.uri}: the table's samples are not those of the sidecars")
        return problems

    def _verify_shard(self, number: int, full: bool) -> tuple[list[str], int, Sidecar | None]:
        record = self.manifest.shards[number]
        key = self.key(record)
        where = self.store.object_uri(key)
        info = self.store.head(key)
        if info is None:
            return [f"{where}: missing"], 0, None
        if info.bytes != record.size:
            return [f"{where}: {info.bytes} bytes; expected {record.size}"], 0, None
        problems, sidecar = [], None
        sidecar_key = re.sub(r"\.safetensors$", ".json", key)
        try:
            sidecar = Sidecar.from_bytes(self.store.get_bytes(sidecar_key), self.store.object_uri(sidecar_key))
            if sidecar.info.sha256 != record.sha256 or sidecar.fingerprint != self.fingerprint:
                problems.append(f"{where}: its sidecar is of another shard or fingerprint")
            ours = (record.batch, record.crc32, self.manifest.layout(number), self.manifest.final_norm)
            if (sidecar.info.batch_id, sidecar.info.digest.crc32, sidecar.info.layout, sidecar.info.final_norm) != ours:
                problems.append(f"{where}: its sidecar says otherwise than the manifest what lies in it, and how")
        except (ObjectMissing, DatasetError) as exc:
            problems.append(str(exc))
        if not full:
            return problems, 0, sidecar
        sha = hashlib.sha256()
        for block in self.store.blocks(key, record.size):
            sha.update(block)
        if sha.hexdigest() != record.sha256:
            problems.append(f"{where}: sha256 {sha.hexdigest()[:16]}; expected {record.sha256[:16]}")
        return problems, record.size, sidecar

    def _blob(self, blob: Blob) -> bytes:
        where = f"{self.name}/{blob.key}"
        data = self.store.get_bytes(where)
        if Blob.of(blob.key, data) != blob:
            raise damaged(self.store.object_uri(where), f"{len(data)} bytes with another sha256 than the manifest's")
        return data


def damaged(where: str, found: str) -> DatasetError:
    """The refusal for bytes that are not what was captured."""
    return DatasetError(
        where,
        found,
        "the bytes that were captured",
        "Verify the dataset and extract the damaged batches again; nothing was trained on these rows.",
    )


def list_datasets(store: Store) -> Iterator[Dataset]:
    """The committed datasets under the store's prefix."""
    for info in store.list():
        name, _, rest = info.key.partition("/")
        if rest == MANIFEST:
            yield Dataset.open(store, name)


def remove_dataset(store: Store, name: str) -> int:
    """Deletes a dataset, its manifest first so that nobody reads a half of it; returns the number of objects."""
    check_name(name)
    store.delete(f"{name}/{MANIFEST}")
    keys = [info.key for info in store.list(f"{name}/")]
    for key in keys:
        store.delete(key)
    return len(keys) + 1
