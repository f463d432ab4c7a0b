"""The teacher: does `lm_head(final)` choose the tokens the server itself chose?

Legend: R rows, H hidden size, V vocabulary. Row p of `final` is the state of token p, so it chooses token p + 1.

When is a near tie an agreement? The server computes its logits in the model's dtype: each is rounded by up to eps/2 of
its size (eps = 2^-7 in bfloat16), so two logits whose true distance is below eps x |largest logit| may come out in
either order. A row *agrees* when the server's token has a logit within that distance of the largest; it agrees
*strictly* when it is the arg-max. Both are reported. In float32 only the order of summation differs; 64 eps of float32
covers it. Matrix products here are in float32 whatever the weights' dtype is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hidden_states.errors import DataError
from hidden_states.samples import Sample
from hidden_states.weights import TargetWeights

_CHUNK_BYTES = 64 << 20  # of head rows in float32 at a time
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class Agreement:
    """How many of the server's tokens the states reproduce.

    Attributes:
        agree: rows where the server's token is the arg-max or nearly tied with it.
        strict: rows where it is the arg-max.
        total: rows compared.
        worst_row: row of the largest distance between the largest logit and the server's token's; -1 without rows.
        worst_gap: that distance.
    """

    agree: int
    strict: int
    total: int
    worst_row: int = -1
    worst_gap: float = 0.0

    @property
    def share(self) -> float:
        """Share of rows that agree; 1 without rows."""
        return self.agree / self.total if self.total else 1.0

    def __add__(self, other: "Agreement") -> "Agreement":
        worse = self if self.worst_gap >= other.worst_gap else other
        return Agreement(
            self.agree + other.agree,
            self.strict + other.strict,
            self.total + other.total,
            worse.worst_row,
            worse.worst_gap,
        )


class TeacherHead:
    """The target's output matrix [V, H], read in chunks from its file."""

    def __init__(self, weights: TargetWeights, name: str) -> None:
        self.weights, self.name = weights, name
        shape = weights.shape(name)
        dtype = weights.rows(name, 0, 1).dtype
        if len(shape) != 2 or dtype not in _FLOATS:
            raise DataError(
                str(weights.folder),
                f"{name} is {dtype} of shape {list(shape)}",
                "a matrix in float32, bfloat16 or float16",
                "A target with a quantised output matrix cannot be checked this way; use its unquantised folder.",
            )
        self.vocab_size, self.hidden_size = shape

    @classmethod
    def load(cls, target_folder: Path | str) -> "TeacherHead":
        """The head of a Hugging Face folder: `lm_head`, or the embedding where the two are tied.

        Raises:
            DataError: the folder has neither, or not in a float dtype.
        """
        weights = TargetWeights(target_folder)
        name = weights.find(_EMBEDDING if _tied(Path(target_folder)) else _HEAD, _HEAD, _EMBEDDING)
        if name is None:
            raise DataError(str(target_folder), f"no tensor {_HEAD} or {_EMBEDDING} in its weights")
        return cls(weights, name)

    def argmax(self, final_RH: torch.Tensor) -> torch.Tensor:
        """The token each row chooses, [R] int64."""
        best, _ = self._best(final_RH, None)
        return best[1]

    def agreement(self, final_RH: torch.Tensor, positions: Sequence[int], server_tokens: Sequence[int]) -> Agreement:
        """Compare the rows at `positions` with the tokens the server chose after them.

        Args:
            final_RH: all rows of a sample, after the final norm, in the dtype they were captured in.
            positions: rows to compare; only these are read.
            server_tokens: the token at each position + 1.
        """
        if len(positions) != len(server_tokens):
            raise ValueError(f"{len(positions)} positions with {len(server_tokens)} tokens")
        if not positions:
            return Agreement(0, 0, 0)
        rows = final_RH[torch.tensor(list(positions))]
        chosen = torch.tensor(list(server_tokens))
        (top, best), logits = self._best(rows, chosen)
        gaps = top - logits
        near = gaps <= near_tie(final_RH.dtype) * top.abs()
        strict = best == chosen
        worst = int(gaps.argmax())
        return Agreement(
            agree=int((near | strict).sum()),
            strict=int(strict.sum()),
            total=len(chosen),
            worst_row=int(positions[worst]),
            worst_gap=float(gaps[worst]),
        )

    def _best(
        self, rows_RH: torch.Tensor, chosen_R: torch.Tensor | None
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """((largest logit, its token), logit of the chosen token) per row."""
        if rows_RH.shape[-1] != self.hidden_size:
            raise DataError(
                "final state", f"{rows_RH.shape[-1]} values a row", f"{self.hidden_size}, the target's hidden size"
            )
        states = rows_RH.float()
        top = torch.full((len(states),), -torch.inf)
        best = torch.zeros(len(states), dtype=torch.int64)
        logits = torch.full((len(states),), -torch.inf)
        step = max(1, _CHUNK_BYTES // (4 * self.hidden_size))
        for start in range(0, self.vocab_size, step):
            part = states @ self.weights.rows(self.name, start, start + step).float().T
            value, index = part.max(dim=-1)
            higher = value > top
            top, best = torch.where(higher, value, top), torch.where(higher, index + start, best)
            if chosen_R is not None:
                inside = (chosen_R >= start) & (chosen_R < start + part.shape[1])
                logits[inside] = part[inside, chosen_R[inside] - start]
        return (top, best), logits


def near_tie(dtype: torch.dtype) -> float:
    """Relative distance below which two logits of a server in this dtype count as tied; see the module's docstring."""
    return max(torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)


def reply_positions(sample: Sample, limit: int | None = None) -> tuple[list[int], list[int]]:
    """(positions, tokens) of an on-policy sample's reply: row p chose token p + 1.

    Args:
        limit: at most so many, spread evenly; the first and the last are among them.
    """
    ids, mask = sample.input_ids, sample.loss_mask
    positions = [p for p in range(len(ids) - 1) if mask[p + 1]]
    if limit is not None and len(positions) > limit:
        last = len(positions) - 1
        positions = [positions[round(k * last / max(1, limit - 1))] for k in range(limit)]
    return positions, [ids[p + 1] for p in positions]


def _tied(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False  # without a configuration the weights themselves decide
    inner = config.get("text_config") or config
    return bool(inner.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
