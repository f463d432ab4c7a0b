"""Reading shards: a sample's rows out of a file or out of ranged reads, and whether they are what was captured."""

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas_capture import contract
from hidden_states.captured_rows import raw_bytes
from hidden_states.encoding import FLOAT8, INT8, TOP_K, Encoding, dequantise, taught_rows
from hidden_states.errors import DatasetError
from hidden_states.manifest import check_kinds
from hidden_states.samples import sample_digest
from hidden_states.shard_layout import (
    CODES,
    DTYPES,
    ENCODED_FORMAT,
    SHARD_FORMAT,
    SampleEntry,
    ShardInfo,
    ShardLayout,
)
from hidden_states.store import FileDigest
from hidden_states.top_k import TopLogits


@dataclass(frozen=True)
class SampleRows:
    """One sample's rows: `input_ids` [S] int64, `loss_mask` [S] uint8, `aux` [S,A,H], `final` [S,H].

    Rows of the final state that were not kept are NaN: whoever uses one of them sees it at once. Where top-k logits are
    kept in its place, `final` is [S,0] and they are in `top`.
    """

    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final: Tensor
    top: TopLogits | None = None


@dataclass(frozen=True)
class StoredRows:
    """One sample's rows as they are kept, by the names of `ShardLayout.tensors`."""

    layout: ShardLayout
    tensors: Mapping[str, Tensor]

    def problem(self, entry: SampleEntry) -> str | None:
        """What is wrong with the rows, measured against the entry's digest and checksums; None when they are intact."""
        ids, mask = self.tensors[contract.INPUT_IDS].tolist(), self.tensors["loss_mask"].tolist()
        if sample_digest(ids, mask) != entry.digest:
            return "tokens or mask differ from the sample's digest"
        blocks = {contract.block_tensor(block): i for i, block in enumerate(self.layout.after_block)}
        for name in self.layout.proved():
            rows = self.tensors["aux"][:, blocks[name]] if name in blocks else self.tensors[name]
            if contract.tensor_checksum(raw_bytes(rows)) != entry.checksums[name]:
                return f"{name} differs from its checksum at capture"
        return None

    def decoded(self) -> SampleRows:
        """The rows in the dtype they were captured in: views where nothing has to be undone."""
        ids, mask = self.tensors[contract.INPUT_IDS], self.tensors["loss_mask"]
        encoding, layout = self.layout.encoding, self.layout
        aux = self._states("aux", encoding.aux)
        kept = None if layout.taught is None else taught_rows(mask)
        if encoding.final == TOP_K:
            top = TopLogits(self.tensors["final_ids"], self.tensors["final_logits"])
            if kept is not None:
                every = TopLogits.nothing(len(mask), encoding.top_k)
                every.ids[kept], every.logits[kept] = top.ids, top.logits
                top = every
            return SampleRows(ids, mask, aux, torch.empty(len(mask), 0, dtype=layout.torch_dtype), top)
        final = self._states("final", encoding.final)
        if kept is not None:
            every_row = torch.full((len(mask), layout.hidden_size), torch.nan, dtype=final.dtype)
            every_row[kept] = final
            final = every_row
        return SampleRows(ids, mask, aux, final)

    def _states(self, name: str, kind: str) -> Tensor:
        dtype = self.layout.torch_dtype
        if kind in (FLOAT8, INT8):
            return dequantise(self.tensors[name], self.tensors[f"{name}_scale"], dtype)
        return self.tensors[name].to(dtype)


class MappedShard:
    """A shard file in memory-mapped form; tensors are views of the file and live as long as this object is open.

    The file may have holes (a cache that fetched some samples only): the caller knows which rows are there.
    `state`: of the file as it was mapped, see `file_state`.
    """

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self.layout = layout
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            self.state, size = file_state(status), status.st_size
            if size != layout.file_bytes:
                raise DatasetError(str(path), f"{size} bytes", f"{layout.file_bytes}", "The file is truncated.")
            # A private mapping counts as writable for torch.frombuffer, but nobody writes to it.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def rows(self, row: int, tokens: int, final_row: int | None = None, final_rows: int | None = None) -> StoredRows:
        """Views of one sample's rows (a `Span`'s four figures)."""
        spans = self.layout.sample_spans(row, tokens, final_row, final_rows)
        return StoredRows(
            self.layout,
            {name: _view(self.layout, name, self._map, start, size) for name, (start, size) in spans.items()},
        )


def file_state(status: os.stat_result) -> str:
    """Another one as soon as the file is written to or replaced: what was verified before says nothing of it then."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def rows_from_bytes(layout: ShardLayout, raw: Mapping[str, bytes]) -> StoredRows:
    """The rows of a sample from the bytes of its spans (`ShardLayout.sample_spans`)."""
    return StoredRows(layout, {name: _view(layout, name, bytearray(data), 0, len(data)) for name, data in raw.items()})


def _view(layout: ShardLayout, name: str, buffer: mmap.mmap | bytearray, start: int, size: int) -> Tensor:
    _, shape, row_bytes = layout.tensors()[name]
    dtype = layout.torch_dtype_of(name)
    if size == 0:  # torch.frombuffer refuses an empty view
        return torch.empty(0, *shape[1:], dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=size // dtype.itemsize, offset=start)
    return flat.view(size // row_bytes, *shape[1:])


def open_shard(path: Path, digest: FileDigest) -> tuple[MappedShard, ShardInfo]:
    """A shard file that explains itself: nothing but its own header is needed.

    Raises:
        DatasetError: not one of our shards, or truncated.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > os.fstat(file.fileno()).st_size:
                raise ValueError("a header longer than the file")
            entries = json.loads(file.read(length))
        facts = json.loads(entries["__metadata__"]["eyas"])
        if facts["format"] not in (SHARD_FORMAT, ENCODED_FORMAT):
            raise ValueError(f"format {facts['format']}")
        code, (tokens, _, hidden_size) = entries["aux"]["dtype"], entries["aux"]["shape"]
        dtype = facts.get("dtype") or next(name for name, torch_dtype in DTYPES.items() if CODES[torch_dtype] == code)
        samples = tuple(SampleEntry(**sample) for sample in facts["samples"])
        layout = ShardLayout(
            8 + length, tokens, len(samples), tuple(facts["after_block"]), hidden_size, dtype,
            Encoding.of(facts.get("encoding", {}), str(path)), facts.get("taught"),
        )  # fmt: skip
        info = ShardInfo(facts["batch"], digest, layout, facts["final_norm"], samples, facts["left_out"], path)
        _check_header(info, entries)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, StopIteration, RecursionError) as exc:
        raise DatasetError(
            str(path), f"not a shard ({type(exc).__name__}: {exc})", SHARD_FORMAT, "Is it another file?"
        ) from exc
    return MappedShard(path, layout), info


def _check_header(info: ShardInfo, entries: Mapping[str, Any]) -> None:
    """Whether what a header says of the samples and of the tensors is of the right kind, and fits together.

    Raises:
        ValueError, TypeError: it does not.
    """
    layout, row = info.layout, 0
    for part in (info, layout, *info.samples):
        check_kinds(part)
    for sample in info.samples:
        if sample.row != row or not sample.tokens or set(layout.proved()) - set(sample.checksums):
            raise ValueError(f"sample {sample.id} of {sample.tokens} tokens at row {sample.row}")
        if sum(sample.span[2:]) > (layout.tokens if layout.taught is None else layout.taught):
            raise ValueError(f"sample {sample.id} has final states beyond the last")
        row += sample.tokens
    ours = {**json.loads(layout.header({})[8:]), "__metadata__": entries["__metadata__"]}
    if row != layout.tokens or entries != ours:
        raise ValueError(f"its tensors are not those of {len(info.samples)} samples of {row} tokens")
