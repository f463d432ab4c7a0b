"""Datasets of any size without a model: states are slices of one random buffer, packed and committed as if captured."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from eyas_capture import contract
from hidden_states.dataset import Dataset, DatasetWriter
from hidden_states.dump import Dump
from hidden_states.fingerprint import Fingerprint
from hidden_states.plan import plan_batches
from hidden_states.samples import Sample
from hidden_states.shard import pack_shard
from hidden_states.shard_layout import ShardInfo
from hidden_states.store import Store

AFTER_BLOCK = (2, 30, 58)
FINGERPRINT = Fingerprint({"weights": "synthetic", "after_block": list(AFTER_BLOCK), "final_norm": "post"})


@dataclass(frozen=True)
class Shape:
    """Bytes: samples x tokens x 4 states x hidden_size x 2."""

    samples: int
    tokens: int
    hidden_size: int
    shard_tokens: int

    @property
    def bytes(self) -> int:
        return self.samples * self.tokens * 4 * self.hidden_size * 2


class SyntheticDump:
    """What packing needs of a dump."""

    def __init__(self, sample: Sample, noise: Tensor, hidden_size: int) -> None:
        rows, seed = len(sample), int(sample.id, 16)
        self._tensors = {contract.INPUT_IDS: torch.tensor(sample.input_ids)}
        for index, name in enumerate([*map(contract.block_tensor, AFTER_BLOCK), contract.FINAL]):
            first = (seed >> index) % (len(noise) - rows * hidden_size)
            self._tensors[name] = noise[first : first + rows * hidden_size].view(rows, hidden_size)
        raw = {name: tensor.reshape(-1).view(torch.uint8).numpy().data for name, tensor in self._tensors.items()}
        sums = {name: f"sha256:{hashlib.sha256(data).hexdigest()}" for name, data in raw.items()}
        self.record = SimpleNamespace(checksums=sums)
        self.writer = SimpleNamespace(after_block=AFTER_BLOCK, final_norm="post", writer_id="synthetic")

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def pack(shape: Shape, folder: Path) -> list[ShardInfo]:
    """The shards, in a folder."""
    noise = torch.randn(shape.tokens * shape.hidden_size + (1 << 20), generator=torch.Generator().manual_seed(0))
    noise = noise.to(torch.bfloat16)
    ids = torch.randint(0, 50_000, (shape.samples, shape.tokens), generator=torch.Generator().manual_seed(1)).tolist()
    samples = [Sample.of(row, [1] * shape.tokens, f"synthetic:{n}") for n, row in enumerate(ids)]
    folder.mkdir(parents=True, exist_ok=True)
    infos = []
    for batch in plan_batches(samples, shape.shard_tokens):
        dumps: dict[str, Any] = {s.id: SyntheticDump(s, noise, shape.hidden_size) for s in batch.samples}
        infos.append(pack_shard(batch, cast(dict[str, Dump], dumps), folder / f"{batch.id}.safetensors"))
    return infos


def commit(store: Store, infos: list[ShardInfo]) -> Dataset:
    """The shards as a dataset named `benchmark`."""
    writer = DatasetWriter(store, "benchmark", FINGERPRINT)
    for info in infos:
        writer.commit_batch(info)
    writer.commit_manifest([info.batch_id for info in infos])
    return Dataset.open(store, "benchmark")
