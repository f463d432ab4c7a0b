"""Other trainers' offline formats: what their files say, and what they leave unsaid.

    specforge       rows_{g}-{g+2000}/data_{i}.ckpt, or .ckpt.gz
                    hidden_state [1,S,H] is final, post-norm; aux_hidden_state [1,S,AH]
    speculators-v1  data_{i}.pt, sample_lengths.json
                    hidden_states: a list of A + 1 tensors [S,H], the last is final, pre-norm
    speculators     (>= 0.5) an Arrow table, hidden_states/hs_{i}.safetensors
                    hidden_states [S,A+1,H], the last is final, pre-norm
    modelopt        {conversation}.pt
                    hidden_states [S,H] is final, post-norm; aux_hidden_states [S,AH]
    angelslim       rank_{r}/rows_{g}-{g+5000}/data_{i}.ckpt
                    target_hiddens [1,S,H] is final, post-norm; hidden_states [1,S,AH] are the blocks'

S tokens, A captured blocks, H hidden size. `hidden_states` is the final state in one, the blocks' in another, all of
them in the third. None of the files says which blocks were captured, and none shifts: row t is the state of token t.
A missing loss mask is told apart from one of ones.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hidden_states.errors import DataError
from hidden_states.shard_layout import CODES
from hidden_states.vocab import VocabMap


@dataclass(frozen=True)
class ForeignSample:
    """One file's sample: `input_ids` [S], `loss_mask` [S] or None where the file has none, `aux` [S,A,H], `final`
    [S,H]. `name`: the file's path below the format's folder. `final_norm`: where the file itself says it."""

    name: str
    input_ids: Tensor
    loss_mask: Tensor | None
    aux: Tensor
    final: Tensor
    final_norm: str | None = None


class Format(ABC):
    """How one trainer keeps its samples. `final_norm`: what its own writer stores, "post" or "pre"."""

    name: str
    final_norm: str

    @abstractmethod
    def files(self, folder: Path) -> list[Path]:
        """The samples' files, in the order their trainer reads them."""

    @abstractmethod
    def read(self, path: Path, folder: Path) -> ForeignSample:
        """One of `files`.

        Raises:
            DataError: it is not of this format; names the key or shape that shows it.
        """

    @abstractmethod
    def write(self, folder: Path, samples: Iterator[ForeignSample], count: int, vocab: VocabMap | None) -> None:
        """Makes `folder` one that the trainer reads: `count` samples."""

    def sample(
        self, path: Path, folder: Path, ids: Tensor, mask: Tensor | None, aux: Tensor, final: Tensor,
        final_norm: str | None = None,
    ) -> ForeignSample:  # fmt: skip
        """What a file holds, once its tensors are what they stand for.

        Raises:
            DataError: one is no tensor of values, or their dtypes or shapes are not those of a sample.
        """
        parts = {"tokens": ids, "loss mask": mask, "aux": aux, "final": final}
        for what, part in parts.items():
            if not _is_plain(part) and not (part is None and what == "loss mask"):
                raise self.refuse(path, f"{what} is {_kind(part)}", "a tensor of values")
        shapes = ", ".join(f"{what} {list(part.shape)}" for what, part in parts.items() if part is not None)
        right = ids.dim() == 1 and aux.dim() == 3 and final.dim() == 2 and len(ids) == len(aux) == len(final)
        if not right or aux.shape[2] != final.shape[1] or (mask is not None and mask.shape != ids.shape):
            raise self.refuse(path, shapes, "[S], [S], [S,A,H], [S,H]")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise self.refuse(path, f"tokens of {ids.dtype}", "integers")
        if mask is not None and mask.is_complex():
            raise self.refuse(path, f"a loss mask of {mask.dtype}", "zeros and ones")
        if aux.dtype != final.dtype or final.dtype not in CODES:
            raise self.refuse(
                path, f"states of {aux.dtype} and {final.dtype}", f"both of one of {', '.join(map(str, CODES))}"
            )
        return ForeignSample(path.relative_to(folder).as_posix(), as_int64(ids), mask, aux, final, final_norm)

    def refuse(self, path: Path, found: str, expected: str | None = None) -> DataError:
        return DataError(str(path), found, expected, f"Is this {self.name}'s format? See `eyas import --help`.")


def _is_plain(part: object) -> bool:
    """Whether it is a tensor whose values lie in memory, one after the other."""
    if not isinstance(part, Tensor) or part.is_nested or part.is_quantized:
        return False
    return part.layout == torch.strided and part.device.type == "cpu"


def _kind(part: object) -> str:
    return f"a tensor of another kind ({part.type()})" if isinstance(part, Tensor) else f"a {type(part).__name__}"


def split_blocks(aux: Tensor, size: int) -> Tensor:
    """[S,AH] -> [S,A,H]."""
    return aux.view(len(aux), -1, size)


def in_order(paths: Sequence[Path]) -> list[Path]:
    """data_2 before data_10."""
    return sorted(paths, key=lambda path: [int(t) if t.isdecimal() else t for t in re.split(r"(\d+)", str(path))])


def formats() -> dict[str, Format]:
    """By name."""
    from hidden_states.formats_arrow import Speculators
    from hidden_states.formats_pickle import AngelSlim, ModelOpt, SpecForge, SpeculatorsV1

    return {f.name: f for f in (SpecForge(), SpeculatorsV1(), Speculators(), ModelOpt(), AngelSlim())}


def format_of(name: str) -> Format:
    """Raises DataError when there is no such format."""
    known = formats()
    if name not in known:
        raise DataError(f"format {name!r}", "not known", ", ".join(known))
    return known[name]


def as_int64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64)
