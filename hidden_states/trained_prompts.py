"""Which prompts a dataset's training split holds the answers to, so that none of them is used to judge a drafter."""

import torch

from eyas_capture import contract
from hidden_states.dataset import Dataset
from hidden_states.manifest import TRAIN


def trained_prompts(dataset: Dataset) -> frozenset[str]:
    """Token digests (`contract.tokens_sha256`) of everything that stands before a stretch to learn.

    A conversation of several turns gives several: each reply answers all that came before it. Reads tokens and masks
    only, two ranges a shard; states are never fetched.
    """
    manifest, splits = dataset.manifest, dataset.samples["split"].to_pylist()
    rows_of: dict[int, list[tuple[int, int]]] = {}
    for index, split in enumerate(splits):
        if split == TRAIN:
            shard, row, tokens = dataset.place(index)
            rows_of.setdefault(shard, []).append((row, tokens))
    found: set[str] = set()
    for shard, rows in rows_of.items():
        key, spans = dataset.key(manifest.shards[shard]), manifest.layout(shard).spans()
        ids, mask = (
            torch.frombuffer(bytearray(dataset.store.get_range(key, *spans[name])), dtype=dtype)
            for name, dtype in ((contract.INPUT_IDS, torch.int64), ("loss_mask", torch.uint8))
        )
        for row, tokens in rows:
            learn = mask[row : row + tokens].bool()
            begins = learn.clone()
            begins[1:] &= ~learn[:-1]
            text = ids[row : row + tokens].tolist()
            found |= {contract.tokens_sha256(text[:start]) for start in begins.nonzero()[:, 0].tolist()}
    return frozenset(found)
