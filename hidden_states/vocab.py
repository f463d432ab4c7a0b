"""The draft vocabulary: the D target ids the drafter can propose."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import safetensors.torch
import torch
from torch import Tensor

from hidden_states.errors import DatasetError, RecipeError


class Learnable(Protocol):
    @property
    def input_ids(self) -> list[int]: ...
    @property
    def loss_mask(self) -> list[int]: ...


@dataclass(frozen=True)
class VocabMap:
    """Which target ids (V of them) are in the draft vocabulary (D).

    Attributes:
        d2t: [D] int64, offset form: target id = draft id + d2t[draft id]. Target ids ascend.
        t2d: [V] bool, whether a target id is in it.
        counts: [V] int64, how often each id is a token to learn.
        coverage: share of the tokens to learn that the draft vocabulary covers; 0 when there are none.
    """

    d2t: Tensor
    t2d: Tensor
    counts: Tensor
    coverage: float

    @property
    def target_ids(self) -> Tensor:
        """[D] int64: the target id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t))

    def to_bytes(self) -> bytes:
        """As a safetensors file; the coverage is a float64 scalar in it."""
        coverage = torch.tensor(self.coverage, dtype=torch.float64)
        return safetensors.torch.save({"d2t": self.d2t, "t2d": self.t2d, "counts": self.counts, "coverage": coverage})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "VocabMap":
        """Raises DatasetError when the bytes are not such a file or its parts contradict each other."""
        try:
            tensors = safetensors.torch.load(data)
            coverage = float(tensors.pop("coverage"))
            vocab = cls(**tensors, coverage=coverage)
            agree = torch.equal(vocab.t2d.nonzero().flatten(), vocab.target_ids)
        except (safetensors.SafetensorError, KeyError, TypeError) as exc:
            raise DatasetError(where, f"not a vocabulary map ({exc})", "d2t, t2d, counts, coverage") from exc
        if not agree:
            raise DatasetError(where, "d2t and t2d name different ids", None, "Build the vocabulary map again.")
        return vocab


def count_tokens(samples: Iterable[Learnable], vocab_size: int) -> Tensor:
    """[V] int64: how often each id is a token to learn."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        ids = torch.tensor(sample.input_ids, dtype=torch.int64)
        counts += torch.bincount(ids[torch.tensor(sample.loss_mask) != 0], minlength=vocab_size)
    return counts


def build_vocab_map(counts: Tensor, size: int, always_ids: Iterable[int] = ()) -> VocabMap:
    """The `size` most frequent ids, with `always_ids` (special and stop tokens) among them whatever their counts.

    Of equally frequent ids the lower one wins, so the map is a function of the counts.

    Args:
        counts: [V] from `count_tokens`.

    Raises:
        RecipeError: `size` is not between the number of `always_ids` and V, or one of them is not an id.
    """
    vocab_size = len(counts)
    always = sorted(set(always_ids))
    if always and not 0 <= always[0] <= always[-1] < vocab_size:
        raise RecipeError("draft vocabulary", f"special ids {always[0]} to {always[-1]}", f"ids below {vocab_size}",
                          "The tokenizer and the target's config disagree.")  # fmt: skip
    if not max(1, len(always)) <= size <= vocab_size:
        bounds = f"{max(1, len(always))} (the special and stop tokens) to {vocab_size} (the target's vocabulary)"
        raise RecipeError("draft vocabulary", f"size {size}", bounds, "Change the drafter's vocabulary size.")
    rank = torch.sort(counts, descending=True, stable=True).indices
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[always] = True
    free = rank[~t2d[rank]][: size - len(always)]
    t2d[free] = True
    target_ids = t2d.nonzero().flatten()
    total = int(counts.sum())
    coverage = int(counts[t2d].sum()) / total if total else 0.0
    return VocabMap(target_ids - torch.arange(size), t2d, counts.clone(), coverage)
