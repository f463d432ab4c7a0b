"""A safetensors file opened with distrust: the header must account for every byte, and nothing is copied unasked.

The format (https://huggingface.co/docs/safetensors): 8 bytes header length, the header in JSON, the tensors' bytes.
The library's own reader hands out copies; here the raw bytes are needed, for checksums and for packing shards without
a second copy in memory.
"""

import json
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hidden_states.record import BadDump

_DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


class StatesFile:
    """Tensors of a safetensors file, by name, in the order of their bytes.

    Raises:
        BadDump: `file-intact`: it cannot be opened, its header is not one, or its size is not what the header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private mapping: tensors made from it are writable for torch, the file stays as it is.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise self._broken(f"cannot be read ({error})") from error
        self._view = memoryview(self._map)
        self.tensors, self._start = self._header()

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self.tensors[name]["dtype"]]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name]["shape"])

    def raw(self, name: str) -> memoryview:
        """The tensor's bytes as they lie in the file, row-major and little-endian. No copy."""
        start, stop = self.tensors[name]["data_offsets"]
        return self._view[self._start + start : self._start + stop]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor over the mapped file: pages are read when touched."""
        start, _ = self.tensors[name]["data_offsets"]
        shape, dtype = self.shape(name), self.dtype(name)
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._start + start).view(shape)

    def _header(self) -> tuple[Mapping[str, dict[str, Any]], int]:
        size = len(self._map)
        if size < 8:
            raise self._broken(f"{size} bytes long")
        (length,) = struct.unpack("<Q", self._map[:8])
        if length > size - 8:
            raise self._broken(f"{size} bytes long, but its header alone is {length}")
        try:
            header = json.loads(self._map[8 : 8 + length])
            entries = {k: v for k, v in header.items() if k != "__metadata__"}
            ordered = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
            end = 0
            for name, entry in ordered.items():
                start, stop = entry["data_offsets"]
                if entry["dtype"] not in _DTYPES:
                    raise self._broken(f"tensor {name!r} has the dtype {entry['dtype']}")
                if not all(type(n) is int and n >= 0 for n in (start, stop, *entry["shape"])):
                    raise self._broken(f"tensor {name!r} has the shape {entry['shape']} at bytes {start} to {stop}")
                if start != end or stop - start != math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize:
                    raise self._broken(f"tensor {name!r} has bytes {start} to {stop}, which its shape does not fill")
                end = stop
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._broken(f"its header is damaged ({error})") from error
        if 8 + length + end != size:
            raise self._broken(f"{size} bytes long", f"{8 + length + end} bytes, by its header")
        return ordered, 8 + length

    def _broken(self, found: str, expected: str | None = None) -> BadDump:
        return BadDump("file-intact", str(self.path), found, expected, "The sample is captured again.")
