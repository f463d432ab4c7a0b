"""The shard: the samples of one batch in one safetensors file, concatenated along tokens.

    input_ids [N] int64 | offsets [samples+1] int64 | aux [N,A,H] | final [N,H] | loss_mask [N] uint8

N tokens of all samples, A captured blocks (ascending `after_block`), H hidden size; aux and final in the target's
dtype. The order keeps every tensor aligned to its element size (safetensors allows no padding between tensors), and the
rows of a sample are contiguous in each, so one ranged read fetches one tensor of one sample. The header's metadata
carries what the capture said of every sample: a shard explains and proves itself without its sidecar.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from eyas_capture import contract
from hidden_states.dump import Dump
from hidden_states.errors import DumpError
from hidden_states.plan import Batch
from hidden_states.samples import Sample
from hidden_states.store import Digester, FileDigest

SHARD_FORMAT = "eyas-shard/1"
COPY_BYTES = 8 << 20  # rows copied at a time: the only memory packing needs besides the dumps' mapped files
CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


@dataclass(frozen=True)
class SampleEntry:
    """Where a sample lies in its shard and what proves it.

    `row`: first of its `tokens` rows. `digest`: of tokens and mask (Sample.digest). `checksums`: of each captured
    tensor, from the capture, named as in the dump (`after_block_<k>`, `final`).
    """

    id: str
    digest: str
    source: str
    row: int
    tokens: int
    loss_tokens: int
    checksums: dict[str, str]


@dataclass(frozen=True)
class ShardLayout:
    """Where each tensor's rows begin: file offsets follow from these figures alone, without reading the header."""

    data_start: int
    tokens: int
    samples: int
    after_block: tuple[int, ...]
    hidden_size: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Name -> (safetensors dtype, shape, bytes a row), in the order of the file."""
        n, a, h = self.tokens, len(self.after_block), self.hidden_size
        code, size = CODES[self.torch_dtype], self.torch_dtype.itemsize
        return {
            contract.INPUT_IDS: ("I64", (n,), 8),
            "offsets": ("I64", (self.samples + 1,), 8),
            "aux": (code, (n, a, h), a * h * size),
            "final": (code, (n, h), h * size),
            "loss_mask": ("U8", (n,), 1),
        }

    def spans(self) -> dict[str, tuple[int, int]]:
        """Name -> (first byte in the file, length)."""
        spans, at = {}, self.data_start
        for name, (_, shape, row_bytes) in self.tensors().items():
            spans[name] = (at, shape[0] * row_bytes)
            at += shape[0] * row_bytes
        return spans

    @property
    def file_bytes(self) -> int:
        start, length = self.spans()["loss_mask"]
        return start + length

    def sample_spans(self, row: int, tokens: int) -> dict[str, tuple[int, int]]:
        """The same for the rows of one sample."""
        spans = self.spans()
        rows = {name: row_bytes for name, (_, _, row_bytes) in self.tensors().items() if name != "offsets"}
        return {name: (spans[name][0] + row * size, tokens * size) for name, size in rows.items()}

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """The safetensors header (length, JSON, padding to 8 bytes) with these tensors."""
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        at = 0
        for name, (code, shape, row_bytes) in self.tensors().items():
            length = shape[0] * row_bytes
            entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + length]}
            at += length
        text = json.dumps(entries, separators=(",", ":"), sort_keys=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class ShardInfo:
    """A packed shard: what its sidecar will say. `left_out`: sample id -> why it is not in it."""

    batch_id: str
    digest: FileDigest
    layout: ShardLayout
    final_norm: str
    samples: tuple[SampleEntry, ...]
    left_out: dict[str, str]
    path: Path | None = None

    @property
    def bytes(self) -> int:
        return self.digest.bytes

    @property
    def sha256(self) -> str:
        return self.digest.sha256

    def metadata(self) -> dict[str, str]:
        """What stands in the file's own header."""
        facts = {
            "format": SHARD_FORMAT,
            "batch": self.batch_id,
            "after_block": list(self.layout.after_block),
            "final_norm": self.final_norm,
            "samples": [asdict(entry) for entry in self.samples],
            "left_out": self.left_out,
        }
        return {"eyas": json.dumps(facts, sort_keys=True, separators=(",", ":"))}


def pack_shard(
    batch: Batch,
    dumps: Mapping[str, Dump],
    path: Path,
    *,
    left_out: Mapping[str, str] | None = None,
) -> ShardInfo:
    """Writes the shard of `batch` to `path`, row by row out of the dumps' mapped files.

    Every captured tensor's checksum is computed over the rows as they pass and compared with the capture's.

    Args:
        dumps: sample id -> its dump.
        left_out: sample id -> reason, for samples given up on; every other sample must have a dump.

    Raises:
        DumpError: a sample has neither dump nor reason, or a dump's rows are not what the capture said.
    """
    left_out = dict(left_out or {})
    samples = [sample for sample in batch.samples if sample.id not in left_out]
    missing = [sample.id for sample in samples if sample.id not in dumps]
    if missing or not samples:
        found = f"{len(missing)} samples without a dump, {', '.join(missing[:3])}" if missing else "no usable sample"
        raise DumpError(f"batch {batch.id}", found, None, "Capture them again, or leave them out with a reason.")
    entries, row = [], 0
    for sample in samples:
        checksums = {k: v for k, v in dumps[sample.id].record.checksums.items() if k != contract.INPUT_IDS}
        tokens, learned = len(sample.input_ids), sum(sample.loss_mask)
        entries.append(SampleEntry(sample.id, sample.digest, sample.source, row, tokens, learned, checksums))
        row += tokens
    probe = dumps[samples[0].id].tensor(contract.FINAL)
    dtype = str(probe.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise DumpError(
            f"batch {batch.id}", f"states of dtype {dtype}", " or ".join(DTYPES), "Serve the target in one."
        )
    if len({(dumps[sample.id].writer.after_block, dumps[sample.id].writer.final_norm) for sample in samples}) > 1:
        raise DumpError(f"batch {batch.id}", "dumps of writers that capture different states", None,
                        "Capture the batch again from one server setting.")  # fmt: skip
    writer = dumps[samples[0].id].writer
    if not writer.after_block or writer.final_norm is None:
        raise DumpError(f"writer {writer.writer_id}", "does not say what it captures", None, "It refused; see its log.")
    layout = ShardLayout(0, row, len(samples), tuple(writer.after_block), probe.shape[1], dtype)
    draft = ShardInfo(batch.id, FileDigest(0, "", 0), layout, writer.final_norm, tuple(entries), left_out, path)
    header = layout.header(draft.metadata())
    layout = replace(layout, data_start=len(header))
    with open(path, "wb") as file:
        out = _HashedFile(file)
        out.write(header)
        _write_rows(out, samples, dumps, layout, batch.id)
    return replace(draft, digest=out.digester.digest(), layout=layout)


def _write_rows(
    out: "_HashedFile",
    samples: Sequence[Sample],
    dumps: Mapping[str, Dump],
    layout: ShardLayout,
    batch_id: str,
) -> None:
    for sample in samples:
        ids = torch.tensor(sample.input_ids, dtype=torch.int64)
        if not torch.equal(ids, dumps[sample.id].tensor(contract.INPUT_IDS)):
            raise _wrong(batch_id, sample, "its dump is of other tokens")
        out.write(raw_bytes(ids))
    lengths = torch.tensor([0] + [len(sample.input_ids) for sample in samples], dtype=torch.int64)
    out.write(raw_bytes(lengths.cumsum(0)))
    blocks = [contract.block_tensor(block) for block in layout.after_block]
    for names in (blocks, [contract.FINAL]):
        for sample in samples:
            dump = dumps[sample.id]
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
                out.write(raw_bytes(rows[0] if len(rows) == 1 else torch.stack(rows, dim=1)))
            for name, sha in zip(names, hashes, strict=True):
                if f"sha256:{sha.hexdigest()}" != dump.record.checksums.get(name):
                    raise _wrong(batch_id, sample, f"{name} differs from its checksum at capture")
    for sample in samples:
        out.write(bytes(sample.loss_mask))


def _wrong(batch_id: str, sample: Sample, found: str) -> DumpError:
    return DumpError(
        f"sample {sample.id} of batch {batch_id}", found, None, "Capture the sample again; check the disk."
    )


class _HashedFile:
    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digester = file, Digester()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.digester.update(data)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, without a copy when it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
