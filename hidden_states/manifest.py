"""The two ledgers of a dataset: a sidecar for each batch, and the manifest that commits the whole.

Both are canonical JSON: equal content, equal bytes. Nothing in them depends on when, where or by whom they were
written, so writing them twice is harmless and the manifest's sha256 names the dataset's content.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from types import UnionType
from typing import Any, get_origin

import pyarrow as pa
import pyarrow.parquet as pq

from hidden_states.encoding import PLAIN, TAUGHT, Encoding
from hidden_states.errors import DatasetError
from hidden_states.fingerprint import Fingerprint
from hidden_states.shard_layout import DTYPES, SampleEntry, ShardInfo, ShardLayout
from hidden_states.store import FileDigest, check_key

# The second of each is written where the states are kept otherwise than captured: a reader of the first refuses it.
SIDECAR_FORMATS = ("eyas-sidecar/1", "eyas-sidecar/2")
MANIFEST_FORMATS = ("eyas-dataset/1", "eyas-dataset/2")
TRAIN, HELD_OUT = "train", "held_out"

_TABLE = pa.schema(
    {
        "id": pa.string(),
        "source": pa.string(),
        "tokens": pa.int32(),
        "loss_tokens": pa.int32(),
        "shard": pa.int32(),
        "row": pa.int64(),
        "split": pa.string(),
        "digest": pa.string(),
        "checksums": pa.list_(pa.string()),
    }
)


_FINAL_PLACES = {"final_row": pa.int64(), "final_rows": pa.int32()}


def table_schema(encoding: Encoding) -> pa.Schema:
    """Of the samples table: where only some rows have a final state, it says where they are too."""
    more = _FINAL_PLACES if encoding.final_rows == TAUGHT else {}
    return pa.schema([*_TABLE, *(pa.field(name, kind) for name, kind in more.items())])


def canonical(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


_BLOCKS = tuple[int, ...]
_LARGEST = 1 << 63


def check_kinds(made: Any) -> None:
    """Whether every field of a dataclass holds what it is declared with; JSON holds whatever somebody has written.

    Raises:
        TypeError: a field holds another kind of value.
        ValueError: a whole number is negative or beyond 63 bits; all of them count or place something.
    """
    for name, kind, takes_whole, blocks in _kinds(made.__class__):
        value = getattr(made, name)
        numbers = value if blocks else (value,)
        if isinstance(value, bool) or not (isinstance(value, kind) or (takes_whole and type(value) is int)):
            raise TypeError(f"`{name}` is {value!r}")
        if blocks and any(type(number) is not int for number in numbers):
            raise TypeError(f"`{name}` is {value!r}")
        if any(type(number) is int and not 0 <= number < _LARGEST for number in numbers):
            raise ValueError(f"`{name}` is {value}")


@functools.cache  # a resumed run checks every sample there is
def _kinds(of: type) -> tuple[tuple[str, Any, bool, bool], ...]:
    """By field of a dataclass: its name, what it holds, whether 1 will do for 1.0, whether it is a list of blocks."""
    found = []
    for one in dataclass_fields(of):
        kind: Any = one.type if isinstance(one.type, UnionType) else get_origin(one.type) or one.type
        found.append((one.name, kind, isinstance(0.5, kind), one.type == _BLOCKS))
    return tuple(found)


@dataclass(frozen=True)
class Sidecar:
    """The commit of one batch: which shard holds it, what proves the shard, and what the shard is comparable with."""

    info: ShardInfo
    fingerprint: Fingerprint

    def to_bytes(self) -> bytes:
        info = self.info
        fields = asdict(replace(info, samples=())) | {"fingerprint": dict(self.fingerprint.fields)}
        fields["format"] = SIDECAR_FORMATS[not info.layout.encoding.plain]
        fields["layout"] = info.layout.as_dict()
        fields["samples"] = [entry.as_dict() for entry in info.samples]
        del fields["path"]  # where the packing worker had it
        return canonical(fields)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "Sidecar":
        """Raises DatasetError when it is none."""
        try:
            fields = json.loads(data)
            if fields.pop("format") not in SIDECAR_FORMATS:
                raise ValueError("another format")
            fingerprint = Fingerprint(fields.pop("fingerprint"))
            fields["digest"] = FileDigest(**fields["digest"])
            fields["layout"] = ShardLayout.of(fields["layout"], where)
            fields["samples"] = tuple(SampleEntry(**entry) for entry in fields["samples"])
            made = cls(ShardInfo(**fields), fingerprint)
            for part in (made.info, made.info.digest, made.info.layout, *made.info.samples):
                check_kinds(part)
            return made
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise DatasetError(
                where,
                f"not a sidecar ({type(exc).__name__}: {exc})",
                " or ".join(SIDECAR_FORMATS),
                "Delete it; the batch is captured again.",
            ) from exc


@dataclass(frozen=True)
class ShardRecord:
    """A shard in the manifest. `key` is relative to the dataset; `size` in bytes, `data_start` of them its header.
    `taught`: rows with a final state, where not all have one."""

    batch: str
    key: str
    size: int
    sha256: str
    crc32: int
    data_start: int
    tokens: int
    samples: int
    taught: int | None = None


@dataclass(frozen=True)
class Blob:
    """A further file of the dataset; `key` is relative to it, `size` in bytes."""

    key: str
    size: int
    sha256: str

    @classmethod
    def of(cls, key: str, data: bytes) -> "Blob":
        return cls(key, len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What a dataset is: counts are of all splits unless they say otherwise.

    Attributes:
        final_norm: "post": `final` is behind the target's final norm.
        left_out: sample id -> why it was given up on, for samples that were planned and are not in it.
        coverage: share of the tokens to learn that the draft vocabulary covers; None without a vocabulary map.
        encoding: how the states are kept.
        extra: what the caller adds (the recipe's part, the gate's figures). Nothing in it may change from run to run.
    """

    name: str
    fingerprint: Fingerprint
    after_block: tuple[int, ...]
    hidden_size: int
    dtype: str
    final_norm: str
    shards: tuple[ShardRecord, ...]
    table: Blob
    vocab_map: Blob | None
    coverage: float | None
    samples: int
    held_out_samples: int
    held_out_share: float
    tokens: int
    loss_tokens: int
    total_bytes: int
    left_out: dict[str, str]
    extra: dict[str, Any] = field(default_factory=dict)
    encoding: Encoding = PLAIN

    def to_bytes(self) -> bytes:
        fields = asdict(self) | {"fingerprint": dict(self.fingerprint.fields)}
        fields["format"] = MANIFEST_FORMATS[not self.encoding.plain]
        if self.encoding.plain:  # the bytes, and so the digest, of the first format
            del fields["encoding"]
        for shard in fields["shards"]:
            if shard["taught"] is None:
                del shard["taught"]
        return canonical(fields)

    @property
    def digest(self) -> str:
        """Hex sha256 of the manifest's bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "Manifest":
        """Raises DatasetError when it is none, or of a format this version does not read."""
        try:
            fields = json.loads(data)
            if (found := fields.pop("format")) not in MANIFEST_FORMATS:
                raise ValueError(f"format {found}")
            fields["encoding"] = Encoding.of(fields.get("encoding", {}), where)
            fields["fingerprint"] = Fingerprint(fields["fingerprint"])
            fields["after_block"] = tuple(fields["after_block"])
            fields["shards"] = tuple(ShardRecord(**shard) for shard in fields["shards"])
            fields["table"] = Blob(**fields["table"])
            fields["vocab_map"] = None if fields["vocab_map"] is None else Blob(**fields["vocab_map"])
            named = (*fields["shards"], fields["table"], fields["vocab_map"])
            for key in (part.key for part in named if part is not None):
                check_key(key)  # a name that leads out of the dataset is refused before anything is fetched
            made = cls(**fields)
            for part in filter(None, (made, *named)):
                check_kinds(part)
            made._check_sizes()
            return made
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise DatasetError(
                where,
                f"not a manifest ({type(exc).__name__}: {exc})",
                " or ".join(MANIFEST_FORMATS),
                "Another version wrote it, or the object is damaged.",
            ) from exc

    def _check_sizes(self) -> None:
        """Whether the shards' sizes follow from what is said of their content, as all places in them do."""
        if not self.shards or not self.after_block or self.dtype not in DTYPES:
            raise ValueError(f"{len(self.shards)} shards, blocks {list(self.after_block)}, dtype {self.dtype!r}")
        for number, record in enumerate(self.shards):
            if (expected := self.layout(number).file_bytes) != record.size:
                raise ValueError(f"{record.key} has {record.size} bytes, and what it is said to hold takes {expected}")

    def layout(self, shard: int) -> ShardLayout:
        record = self.shards[shard]
        return ShardLayout(
            record.data_start, record.tokens, record.samples, self.after_block, self.hidden_size, self.dtype,
            self.encoding, record.taught,
        )  # fmt: skip

    def captured_tensors(self) -> list[str]:
        """Names in the order of the table's `checksums`."""
        return self.layout(0).proved()


def samples_table(sidecars: Sequence[Sidecar], splits: Mapping[str, str]) -> bytes:
    """The table of all samples as Parquet, by shard and row. `splits`: sample id -> TRAIN or HELD_OUT."""
    rows = [(index, entry) for index, sidecar in enumerate(sidecars) for entry in sidecar.info.samples]
    layout = sidecars[0].info.layout
    names, schema = layout.proved(), table_schema(layout.encoding)
    columns = {
        "shard": [index for index, _ in rows],
        "split": [splits[entry.id] for _, entry in rows],
        "checksums": [[entry.checksums[name] for name in names] for _, entry in rows],
    }
    for name in set(schema.names) - set(columns):
        columns[name] = [getattr(entry, name) for _, entry in rows]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def read_table(data: bytes, where: str, encoding: Encoding) -> pa.Table:
    try:
        return pq.read_table(pa.BufferReader(data), schema=table_schema(encoding))
    except (pa.ArrowException, OSError) as exc:
        raise DatasetError(where, f"not a samples table ({exc})", None, "Verify the dataset.") from exc
