"""A sample's captured rows on their way into a shard: its tokens compared, its checksums proved as the rows pass."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas_capture import contract
from hidden_states.errors import DumpError
from hidden_states.samples import Sample
from hidden_states.shard_layout import ShardLayout

COPY_BYTES = 8 << 20  # rows copied at a time: the only memory packing needs besides the dumps' mapped files


class Captured(Protocol):
    """What packing needs of a capture: a `Dump`, or what an importer makes of another trainer's file.

    `record.checksums`: tensor name -> checksum. `writer`: `after_block`, `final_norm`, `writer_id`.
    """

    @property
    def record(self) -> Any: ...
    @property
    def writer(self) -> Any: ...
    def tensor(self, name: str) -> Tensor: ...


def token_ids(sample: Sample, dump: Captured, batch_id: str) -> Tensor:
    """[S] int64, once it is clear that the dump is of these tokens."""
    ids = torch.tensor(sample.input_ids, dtype=torch.int64)
    if not torch.equal(ids, dump.tensor(contract.INPUT_IDS)):
        raise _wrong(batch_id, sample, "its dump is of other tokens")
    return ids


def proved_rows(
    sample: Sample, dump: Captured, names: Sequence[str], layout: ShardLayout, batch_id: str
) -> Iterator[list[Tensor]]:
    """The rows of these tensors, some at a time, a list of one part of each; at the end their checksums are compared
    with those from the capture.

    Raises:
        DumpError: they differ, or a tensor has another shape or dtype than the shard's.
    """
    tensors = [dump.tensor(name) for name in names]
    expected = (len(sample.input_ids), layout.hidden_size)
    for name, tensor in zip(names, tensors, strict=True):
        if tuple(tensor.shape) != expected or tensor.dtype != layout.torch_dtype:
            raise _wrong(batch_id, sample, f"{name} is {list(tensor.shape)} {tensor.dtype}, not {expected}")
    hashes = [hashlib.sha256() for _ in names]
    step = max(1, COPY_BYTES // (len(names) * layout.hidden_size * layout.torch_dtype.itemsize))
    for start in range(0, expected[0], step):
        rows = [tensor[start : start + step] for tensor in tensors]
        for sha, part in zip(hashes, rows, strict=True):
            sha.update(raw_bytes(part))
        yield rows
    for name, sha in zip(names, hashes, strict=True):
        if f"sha256:{sha.hexdigest()}" != dump.record.checksums.get(name):
            raise _wrong(batch_id, sample, f"{name} differs from its checksum at capture")


def _wrong(batch_id: str, sample: Sample, found: str) -> DumpError:
    return DumpError(
        f"sample {sample.id} of batch {batch_id}", found, None, "Capture the sample again; check the disk."
    )


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, without a copy when it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
