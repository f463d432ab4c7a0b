"""Streaming a dataset into a trainer: packed batches, the same for the same seed, each sample once an epoch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from hidden_states.batch_memory import BatchMemory
from hidden_states.dataset import Dataset
from hidden_states.encoding import TOP_K
from hidden_states.errors import DatasetError, RecipeError, TrainingError
from hidden_states.final_norm import FinalNorm
from hidden_states.manifest import TRAIN
from hidden_states.order import batches_of, epoch_batches
from hidden_states.shard_cache import Need, ShardCache, peak_bytes
from hidden_states.top_k import TopLogits

CACHE_BYTES = 32 << 30
WINDOW_SHARDS = 4
_SAME = ("dataset", "seed", "split", "batch_tokens", "window_shards")  # what a saved position has a meaning for


@dataclass(frozen=True)
class PackedBatch:
    """Whole samples one after the other, without padding; N tokens in all, A captured blocks, H hidden size.

    Attributes:
        input_ids: [N] int64.
        loss_mask: [N] uint8, 1 = a token to learn. Unshifted, like everything here.
        aux: [N,A,H] block outputs, in the target's dtype.
        final: [N,H] final state, in the target's dtype. Rows that were not kept are NaN.
        top: in place of `final`, which is [N,0] then, where the dataset keeps top-k logits.
        doc_ids: [N] int64, which of the batch's samples a row belongs to, from 0.
        positions: [N] int64, position within the sample.
        sample_ids: of the samples, in order.
        index: the batch's place among all batches of the epoch, over all ranks.
        resume_at: where to go on once every rank has used its batch of this step; see `SampleStream.state_dict`.
    """

    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final: Tensor
    doc_ids: Tensor
    positions: Tensor
    sample_ids: list[str]
    index: int
    resume_at: int
    top: TopLogits | None = None

    def pin_memory(self) -> "PackedBatch":
        """For DataLoader(pin_memory=True)."""
        pinned: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        if self.top is not None:
            pinned["top"] = TopLogits(self.top.ids.pin_memory(), self.top.logits.pin_memory())
        return PackedBatch(**(vars(self) | pinned))


class SampleStream(IterableDataset[PackedBatch]):
    """Batches of one epoch for one rank. Iterate it, or give it to a DataLoader with `batch_size=None`.

    The order depends on the dataset, seed, epoch, split, batch_tokens and window_shards, and on nothing else: not on
    the number of ranks or loader workers, which share the batches of an epoch without overlap. A position saved with
    one number of ranks can be resumed with another.

    Args:
        batch_tokens: most tokens a batch; at least the longest sample's.
        cache_dir: local folder for fetched shards; not needed for a `file://` store. Ranks and workers may share it.
        cache_bytes: most bytes there, of each rank and worker.
        norm: the target's final norm, for a dataset that keeps the final state before it.
        top_logits: the caller knows batches with top-k logits in place of the final state.
        window_shards: shards whose samples are mixed with each other.

    Raises:
        RecipeError: batch_tokens below the longest sample's length, an empty split, or a cache too small for the
            window; on first use.
        DatasetError: the dataset keeps what only a decoder undoes, at once; bytes that are not what was captured, while
            iterating.
        StoreError: the store or the cache folder fails; while iterating.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_tokens: int,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world: int = 1,
        split: str = TRAIN,
        cache_dir: Path | None = None,
        cache_bytes: int = CACHE_BYTES,
        window_shards: int = WINDOW_SHARDS,
        norm: FinalNorm | None = None,
        top_logits: bool = False,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        self.dataset, self.split = dataset, split
        self.norm = norm
        _require_readable(dataset, norm, top_logits)
        self.seed, self.epoch, self.rank, self.world = seed, epoch, rank, world
        self.batch_tokens, self.window_shards = batch_tokens, window_shards
        self.cache_dir, self.cache_bytes = cache_dir, cache_bytes
        self._next = 0  # global index of the first batch not used yet
        self._verified: set[str] = set()
        self._planned: tuple[int, list[list[int]]] | None = None
        self._memory = BatchMemory()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self._next = epoch, 0

    def __len__(self) -> int:
        """Batches left to this rank in this epoch."""
        return len(batches_of(self._next, len(self._batches()), self.rank, self.world, 0, 1))

    def state_dict(self, after: PackedBatch | None = None) -> dict[str, Any]:
        """The position in the epoch, as JSON-able values.

        Args:
            after: the last batch used. Needed with DataLoader workers, which run ahead in processes of their own;
                without it, the position behind the batch this object delivered last.
        """
        position = self._next if after is None else after.resume_at
        return {**self._identity(), "epoch": self.epoch, "next_batch": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            TrainingError: it is a position in another order of batches; names what differs.
        """
        ours = self._identity()
        differing = [f"{name} {state.get(name)} (now {ours[name]})" for name in _SAME if state.get(name) != ours[name]]
        if differing:
            found = f"saved with {', '.join(differing)}"
            raise TrainingError(
                "data position of the checkpoint",
                found,
                "the same data and batches",
                "Resume with the old settings, or start afresh.",
            )
        self.epoch, self._next = int(state["epoch"]), int(state["next_batch"])

    def __iter__(self) -> Iterator[PackedBatch]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        batches, start = self._batches(), self._next
        mine = batches_of(start, len(batches), self.rank, self.world, number, workers)
        needs = self._needs([batches[index] for index in mine])
        cache = ShardCache(self.dataset, needs, *self._room(needs), self._verified)
        try:
            for position, index in enumerate(mine):
                step = (index - start) // self.world
                resume_at = min(start + (step + 1) * self.world, len(batches))
                batch = self._pack(cache, batches[index], index, resume_at)
                cache.done_with(position)
                self._next = resume_at
                yield batch
        finally:
            cache.close()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_planned": None, "_memory": BatchMemory()}

    def _identity(self) -> dict[str, Any]:
        return {"dataset": self.dataset.digest} | {name: getattr(self, name) for name in _SAME[1:]}

    def _batches(self) -> list[list[int]]:
        if self._planned is None or self._planned[0] != self.epoch:
            names = ("seed", "epoch", "split", "window_shards", "batch_tokens")
            order = epoch_batches(self.dataset.samples, **{name: getattr(self, name) for name in names})
            self._planned = (self.epoch, order)
        return self._planned[1]

    def _needs(self, batches: Sequence[Sequence[int]]) -> list[Need]:
        """What these batches take from each shard, in the order of first use."""
        spans: dict[int, list[Any]] = {}
        for position, rows in enumerate(batches):
            for row in rows:
                need = spans.setdefault(self.dataset.place(row)[0], [[], position, position])
                need[0].append(row)
                need[2] = position
        return [Need(shard, tuple(rows), first, last) for shard, (rows, first, last) in spans.items()]

    def _room(self, needs: Sequence[Need]) -> tuple[Path | None, int]:
        """Cache folder and its bytes, once it is clear that they are enough."""
        least = peak_bytes(self.dataset, needs)
        first = self.dataset.manifest.shards[0]
        if self.dataset.store.local_path(self.dataset.key(first)) is not None:
            # Nothing is copied; the bound only keeps the thread from verifying far ahead of the reader.
            return None, least + max(shard.size for shard in self.dataset.manifest.shards)
        if self.cache_dir is None:
            raise RecipeError("cache_dir", "not set", "a local folder for what is fetched from the bucket")
        if least > self.cache_bytes:
            found = f"{self.cache_bytes / 1e9:.2f} GB, and the shards of one window take {least / 1e9:.2f} GB"
            raise RecipeError("cache_bytes", found, None, "Raise it, or lower window_shards.")
        return self.cache_dir, self.cache_bytes

    def _pack(self, cache: ShardCache, rows: Sequence[int], index: int, resume_at: int) -> PackedBatch:
        places = [self.dataset.place(row) for row in rows]
        lengths = torch.tensor([tokens for _, _, tokens in places])
        starts = lengths.cumsum(0) - lengths
        total = int(lengths.sum())
        manifest = self.dataset.manifest
        dtype, k = manifest.layout(0).torch_dtype, manifest.encoding.top_k
        empty = self._memory.empty
        batch = {
            "input_ids": empty((total,), torch.int64),
            "loss_mask": empty((total,), torch.uint8),
            "aux": empty((total, len(manifest.after_block), manifest.hidden_size), dtype),
            "final": empty((total, 0 if k else manifest.hidden_size), dtype),
        }
        top = TopLogits.nothing(total, k) if k else None
        for row, (shard, _, tokens), start in zip(rows, places, starts.tolist(), strict=True):
            sample = cache.shard(shard).rows(*self.dataset.span(row)).decoded()
            for name, target in batch.items():
                target[start : start + tokens] = getattr(sample, name)
            if top is not None and sample.top is not None:
                top.ids[start : start + tokens], top.logits[start : start + tokens] = sample.top.ids, sample.top.logits
        if manifest.final_norm == "pre" and self.norm is not None and top is None:
            batch["final"] = self.norm.behind(batch["final"])
        doc_ids = torch.repeat_interleave(torch.arange(len(rows)), lengths)
        return PackedBatch(
            **batch,
            doc_ids=doc_ids,
            positions=torch.arange(total) - starts[doc_ids],
            sample_ids=[self.dataset.sample_ids[row] for row in rows],
            index=index,
            resume_at=resume_at,
            top=top,
        )


def _require_readable(dataset: Dataset, norm: FinalNorm | None, top_logits: bool) -> None:
    """Refuses a dataset that keeps what the caller does not know how to use."""
    manifest = dataset.manifest
    if manifest.encoding.final == TOP_K and not top_logits:
        raise DatasetError(
            dataset.uri,
            f"its final state is kept as top-{manifest.encoding.top_k} logits",
            "a trainer that knows them",
            "Pass top_logits=True when it does; else write the dataset with another dataset.final.",
        )
    if manifest.final_norm not in ("post", "pre") or (manifest.final_norm == "pre" and norm is None):
        raise DatasetError(
            dataset.uri,
            f"its final state is kept {manifest.final_norm}-norm",
            "post-norm, or the target's final norm to apply",
            "Pass norm=FinalNorm.load(target).",
        )
