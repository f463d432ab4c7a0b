"""Small datasets for the tests: random states as real dumps, packed and committed like any other."""

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas_capture import contract
from hidden_states.dataset import Dataset, DatasetWriter
from hidden_states.dump import Dump, DumpRef, read_record
from hidden_states.fingerprint import Fingerprint
from hidden_states.plan import Batch, plan_batches
from hidden_states.record import read_writer
from hidden_states.samples import Sample
from hidden_states.shard import pack_shard
from hidden_states.store import Store
from tests.dump_factory import raw_bytes, write_safetensors

AFTER_BLOCK = (1, 3, 6)
FINGERPRINT = Fingerprint({"weights": "full:1234", "after_block": list(AFTER_BLOCK), "final_norm": "post"})


def make_samples(lengths: Sequence[int], seed: int = 0) -> list[Sample]:
    """Samples of random tokens; every one has something to learn."""
    draw = random.Random(seed)
    return [
        Sample.of(
            [draw.randrange(1000) for _ in range(n)], [draw.randrange(2) for _ in range(n - 1)] + [1], f"test:{i}"
        )
        for i, n in enumerate(lengths)
    ]


@dataclass
class Capture:
    """A writer's folder with one dump a sample, of random states of hidden size H."""

    folder: Path
    hidden_size: int = 8
    dtype: torch.dtype = torch.bfloat16
    writer_id: str = "20261129T150000-1"

    def __post_init__(self) -> None:
        (self.folder / self.writer_id).mkdir(parents=True)
        facts = {
            "contract": contract.VERSION, "writer_id": self.writer_id, "pid": 1, "pid_start_time": 1, "host": "test",
            "started_at": "2026-11-29T15:00:00+00:00", "dp_rank": None, "tp_size": 1, "dp_size": 1, "pp_size": 1,
            "plugin_version": "0.1.0", "sglang_version": "0.5.23", "model_path": "/target", "config_sha256": "0" * 64,
            "architecture": "Llama", "dtype": str(self.dtype).removeprefix("torch."), "hidden_size": self.hidden_size,
            "blocks": 8, "after_block": list(AFTER_BLOCK), "capture_points": [block + 1 for block in AFTER_BLOCK],
            "final_norm": "post", "mode": "all", "flags": {}, "totals": {}, "state": contract.CAPTURING, "refused": [],
        }  # fmt: skip
        (self.folder / self.writer_id / contract.WRITER_FILE).write_text(json.dumps(facts))
        self.writer = read_writer(self.folder / self.writer_id / contract.WRITER_FILE)
        self.counter = 0

    def dump(self, sample: Sample, seed: int = 0) -> Dump:
        """A dump with states that are a function of sample and seed."""
        generator = torch.Generator().manual_seed(int(sample.id, 16) % 2**60 + seed)
        shape = (len(sample), self.hidden_size)
        names = [*map(contract.block_tensor, AFTER_BLOCK), contract.FINAL]
        tensors = {contract.INPUT_IDS: torch.tensor(sample.input_ids)}
        tensors |= {name: torch.randn(shape, generator=generator).to(self.dtype) for name in names}
        path = self.folder / self.writer_id / contract.dump_name(self.counter)
        path.mkdir()
        write_safetensors(tensors, path / contract.STATES_FILE)
        record = {
            "contract": contract.VERSION, "counter": self.counter, "request_id": f"eyas-test-{sample.id}",
            "writer_id": self.writer_id, "tokens": len(sample), "spans": [[0, len(sample)]], "prefix_cached": 0,
            "tokens_sha256": contract.tokens_sha256(sample.input_ids), "written_at": "2026-11-29T15:00:01+00:00",
            "checksums": {name: contract.tensor_checksum(raw_bytes(tensor)) for name, tensor in tensors.items()},
            "complete": True, "incomplete_reason": None,
        }  # fmt: skip
        (path / contract.RECORD_FILE).write_text(json.dumps(record))
        ref = DumpRef(self.writer_id, self.counter, path)
        self.counter += 1
        return Dump(ref, read_record(ref), self.writer)

    def dumps(self, samples: Sequence[Sample], seed: int = 0) -> dict[str, Dump]:
        return {sample.id: self.dump(sample, seed) for sample in samples}


@dataclass
class Made:
    """A committed dataset and what went into it."""

    dataset: Dataset
    samples: dict[str, Sample]
    dumps: Mapping[str, Dump]
    batches: list[Batch]

    def __repr__(self) -> str:
        return f"Made({len(self.samples)} samples in {len(self.batches)} shards)"

    def assert_equal(self, sample_id: str, rows: object) -> None:
        """Whether these rows (anything with input_ids, loss_mask, aux, final) are those of the capture."""
        sample, dump = self.samples[sample_id], self.dumps[sample_id]
        found = {name: getattr(rows, name) for name in ("input_ids", "loss_mask", "aux", "final")}
        assert found["input_ids"].tolist() == sample.input_ids
        assert found["loss_mask"].tolist() == sample.loss_mask
        assert torch.equal(found["final"], dump.tensor(contract.FINAL))
        for index, block in enumerate(AFTER_BLOCK):
            assert torch.equal(found["aux"][:, index], dump.tensor(contract.block_tensor(block)))


def make_dataset(
    store: Store,
    folder: Path,
    lengths: Sequence[int],
    *,
    shard_tokens: int,
    held_out_share: float = 0.0,
    hidden_size: int = 8,
    seed: int = 0,
) -> Made:
    """Captures, packs and commits a dataset named `data`; `shard_tokens` tokens a shard at most."""
    samples = make_samples(lengths, seed)
    dumps = Capture(folder / "dumps", hidden_size).dumps(samples)
    writer = DatasetWriter(store, "data", FINGERPRINT)
    batches = plan_batches(samples, shard_tokens)
    for batch in batches:
        writer.commit_batch(pack_shard(batch, dumps, folder / "shard"))
    writer.commit_manifest([batch.id for batch in batches], held_out_share=held_out_share)
    return Made(Dataset.open(store, "data"), {sample.id: sample for sample in samples}, dumps, batches)


ODD: tuple[Any, ...] = (
    None, 5, -1, 1.5, "x", [], {}, True, [1], {"a": 1}, 0, 10**30, 1 << 40, "../../x", "float32", [4, 5, 6], "pre"
)  # fmt: skip


def places(value: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, the first entry of a list for all of them."""
    if inside:
        yield inside
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*inside, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*inside, 0))


def edits(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(place, the whole with an odd value there), and the whole without that place."""
    for place in places(value):
        for odd in (*ODD, ...):
            edited = copy.deepcopy(value)
            inner = edited
            for step in place[:-1]:
                inner = inner[step]
            if odd is ...:
                del inner[place[-1]]
            elif inner[place[-1]] == odd:  # as True and 1 are to Python
                continue
            else:
                inner[place[-1]] = odd
            yield place, edited
