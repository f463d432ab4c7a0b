"""Writing a dataset: batch after batch, from any number of workers, with the bucket as the only memory.

A batch's shard has one name. The first upload of it wins (If-None-Match); whoever comes second takes the object that is
there, once it has proved itself, and writes the same sidecar, for the sidecar is a function of the shard alone. So it
does not matter how often a batch is done, by whom, or between which two steps a worker was killed.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hidden_states.errors import DatasetError
from hidden_states.fingerprint import Fingerprint
from hidden_states.manifest import HELD_OUT, TRAIN, Blob, Manifest, ShardRecord, Sidecar, canonical, samples_table
from hidden_states.samples import is_held_out
from hidden_states.shard_file import open_shard
from hidden_states.shard_layout import ShardInfo
from hidden_states.store import ObjectExists, ObjectMissing, Store

MANIFEST, TABLE, VOCAB_MAP = "manifest.json", "samples.parquet", "vocab_map.safetensors"
FINGERPRINT, SHARDS = "fingerprint.json", "shards"
PARTS_OF_WRITER = frozenset({MANIFEST, TABLE, VOCAB_MAP, FINGERPRINT, SHARDS})
_OBJECT = re.compile(r"(?P<batch>[^/]+)-(?P<fingerprint>[0-9a-f]{16})\.(?P<kind>json|safetensors)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_READERS = 16
DEAD_UPLOAD_S = 6 * 3600.0  # a shard is minutes under way; S3 itself refuses parts that take over 15


def check_name(name: str) -> str:
    """Raises DatasetError for a name that is not one folder."""
    if not _NAME.fullmatch(name):
        raise DatasetError(
            f"dataset {name!r}", "not a name", "letters, digits, `.`, `_`, `-`", "Rename it in the recipe."
        )
    return name


class DatasetWriter:
    """One dataset being written. Safe to use from several threads, processes and machines at once.

    Raises:
        StoreError: from every method that talks to the store.
        DatasetError: from every method, when the dataset holds batches of another fingerprint.
    """

    def __init__(self, store: Store, name: str, fingerprint: Fingerprint) -> None:
        self.store, self.name, self.fingerprint = store, check_name(name), fingerprint
        self._checked = False

    @property
    def uri(self) -> str:
        return self.store.object_uri(self.name)

    def key(self, *parts: str) -> str:
        return "/".join((self.name, *parts))

    def shard_key(self, batch_id: str, kind: str = "safetensors") -> str:
        return self.key(SHARDS, f"{batch_id}-{self.fingerprint.short}.{kind}")

    def claim(self) -> None:
        """Say what this dataset's states are comparable with; the first to say so counts, before there is a batch.

        Raises:
            DatasetError: another run, here or on another host, has begun it with another fingerprint.
        """
        try:
            self.store.put_bytes(self.key(FINGERPRINT), canonical(dict(self.fingerprint.fields)), if_none_match=True)
        except ObjectExists:
            theirs = Fingerprint(json.loads(self.store.get_bytes(self.key(FINGERPRINT))))
            if theirs.digest != self.fingerprint.digest:
                self._refuse_other(theirs)

    def discard(self, batch_id: str) -> None:
        """Take a committed batch back, for it is to be captured again. Raises DatasetError in a committed dataset."""
        self._refuse_committed(self.shard_key(batch_id), "its dataset is committed", "one that is not")
        self.store.delete(self.shard_key(batch_id, "json"))
        self.store.delete(self.shard_key(batch_id))

    def done(self) -> dict[str, Sidecar]:
        """Batch id -> sidecar, for the batches that are committed and whose shard is there with its right size.

        A shard without a sidecar is a batch not done; a sidecar without its shard too: such a batch is done again.
        """
        sizes: dict[str, int] = {}
        batches = []
        for info in self.store.list(self.key(SHARDS, "")):
            match = _OBJECT.fullmatch(info.key.rpartition("/")[2])
            if match is None:
                continue
            if match["kind"] == "safetensors":
                sizes[info.key] = info.bytes
            elif match["fingerprint"] == self.fingerprint.short:
                batches.append(match["batch"])
            else:
                self._refuse_foreign(info.key)
        with ThreadPoolExecutor(_READERS, thread_name_prefix="eyas-sidecar") as pool:
            sidecars = list(pool.map(self._sidecar, batches))
        self._checked = True
        return {
            batch: sidecar
            for batch, sidecar in zip(batches, sidecars, strict=True)
            if sidecar is not None and sizes.get(self.shard_key(batch)) == sidecar.info.bytes
        }

    def committed(self, batch_id: str) -> Sidecar | None:
        """The sidecar of a batch that is committed by now, by whomever. One whose shard is gone is removed."""
        found = self._sidecar(batch_id)
        if found is None:
            return None
        there = self.store.head(self.shard_key(batch_id))
        if there is not None and there.bytes == found.info.bytes:
            return found
        self.store.delete(self.shard_key(batch_id, "json"))
        return None

    def commit_batch(self, info: ShardInfo) -> Sidecar:
        """Uploads a packed shard (`info.path`), proves it, and writes the sidecar last.

        When this returns, the local file can be deleted. A batch that is committed already is left as it is, and its
        sidecar returned.
        """
        if info.path is None:
            raise ValueError(f"the shard of batch {info.batch_id} has no file")
        self._check_info(info)
        if not self._checked:
            self._look_for_foreign()
        if committed := self.committed(info.batch_id):
            return committed
        key = self.shard_key(info.batch_id)
        try:
            self.store.put_file(key, info.path, info.digest, if_none_match=True)
        except ObjectExists:
            info = self._settle(key, info)
        sidecar = Sidecar(replace(info, path=None), self.fingerprint)
        self.store.put_bytes(self.shard_key(info.batch_id, "json"), sidecar.to_bytes())
        return sidecar

    def commit_manifest(
        self,
        batch_ids: Iterable[str],
        *,
        vocab_map: bytes | None = None,
        coverage: float | None = None,
        held_out_share: float = 0.0,
        held_out: Collection[str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Commits the dataset: exactly the planned batches. Done twice with the same content, it is the same commit.

        Args:
            vocab_map: `VocabMap.to_bytes()`, with its `coverage`.
            held_out_share: share of the samples that training must not see, drawn by their digests.
            held_out: the ids of those samples, where the caller has drawn them (by prompt, say).
            extra: see `Manifest`.

        Raises:
            DatasetError: batches are missing, or the dataset is committed with another content.
        """
        wanted = sorted(set(batch_ids))
        done = self.done()
        missing = [batch for batch in wanted if batch not in done]
        if missing or not wanted:
            found = f"{len(missing)} of {len(wanted)} batches are not committed ({', '.join(missing[:3])})"
            raise DatasetError(
                self.uri, found, "every planned batch", "Run the extraction again: it resumes with these."
            )
        manifest, blobs = self._manifest(
            [done[b] for b in wanted], vocab_map, coverage, held_out_share, held_out, dict(extra or {})
        )
        self._refuse_other_manifest(manifest)
        replaced = {key: self._put_blob(key, data) for key, data in blobs.items()}
        try:
            self.store.put_bytes(self.key(MANIFEST), manifest.to_bytes(), if_none_match=True)
        except ObjectExists:  # by another worker, or by our own put whose answer was lost
            try:
                self._refuse_other_manifest(manifest)
            except DatasetError:  # a rival has committed since we looked: give it back what we have replaced
                for key, data in replaced.items():
                    if data is not None:
                        self._put_blob(key, data)
                raise
        for key, data in blobs.items():
            self._put_blob(key, data)  # a rival that is going to lose may have replaced one since
        return manifest

    def sweep(self, older_than_s: float = DEAD_UPLOAD_S) -> tuple[str, ...]:
        """Aborts uploads of this dataset that never ended and are too old to be anybody's; returns their keys."""
        return self.store.abort_stale_uploads(self.key(SHARDS, ""), older_than_s)

    # -- batches

    def _sidecar(self, batch_id: str) -> Sidecar | None:
        key = self.shard_key(batch_id, "json")
        try:
            return Sidecar.from_bytes(self.store.get_bytes(key), self.store.object_uri(key))
        except ObjectMissing:
            return None

    def _look_for_foreign(self) -> None:
        for info in self.store.list(self.key(SHARDS, "")):
            match = _OBJECT.fullmatch(info.key.rpartition("/")[2])
            if match and match["kind"] == "json" and match["fingerprint"] != self.fingerprint.short:
                self._refuse_foreign(info.key)
        self._checked = True

    def _refuse_foreign(self, sidecar_key: str) -> None:
        where = self.store.object_uri(sidecar_key)
        self._refuse_other(Sidecar.from_bytes(self.store.get_bytes(sidecar_key), where).fingerprint)

    def _refuse_other(self, theirs: Fingerprint) -> None:
        differing = "; ".join(self.fingerprint.differences(theirs)) or "nothing but the name"
        raise DatasetError(
            self.uri, f"holds batches of another fingerprint; ours / theirs differ in {differing}",
            "one fingerprint a dataset", "Give this capture another dataset name, or remove the old one.",
        )  # fmt: skip

    def _check_info(self, info: ShardInfo) -> None:
        ours = self.fingerprint.fields
        found = {
            "after_block": list(info.layout.after_block),
            "final_norm": info.final_norm,
            "dtype": info.layout.dtype,
        }
        encoded = info.layout.encoding.fingerprint_fields()
        if {name: ours[name] for name in ("kept",) if name in ours} != encoded:
            raise DatasetError(
                f"shard of batch {info.batch_id}",
                f"its states are kept as {info.layout.encoding.in_words()}",
                f"{ours.get('kept', 'captured')}, as the fingerprint says",
                "One dataset keeps all its states alike.",
            )
        for name, value in found.items():
            expected = ours.get(name, value)
            if (list(expected) if isinstance(expected, list | tuple) else expected) != value:
                raise DatasetError(
                    f"shard of batch {info.batch_id}",
                    f"{name} is {value}",
                    f"{expected}, the fingerprint's",
                    "The server was restarted with other settings.",
                )

    def _settle(self, key: str, info: ShardInfo) -> ShardInfo:
        """The shard under a taken name: the one that is there if it is ours or intact, else ours put again."""
        assert info.path is not None
        there = self.store.head(key)
        if there is not None and there.crc32 == info.digest.crc32 and there.bytes == info.bytes:
            return info
        if there is not None:
            found = self._read_back(key, there.bytes, info)
            if found is not None:
                return found
            self._refuse_committed(key, "is damaged, and its dataset is committed", "the shard the manifest names")
            self.store.delete(key)
        self.store.put_file(key, info.path, info.digest, if_none_match=True)
        return info

    def _read_back(self, key: str, size: int, ours: ShardInfo) -> ShardInfo | None:
        """What the stored shard says of itself, when all of it is true and it is of the same batch; else None.

        Which of the batch's samples it holds and which it leaves out is its own affair: whoever was first, counts.
        """
        assert ours.path is not None
        copy = ours.path.with_name(f"{ours.path.name}.stored")
        try:
            digest = self.store.download(key, size, copy)
            if digest == ours.digest:
                return ours
            shard, found = open_shard(copy, digest)
            same = found.batch_id == ours.batch_id and found.layout.after_block == ours.layout.after_block
            same = same and found.layout.encoding == ours.layout.encoding
            same = same and _accounted(found) == _accounted(ours)
            if same and all(shard.rows(*e.span).problem(e) is None for e in found.samples):
                return found
            return None
        except DatasetError:
            return None
        finally:
            copy.unlink(missing_ok=True)

    def _refuse_committed(self, key: str, found: str, expected: str) -> None:
        if self.store.head(self.key(MANIFEST)) is not None:
            raise DatasetError(
                self.store.object_uri(key), found, expected,
                "A committed dataset never changes: verify it, and extract it anew under another name.",
            )  # fmt: skip

    # -- manifest

    def _manifest(
        self,
        sidecars: list[Sidecar],
        vocab_map: bytes | None,
        coverage: float | None,
        held_out_share: float,
        held_out: Collection[str] | None,
        extra: dict[str, Any],
    ) -> tuple[Manifest, dict[str, bytes]]:
        infos = [sidecar.info for sidecar in sidecars]
        entries = [entry for info in infos for entry in info.samples]
        if held_out is None:
            held_out = {e.id for e in entries if is_held_out(e.digest, held_out_share)}
        splits = {e.id: HELD_OUT if e.id in held_out else TRAIN for e in entries}
        blobs = {TABLE: samples_table(sidecars, splits)}
        if vocab_map is not None:
            blobs[VOCAB_MAP] = vocab_map
        first = infos[0].layout
        manifest = Manifest(
            name=self.name,
            fingerprint=self.fingerprint,
            after_block=first.after_block,
            hidden_size=first.hidden_size,
            dtype=first.dtype,
            final_norm=infos[0].final_norm,
            shards=tuple(
                ShardRecord(
                    info.batch_id,
                    self.shard_key(info.batch_id).removeprefix(f"{self.name}/"),
                    info.bytes,
                    info.sha256,
                    info.digest.crc32,
                    info.layout.data_start,
                    info.layout.tokens,
                    info.layout.samples,
                    info.layout.taught,
                )
                for info in infos
            ),
            table=Blob.of(TABLE, blobs[TABLE]),
            vocab_map=Blob.of(VOCAB_MAP, vocab_map) if vocab_map is not None else None,
            coverage=coverage,
            samples=len(entries),
            held_out_samples=sum(split == HELD_OUT for split in splits.values()),
            held_out_share=held_out_share,
            tokens=sum(info.layout.tokens for info in infos),
            loss_tokens=sum(entry.loss_tokens for entry in entries),
            total_bytes=sum(info.bytes for info in infos),
            left_out={id: reason for info in infos for id, reason in info.left_out.items()},
            extra=extra,
            encoding=first.encoding,
        )
        return manifest, blobs

    def _refuse_other_manifest(self, manifest: Manifest) -> None:
        where = self.store.object_uri(self.key(MANIFEST))
        try:
            data = self.store.get_bytes(self.key(MANIFEST))
        except ObjectMissing:
            return
        if data == manifest.to_bytes():
            return
        theirs = Manifest.from_bytes(data, where)
        differing = [name for name in vars(theirs) if getattr(theirs, name) != getattr(manifest, name)]
        raise DatasetError(
            where,
            f"committed already, with other content (digest {theirs.digest[:16]}; ours / theirs "
            f"differ in {', '.join(differing)})",
            f"digest {manifest.digest[:16]} or no manifest",
            "A committed dataset never changes. Give this one another name.",
        )

    def _put_blob(self, key: str, data: bytes) -> bytes | None:
        """Puts a file of the dataset unless it is there; returns what it replaced."""
        try:
            there = self.store.get_bytes(self.key(key))
        except ObjectMissing:
            there = None
        if there == data:
            return None
        self.store.put_bytes(self.key(key), data)
        return there


def _accounted(info: ShardInfo) -> list[str]:
    """Ids of the batch's samples: in the shard or left out of it."""
    return sorted([*(entry.id for entry in info.samples), *info.left_out])
