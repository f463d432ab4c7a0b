"""Writers with something to write, and what their tests ask of them."""

import json
import mmap
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyas_capture import contract
from eyas_capture.rows import Layout, RowCopier
from eyas_capture.spans import Assembly
from eyas_capture.writer import Writer

H = 8
PAGE = mmap.PAGESIZE


def no_tick() -> None:
    """Nothing to look after."""


def filled(
    to: Writer, tokens: int = 6, spans: tuple[tuple[int, int], ...] = ((0, 6),), dtype: torch.dtype = torch.bfloat16
) -> Assembly:
    """A request whose rows are all different, with room reserved for them."""
    base, counter = spans[0][0], to.next_counter()
    copier = RowCopier(torch.device("cpu"), to.memory)
    layout = Layout.of({name: torch.empty(0, H, dtype=dtype) for name in (contract.block_tensor(1), contract.FINAL)})
    taken = copier.bytes_for(tokens, tokens - base, layout)
    prompt = array("q", range(100, 100 + tokens))
    assembly = Assembly(counter, f"rid-{counter}", prompt, base=base, nbytes=taken)
    assert to.reserve(taken)
    assembly.buffers = copier.buffers(prompt, tokens - base, layout)
    assembly.buffers.ids.copy_(torch.arange(100 + base, 100 + tokens))
    for rows in assembly.buffers.rows.values():
        rows.copy_(torch.randn(rows.shape))
    for span in spans:
        assembly.take(*span)
    return assembly


def submit(to: Writer, assembly: Assembly, reason: str | None) -> None:
    """A pass that ends with this dump."""
    to.submit(assembly, reason)
    to.look()


def until_written(one: Writer, timeout_s: float = 30.0) -> None:
    """Wait until every dump that was submitted is written or lost."""
    ends = time.monotonic() + timeout_s
    while one._copied or one._ordered:
        assert time.monotonic() < ends
        time.sleep(0.01)
        one.look()


def publishers(one: Writer) -> list[int]:
    """Process ids."""
    return [publisher.process.pid for publisher in one._handover._publishers]


def whole(path: Path) -> bool:
    """Whether a dump's every tensor has the checksum its record gives."""
    record = json.loads((path / contract.RECORD_FILE).read_text())
    tensors = load_file(path / contract.STATES_FILE)
    sums = {n: contract.tensor_checksum(t.view(torch.uint8).numpy().tobytes()) for n, t in tensors.items()}
    return bool(sums == record["checksums"])


def totals(of: Writer) -> dict[str, Any]:
    return json.loads((of.identity.folder / contract.WRITER_FILE).read_text())["totals"]
