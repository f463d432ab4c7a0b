"""Reading shards: a sample's rows out of a file or out of ranged reads, and whether they are what was captured."""

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyas_capture import contract
from hidden_states.errors import DatasetError
from hidden_states.samples import sample_digest
from hidden_states.shard import CODES, DTYPES, SHARD_FORMAT, SampleEntry, ShardInfo, ShardLayout, raw_bytes
from hidden_states.store import FileDigest


@dataclass(frozen=True)
class SampleRows:
    """One sample's rows: `input_ids` [S] int64, `loss_mask` [S] uint8, `aux` [S,A,H], `final` [S,H]."""

    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final: Tensor

    def problem(self, entry: SampleEntry, after_block: Sequence[int]) -> str | None:
        """What is wrong with the rows, measured against the digests from the capture; None when they are intact."""
        if sample_digest(self.input_ids.tolist(), self.loss_mask.tolist()) != entry.digest:
            return "tokens or mask differ from the sample's digest"
        columns = {contract.block_tensor(block): self.aux[:, i] for i, block in enumerate(after_block)}
        for name, rows in {**columns, contract.FINAL: self.final}.items():
            if contract.tensor_checksum(raw_bytes(rows)) != entry.checksums[name]:
                return f"{name} differs from its checksum at capture"
        return None


class MappedShard:
    """A shard file in memory-mapped form; tensors are views of the file and live as long as this object is open.

    The file may have holes (a cache that fetched some samples only): the caller knows which rows are there.
    """

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self.layout = layout
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != layout.file_bytes:
                raise DatasetError(str(path), f"{size} bytes", f"{layout.file_bytes}", "The file is truncated.")
            # A private mapping counts as writable for torch.frombuffer, but nobody writes to it.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def rows(self, row: int, tokens: int) -> SampleRows:
        """Views of `tokens` rows from `row` on."""
        tensors = {}
        for name, (start, _) in self.layout.sample_spans(row, tokens).items():
            _, shape, _ = self.layout.tensors()[name]
            dtype = {contract.INPUT_IDS: torch.int64, "loss_mask": torch.uint8}.get(name, self.layout.torch_dtype)
            flat = torch.frombuffer(self._map, dtype=dtype, count=tokens * math.prod(shape[1:]), offset=start)
            tensors[name] = flat.view(tokens, *shape[1:])
        return SampleRows(**tensors)


def rows_from_bytes(layout: ShardLayout, tokens: int, raw: Mapping[str, bytes]) -> SampleRows:
    """The rows of a sample from the bytes of its four spans (`ShardLayout.sample_spans`)."""
    shape_A, size = len(layout.after_block), layout.hidden_size
    data = {name: bytearray(value) for name, value in raw.items()}
    return SampleRows(
        torch.frombuffer(data[contract.INPUT_IDS], dtype=torch.int64),
        torch.frombuffer(data["loss_mask"], dtype=torch.uint8),
        torch.frombuffer(data["aux"], dtype=layout.torch_dtype).view(tokens, shape_A, size),
        torch.frombuffer(data["final"], dtype=layout.torch_dtype).view(tokens, size),
    )


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
        if facts["format"] != SHARD_FORMAT:
            raise ValueError(f"format {facts['format']}")
        code, (tokens, hidden_size) = entries["final"]["dtype"], entries["final"]["shape"]
        dtype = next(name for name, torch_dtype in DTYPES.items() if CODES[torch_dtype] == code)
        samples = tuple(SampleEntry(**sample) for sample in facts["samples"])
        layout = ShardLayout(8 + length, tokens, len(samples), tuple(facts["after_block"]), hidden_size, dtype)
        info = ShardInfo(facts["batch"], digest, layout, facts["final_norm"], samples, facts["left_out"], path)
    except (ValueError, KeyError, TypeError, OverflowError, StopIteration) as exc:
        raise DatasetError(
            str(path), f"not a shard ({type(exc).__name__}: {exc})", SHARD_FORMAT, "Is it another file?"
        ) from exc
    return MappedShard(path, layout), info
