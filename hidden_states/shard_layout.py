"""Where everything lies in a shard, and what its sidecar says of it.

    input_ids [N] int64 | offsets [samples+1] int64 | aux [N,A,H] | final [N,H] | loss_mask [N] uint8

N tokens of all samples, A captured blocks (ascending `after_block`), H hidden size; aux and final in the target's
dtype. The order keeps every tensor aligned to its element size (safetensors allows no padding between tensors), and the
rows of a sample are contiguous in each, so one ranged read fetches one tensor of one sample.

Where the states are kept otherwise (encoding.py), aux and final hold the codes, F of the N rows have a final state, and
more tensors stand beside them, each aligned likewise:

    aux_scale [N,A] float32 | final_scale [F] float32 | final_ids [F,k] int32, final_logits [F,k] float16
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eyas_capture import contract
from hidden_states.encoding import BFLOAT16, CAPTURED, FLOAT8, INT8, PLAIN, TAUGHT, TOP_K, Encoding
from hidden_states.store import FileDigest

SHARD_FORMAT, ENCODED_FORMAT = "eyas-shard/1", "eyas-shard/2"
CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_CODE_OF = {BFLOAT16: "BF16", FLOAT8: "F8_E4M3", INT8: "I8"}
_ITEM = {
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    **{code: dtype for dtype, code in CODES.items()},
}  # fmt: skip
_PER_SAMPLE = ("offsets",)


class Span(NamedTuple):
    """A sample's rows: of all tensors, and of those of the final state, where not every row has one."""

    row: int
    tokens: int
    final_row: int
    final_rows: int


@dataclass(frozen=True)
class SampleEntry:
    """Where a sample lies in its shard and what proves it.

    `row`: first of its `tokens` rows. `digest`: of tokens and mask (Sample.digest). `checksums`: of each tensor of
    `ShardLayout.proved`; of what is kept as captured, those from the capture, named as in the dump (`after_block_<k>`,
    `final`). `final_row`, `final_rows`: the same of the final state, where only some rows have one.
    """

    id: str
    digest: str
    source: str
    row: int
    tokens: int
    loss_tokens: int
    checksums: dict[str, str]
    final_row: int | None = None
    final_rows: int | None = None

    @property
    def span(self) -> Span:
        if self.final_row is None or self.final_rows is None:
            return Span(self.row, self.tokens, self.row, self.tokens)
        return Span(self.row, self.tokens, self.final_row, self.final_rows)

    def as_dict(self) -> dict[str, Any]:
        """Without what is not said."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class ShardLayout:
    """Where each tensor's rows begin: file offsets follow from these figures alone, without reading the header.

    `taught`: how many rows have a final state, where not all have.
    """

    data_start: int
    tokens: int
    samples: int
    after_block: tuple[int, ...]
    hidden_size: int
    dtype: str
    encoding: Encoding = PLAIN
    taught: int | None = None

    @classmethod
    def of(cls, fields: dict[str, Any], where: str) -> "ShardLayout":
        """From `as_dict`."""
        encoding = Encoding.of(fields.get("encoding", {}), where)
        return cls(**{**fields, "after_block": tuple(fields["after_block"]), "encoding": encoding})

    def as_dict(self) -> dict[str, Any]:
        """Without what is as ever: a plain shard's bytes are those of the first format."""
        unsaid = {"encoding": self.encoding.plain, "taught": self.taught is None}
        return {name: value for name, value in asdict(self).items() if not unsaid.get(name)}

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the states as captured, and as a reader hands them out."""
        return DTYPES[self.dtype]

    @cached_property
    def _tensors(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        n, a, h = self.tokens, len(self.after_block), self.hidden_size
        f, k = n if self.taught is None else self.taught, self.encoding.top_k
        captured = CODES[self.torch_dtype]
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            contract.INPUT_IDS: ("I64", (n,)),
            "offsets": ("I64", (self.samples + 1,)),
            "aux": (_CODE_OF.get(self.encoding.aux, captured), (n, a, h)),
        }
        if self.encoding.aux in (FLOAT8, INT8):
            shapes["aux_scale"] = ("F32", (n, a))
        if self.encoding.final == TOP_K:
            shapes |= {"final_ids": ("I32", (f, k)), "final_logits": ("F16", (f, k))}
        else:
            shapes["final"] = (_CODE_OF.get(self.encoding.final, captured), (f, h))
        if self.encoding.final in (FLOAT8, INT8):
            shapes["final_scale"] = ("F32", (f,))
        shapes["loss_mask"] = ("U8", (n,))
        ordered = sorted(shapes.items(), key=lambda item: -_ITEM[item[1][0]].itemsize)  # stable
        return {name: (code, shape, _row_bytes(code, shape)) for name, (code, shape) in ordered}

    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...], int]]:
        """Name -> (safetensors dtype, shape, bytes a row), in the order of the file."""
        return self._tensors

    def torch_dtype_of(self, name: str) -> torch.dtype:
        return _ITEM[self.tensors()[name][0]]

    def proved(self) -> list[str]:
        """Names of a sample's checksums: states as captured are proved as they were in the dump, block by block."""
        if self.encoding.aux == CAPTURED:
            names = [*map(contract.block_tensor, self.after_block)]
        else:
            names = [name for name in self.tensors() if name.startswith("aux")]
        return [*names, *(name for name in self.tensors() if name.startswith("final"))]

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        spans, at = {}, self.data_start
        for name, (_, shape, row_bytes) in self.tensors().items():
            spans[name] = (at, shape[0] * row_bytes)
            at += shape[0] * row_bytes
        return spans

    def spans(self) -> Mapping[str, tuple[int, int]]:
        """Name -> (first byte in the file, length)."""
        return self._spans

    @property
    def file_bytes(self) -> int:
        start, length = list(self.spans().values())[-1]
        return start + length

    def sample_spans(
        self, row: int, tokens: int, final_row: int | None = None, final_rows: int | None = None
    ) -> dict[str, tuple[int, int]]:
        """The same for the rows of one sample (a `Span`'s four figures)."""
        spans = self.spans()
        found = {}
        for name, (_, _, size) in self.tensors().items():
            if name not in _PER_SAMPLE:
                first, count = (row, tokens)
                if name.startswith("final") and final_row is not None and final_rows is not None:
                    first, count = final_row, final_rows
                found[name] = (spans[name][0] + first * size, count * size)
        return found

    def row_bytes(self) -> tuple[int, int]:
        """Bytes a token takes, and bytes a row of the final state takes on top."""
        tensors = {name: size for name, (_, _, size) in self.tensors().items() if name not in _PER_SAMPLE}
        final = sum(size for name, size in tensors.items() if name.startswith("final"))
        return sum(tensors.values()) - final, final

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
        layout = self.layout
        facts: dict[str, Any] = {
            "format": SHARD_FORMAT if layout.encoding.plain else ENCODED_FORMAT,
            "batch": self.batch_id,
            "after_block": list(layout.after_block),
            "final_norm": self.final_norm,
            "samples": [entry.as_dict() for entry in self.samples],
            "left_out": self.left_out,
        }
        if not layout.encoding.plain:
            facts |= {"encoding": layout.encoding.as_dict(), "dtype": layout.dtype}
            if layout.encoding.final_rows == TAUGHT:
                facts["taught"] = layout.taught
        return {"eyas": json.dumps(facts, sort_keys=True, separators=(",", ":"))}


def _row_bytes(code: str, shape: tuple[int, ...]) -> int:
    size = _ITEM[code].itemsize
    for length in shape[1:]:
        size *= length
    return size
