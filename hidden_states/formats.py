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

    def refuse(self, path: Path, found: str, expected: str | None = None) -> DataError:
        return DataError(str(path), found, expected, f"Is this {self.name}'s format? See `eyas import --help`.")


def split_blocks(aux: Tensor, size: int) -> Tensor:
    """[S,AH] -> [S,A,H]."""
    return aux.view(len(aux), -1, size)


def in_order(paths: Sequence[Path]) -> list[Path]:
    """data_2 before data_10."""
    return sorted(paths, key=lambda path: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", str(path))])


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
