"""Writers with something to write, and what their tests ask of them."""

import json
import mmap
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyas_capture import contract
from eyas_capture.identity import process_start_time
from eyas_capture.rows import Layout, RowCopier
from eyas_capture.spans import Assembly, Part
from eyas_capture.writer import Writer

H = 8
PAGE = mmap.PAGESIZE


def no_tick() -> None:
    """Nothing to look after."""


class Fence:
    """What tells when the rows of a pass have left the GPU."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def filled(
    to: Writer, tokens: int = 6, spans: tuple[tuple[int, int], ...] = ((0, 6),), dtype: torch.dtype = torch.bfloat16
) -> Assembly:
    """A request whose rows are all different, each span from a pass of its own, with a page reserved for them."""
    counter, prompt = to.next_counter(), array("q", range(100, 100 + tokens))
    copier = RowCopier(torch.device("cpu"), to.memory)
    assembly = Assembly(counter, f"rid-{counter}", prompt, base=spans[0][0], nbytes=PAGE)
    assert to.reserve(PAGE)
    for number, (start, stop) in enumerate(spans):
        count = stop - start
        named = {name: torch.randn(count, H).to(dtype) for name in (contract.block_tensor(1), contract.FINAL)}
        ids, prompts = torch.arange(100 + start, 100 + stop), [prompt] if number == 0 else []
        rows = copier.copy(prompts, [(0, count)], ids, named, Layout.of(named))
        rows.holders = 1
        if number == 0:
            assembly.prompt = rows, rows.prompts[0]
        assembly.parts.append(Part(start, stop, rows, 0))
    return assembly


def tensors_of(assembly: Assembly) -> dict[str, torch.Tensor]:
    """The rows in memory [R, H] of each tensor by name, and the `ids` [R]: copies."""
    parts = [part.rows.tensors() for part in assembly.parts]
    names = ["ids", *(name for name, *_ in assembly.parts[0].rows.layout.tensors)]
    return {name: torch.cat([part[n] for part in parts]) for n, name in enumerate(names)}


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


def until_partial(one: Writer) -> None:
    """Wait until a publisher has begun a dump."""
    ends = time.monotonic() + 30
    while not list(one.identity.folder.glob(contract.PARTIAL_GLOB)):
        assert time.monotonic() < ends
        time.sleep(0.01)
        one.look()


def until_ended(*pids: int, look: Callable[[], object] = no_tick, timeout_s: float = 30.0) -> None:
    """Wait until no such process is left: one that was killed where no core is idle takes seconds to be gone."""
    ends = time.monotonic() + timeout_s
    while any(process_start_time(pid) for pid in pids):
        assert time.monotonic() < ends
        time.sleep(0.01)
        look()


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
