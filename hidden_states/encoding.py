"""What a dataset keeps of the states: as captured, or less. Declared in the manifest, undone by the reader.

    aux, final     captured      in the dtype they were captured in
                   bfloat16      rounded to it
                   float8_e4m3   a float32 scale a row, the largest value becomes 448
                   int8          a float32 scale a row, the largest value becomes 127
    final          top_k         instead of the state, its k largest logits with the target's head: see top_k.py
    final_rows     all           or `taught`: only rows whose logits can teach (below); the others read as NaN

A row is one token's H values of one tensor. Row t of the final state teaches when the tokens t and t+1 are both to
learn: the drafter's slots count exactly there (drafter/slots.py), whatever the number of training-time-test steps.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hidden_states.errors import DatasetError

CAPTURED, BFLOAT16, FLOAT8, INT8, TOP_K = "captured", "bfloat16", "float8_e4m3", "int8", "top_k"
ALL, TAUGHT = "all", "taught"
_LARGEST = {FLOAT8: 448.0, INT8: 127.0}
_CODES = {FLOAT8: torch.float8_e4m3fn, INT8: torch.int8}
_KNOWN = {
    "aux": (CAPTURED, BFLOAT16, FLOAT8, INT8),
    "final": (CAPTURED, BFLOAT16, FLOAT8, INT8, TOP_K),
    "final_rows": (ALL, TAUGHT),
}


@dataclass(frozen=True)
class Encoding:
    """How aux and final are kept; `top_k` is k, 0 where `final` is no top_k.

    Raises:
        DatasetError: an option this version does not know.
    """

    aux: str = CAPTURED
    final: str = CAPTURED
    final_rows: str = ALL
    top_k: int = 0

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise DatasetError(
                    "storage options",
                    f"{name} is kept as {getattr(self, name)!r}",
                    f"one of {', '.join(known)}",
                    "A newer version wrote it: update this one.",
                )
        if (self.final == TOP_K) != (self.top_k > 0):
            raise DatasetError(
                "storage options",
                f"final is kept as {self.final} with top_k {self.top_k}",
                "a positive top_k with `final: top_k`, and 0 otherwise",
                "Correct one of the two.",
            )

    @classmethod
    def of(cls, fields: Any, where: str) -> "Encoding":
        """From a manifest's or sidecar's fields.

        Raises:
            DatasetError: names the option this version does not know.
        """
        try:
            return cls(**fields)
        except TypeError as exc:
            raise DatasetError(where, f"storage options that are not known here ({exc})", None,
                               "A newer version wrote it: update this one.") from exc  # fmt: skip

    @property
    def plain(self) -> bool:
        """Everything is kept as captured."""
        return self == PLAIN

    def fingerprint_fields(self) -> dict[str, str]:
        """What the fingerprint says of it: nothing when plain, so that states kept otherwise are never mixed."""
        return {} if self.plain else {"kept": self.in_words()}

    def in_words(self) -> str:
        final = f"top {self.top_k} logits" if self.final == TOP_K else self.final
        return f"aux {self.aux}, final {final}{' where it teaches' if self.final_rows == TAUGHT else ''}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def bytes_per_token(self, hidden_size: int, blocks: int, item_bytes: int, taught_share: float = 1.0) -> float:
        """Mean bytes of one token's states. `taught_share`: of the tokens, those whose row teaches."""
        sizes = {CAPTURED: item_bytes * hidden_size, BFLOAT16: 2 * hidden_size, TOP_K: 6 * self.top_k}
        sizes |= dict.fromkeys(_CODES, hidden_size + 4)
        share = taught_share if self.final_rows == TAUGHT else 1.0
        return blocks * sizes[self.aux] + share * sizes[self.final]


PLAIN = Encoding()


def taught_rows(loss_mask_S: Tensor) -> Tensor:
    """[S] bool: the rows of a sample's final state whose logits can teach."""
    learn = loss_mask_S.bool()
    taught = torch.zeros_like(learn)
    taught[:-1] = learn[:-1] & learn[1:]
    return taught


def quantise(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes [..., H] and scales [...] float32 of rows [..., H]. A row of zeros has the scale 1."""
    wide = rows.float()
    scale = wide.abs().amax(-1) / _LARGEST[kind]
    scale[scale == 0] = 1.0
    wide = wide / scale.unsqueeze(-1)
    if kind == INT8:
        wide = wide.round_()
    return wide.clamp_(-_LARGEST[kind], _LARGEST[kind]).to(_CODES[kind]), scale


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows again, off by half a step: scale / 2 (int8); a 16th of the value, or scale / 1024 (float8_e4m3)."""
    return (codes.float() * scale.unsqueeze(-1)).to(dtype)
