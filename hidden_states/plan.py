"""From samples to batches, and what they weigh.

A batch of samples is the unit of everything that follows: one task run, one shard, one upload, one retry. Which samples
share a batch is a function of their content alone, so every run of the same data plans the same batches.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hidden_states.errors import DataError
from hidden_states.samples import Sample

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SAMPLE_BYTES_PER_TOKEN = 8 + 1  # input_ids int64, loss_mask uint8


@dataclass(frozen=True)
class Batch:
    """Samples captured, packed, uploaded and retried together.

    Attributes:
        id: 16 hex digits of the sha256 of the samples' digests in order.
        samples: in the order of their digests.
    """

    id: str
    samples: tuple[Sample, ...]

    @property
    def tokens(self) -> int:
        return sum(len(sample) for sample in self.samples)


@dataclass(frozen=True)
class DatasetSize:
    """What a dataset weighs.

    Attributes:
        bytes_per_token: of the states: captured blocks and the final state.
        bytes: of all shards, states and token ids and masks.
        largest_batch_bytes: of the largest shard.
    """

    samples: int
    tokens: int
    batches: int
    bytes_per_token: int
    bytes: int
    largest_batch_bytes: int

    def local_bytes(self, batches_in_flight: int) -> int:
        """Most bytes on local disk at a time: a batch in flight lies there twice, as dumps and as the shard made of
        them, until the shard is verified in the bucket."""
        return 2 * batches_in_flight * self.largest_batch_bytes


def plan_batches(samples: Iterable[Sample], batch_tokens: int) -> list[Batch]:
    """Batches of at most `batch_tokens` tokens; a sample longer than that is a batch of its own.

    Raises:
        ValueError: a sample occurs twice, or `batch_tokens` is not positive.
    """
    if batch_tokens <= 0:
        raise ValueError(f"batch_tokens is {batch_tokens}")
    ordered = sorted(samples, key=lambda sample: sample.digest)
    for one, next_one in itertools.pairwise(ordered):
        if one.digest == next_one.digest:
            raise ValueError(f"sample {one.id} is planned twice (from {one.source} and {next_one.source})")
    batches: list[Batch] = []
    group: list[Sample] = []
    tokens = 0
    for sample in ordered:
        if group and tokens + len(sample) > batch_tokens:
            batches.append(_batch(group))
            group, tokens = [], 0
        group.append(sample)
        tokens += len(sample)
    if group:
        batches.append(_batch(group))
    return batches


def bytes_per_token(hidden_size: int, captured_blocks: int, dtype: str) -> int:
    """Bytes of one token's states: each captured block's output and the final state.

    Kimi-K2.5, three blocks in bfloat16: (3 + 1) x 7168 x 2 = 57,344.

    Raises:
        DataError: the dtype is none that states are captured in.
    """
    if dtype not in ITEM_BYTES:
        raise DataError("dtype of the states", repr(dtype), f"one of {', '.join(ITEM_BYTES)}")
    return (captured_blocks + 1) * hidden_size * ITEM_BYTES[dtype]


def dataset_size(batches: Sequence[Batch], hidden_size: int, captured_blocks: int, dtype: str) -> DatasetSize:
    """What the shards of these batches will weigh (their headers, a few hundred bytes each, are left out).

    Raises:
        DataError: the dtype is none that states are captured in.
    """
    states = bytes_per_token(hidden_size, captured_blocks, dtype)
    each = states + _SAMPLE_BYTES_PER_TOKEN
    tokens = [batch.tokens for batch in batches]
    return DatasetSize(
        samples=sum(len(batch.samples) for batch in batches),
        tokens=sum(tokens),
        batches=len(batches),
        bytes_per_token=states,
        bytes=sum(tokens) * each,
        largest_batch_bytes=max(tokens, default=0) * each,
    )


def _batch(samples: Sequence[Sample]) -> Batch:
    digests = "\n".join(sample.digest for sample in samples)
    return Batch(hashlib.sha256(digests.encode()).hexdigest()[:16], tuple(samples))
