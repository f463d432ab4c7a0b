"""Formats whose samples are torch pickles. They are opened with `weights_only=True`: a pickle can run code, and a file
that needs more than tensors, numbers and strings is refused."""

import gzip
import io
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError  # the error alone: nothing here unpickles by itself
from typing import Any

import torch
from torch import Tensor

from hidden_states.formats import ForeignSample, Format, as_int64, in_order, split_blocks
from hidden_states.vocab import VocabMap


class PickleFormat(Format):
    """One torch.save'd dictionary a sample."""

    patterns: tuple[str, ...]
    keys: tuple[str, ...]

    def files(self, folder: Path) -> list[Path]:
        return in_order([path for pattern in self.patterns for path in folder.rglob(pattern)])

    def read(self, path: Path, folder: Path) -> ForeignSample:
        data = self._load(path)
        missing = [key for key in self.keys if key not in data]
        if missing:
            raise self.refuse(path, f"no {', '.join(missing)} among its keys ({', '.join(map(str, data))})")
        try:
            ids, mask, aux, final = self.parts(data)
        except (RuntimeError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise self.refuse(path, f"its tensors do not fit together ({error})") from error
        said = None
        if "hidden_states_prenorm" in data:  # ModelOpt's newer files
            said = "pre" if data["hidden_states_prenorm"] else "post"
        return self.sample(path, folder, ids, mask, aux, final, said)

    @abstractmethod
    def parts(self, data: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """ids [S], mask [S], aux [S,A,H], final [S,H]."""

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            if path.suffix == ".gz":
                with gzip.open(path, "rb") as file:
                    data = torch.load(io.BytesIO(file.read()), weights_only=True)
            else:
                data = torch.load(path, weights_only=True, mmap=True)
        except UnpicklingError as error:
            raise self.refuse(
                path, "it holds more than tensors, and loading it could run code", "a dictionary of tensors"
            ) from error
        except Exception as error:  # torch ends in any of ten types on a torn file; they all mean this
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise self.refuse(path, f"it cannot be read ({said})", "a dictionary of tensors") from error
        if not isinstance(data, dict):
            raise self.refuse(path, f"a {type(data).__name__}", "a dictionary of tensors")
        return data

    def _write(
        self, folder: Path, samples: Iterator[ForeignSample], place: Callable[[int], str],
        content: Callable[[int, ForeignSample], dict[str, Any]],
    ) -> list[int]:  # fmt: skip
        """Returns the samples' lengths."""
        lengths = []
        for number, sample in enumerate(samples):
            path = folder / place(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            # A view of something larger would be saved with all of it.
            _save({k: _own(v) for k, v in content(number, sample).items()}, path)
            lengths.append(len(sample.input_ids))
        return lengths


def _save(content: dict[str, Any], path: Path) -> None:
    try:
        with open(path, "wb") as file:
            torch.save(content, file)
    except RuntimeError as error:  # of torch, in place of what the file said (a full disk)
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _alone(batch: Tensor) -> Tensor:
    """[1,...] -> [...]. A second sample would be lost in silence."""
    (sample,) = batch
    return sample


def _own(value: Any) -> Any:
    if isinstance(value, list):
        return [_own(inner) for inner in value]
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value


def _mask(sample: ForeignSample) -> Tensor:
    assert sample.loss_mask is not None  # our datasets always have one
    return as_int64(sample.loss_mask)


class SpecForge(PickleFormat):
    name, final_norm, patterns = "specforge", "post", ("data_*.ckpt", "data_*.ckpt.gz")
    keys = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")

    def parts(self, data: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        final, aux = _alone(data["hidden_state"]), _alone(data["aux_hidden_state"])
        return data["input_ids"], data["loss_mask"], split_blocks(aux, final.shape[1]), final

    def write(self, folder: Path, samples: Iterator[ForeignSample], count: int, vocab: VocabMap | None) -> None:
        self._write(
            folder, samples, lambda i: f"rows_{i // 2000 * 2000}-{i // 2000 * 2000 + 2000}/data_{i}.ckpt",
            lambda _, s: {
                "input_ids": s.input_ids, "loss_mask": _mask(s), "hidden_state": s.final[None],
                "aux_hidden_state": s.aux.flatten(1)[None],
            },
        )  # fmt: skip
        if vocab is not None:
            (folder / "vocab_mapping").mkdir(exist_ok=True)
            _save({"d2t": vocab.d2t, "t2d": vocab.t2d}, folder / "vocab_mapping" / "vocab_mapping.pt")


class SpeculatorsV1(PickleFormat):
    name, final_norm, patterns = "speculators-v1", "pre", ("data_*.pt",)
    keys = ("input_ids", "loss_mask", "hidden_states")

    def parts(self, data: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        *aux, final = data["hidden_states"]
        return data["input_ids"], data["loss_mask"], torch.stack(aux, dim=1), final

    def write(self, folder: Path, samples: Iterator[ForeignSample], count: int, vocab: VocabMap | None) -> None:
        lengths = self._write(
            folder, samples, lambda i: f"data_{i}.pt",
            lambda _, s: {
                "input_ids": s.input_ids, "loss_mask": _mask(s), "hidden_states": [*s.aux.unbind(1), s.final],
            },
        )  # fmt: skip
        (folder / "sample_lengths.json").write_text(json.dumps({str(i): n for i, n in enumerate(lengths)}))
        (folder / "data_config.json").write_text(json.dumps({"num_samples": len(lengths), "written_by": "eyas"}))


class ModelOpt(PickleFormat):
    name, final_norm, patterns = "modelopt", "post", ("*.pt",)
    keys = ("input_ids", "hidden_states", "aux_hidden_states")

    def parts(self, data: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        final = data["hidden_states"]
        return data["input_ids"], data.get("loss_mask"), split_blocks(data["aux_hidden_states"], final.shape[1]), final

    def write(self, folder: Path, samples: Iterator[ForeignSample], count: int, vocab: VocabMap | None) -> None:
        self._write(
            folder, samples, lambda i: f"{i:08}.pt",
            lambda i, s: {
                "input_ids": s.input_ids, "hidden_states": s.final, "aux_hidden_states": s.aux.flatten(1),
                "loss_mask": _mask(s), "conversation_id": f"{i:08}",
            },
        )  # fmt: skip


class AngelSlim(PickleFormat):
    name, final_norm, patterns = "angelslim", "post", ("*.ckpt",)
    keys = ("input_ids", "loss_mask", "target_hiddens", "hidden_states")

    def parts(self, data: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        final = _alone(data["target_hiddens"])
        aux = split_blocks(_alone(data["hidden_states"]), final.shape[1])
        return _alone(data["input_ids"]), _alone(data["loss_mask"]), aux, final

    def write(self, folder: Path, samples: Iterator[ForeignSample], count: int, vocab: VocabMap | None) -> None:
        self._write(
            folder, samples, lambda i: f"rank_0/rows_{i // 5000 * 5000}-{i // 5000 * 5000 + 5000}/data_{i}.ckpt",
            lambda _, s: {
                "input_ids": s.input_ids[None], "loss_mask": _mask(s)[None], "target_hiddens": s.final[None],
                "hidden_states": s.aux.flatten(1)[None],
            },
        )  # fmt: skip
