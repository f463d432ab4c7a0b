"""The order of an epoch: which samples share a batch, and which batch comes when. Pure arithmetic on the samples table.

    shards   s0 s1 s2 s3 s4 s5 ...      shuffled by (seed, epoch)
    windows  [s0 s1 s2 s3] [s4 s5 ...]  `window_shards` at a time: what a reader needs at hand
    samples  shuffled within their window
    batches  filled in that order up to `batch_tokens`; a batch may span two windows

Every rank computes the same global list of batches and takes every world-th, so no rank has to talk to another, and
all have the same number of batches to within one. Shuffling sorts by a hash: the same on every platform and release.
"""

import hashlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from hidden_states.errors import RecipeError


def epoch_batches(
    samples: pa.Table, *, seed: int, epoch: int, split: str, window_shards: int, batch_tokens: int
) -> list[list[int]]:
    """Row numbers of `samples` for each batch of the epoch, in order: every sample of the split exactly once.

    Raises:
        RecipeError: the split is empty, or a sample has more than `batch_tokens` tokens.
    """
    rows = pc.indices_nonzero(pc.equal(samples["split"], split)).to_pylist()
    if not rows:
        raise RecipeError(
            f"split {split!r}", "no samples in it", None, "Raise the held-out share, or use another split."
        )
    shards, tokens, ids = (samples[name].to_pylist() for name in ("shard", "tokens", "id"))
    longest = max(rows, key=tokens.__getitem__)
    if tokens[longest] > batch_tokens:
        raise RecipeError("batch_tokens", f"{batch_tokens}, and sample {ids[longest]} has {tokens[longest]} tokens",
                          None, "Raise it to the longest sample's length at least.")  # fmt: skip
    by_shard: dict[int, list[int]] = {}
    for row in rows:
        by_shard.setdefault(shards[row], []).append(row)
    draw = f"{seed}:{epoch}"
    order = sorted(by_shard, key=lambda shard: _key(draw, f"shard {shard}"))
    batches: list[list[int]] = []
    batch: list[int] = []
    room = batch_tokens
    for start in range(0, len(order), window_shards):
        window = [row for shard in order[start : start + window_shards] for row in by_shard[shard]]
        for row in sorted(window, key=lambda row: _key(draw, ids[row])):
            if tokens[row] > room:
                batches.append(batch)
                batch, room = [], batch_tokens
            batch.append(row)
            room -= tokens[row]
    batches.append(batch)
    return batches


def batches_of(start: int, total: int, rank: int, world: int, worker: int, workers: int) -> Sequence[int]:
    """Which of the global batches start..total-1 one worker of one rank delivers, in order.

    The ranks take turns batch by batch, and a rank's workers take turns in what is the rank's, as PyTorch's DataLoader
    asks them; so the rank sees its batches in order whatever the number of workers.
    """
    return range(start + rank + worker * world, total, world * workers)


def _key(draw: str, name: str) -> bytes:
    return hashlib.sha256(f"{draw}:{name}".encode()).digest()
