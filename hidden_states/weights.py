"""Single matrices out of a target's safetensors files, memory-mapped: a head of 2.3 GB is never loaded as a whole."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hidden_states.errors import DataError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class TargetWeights:
    """Names and slices of the tensors of a Hugging Face folder.

    Raises:
        DataError: there are no safetensors files, or they cannot be read.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._files = self._file_of_each()
        self._open: dict[str, Any] = {}

    def find(self, *suffixes: str) -> str | None:
        """The shortest tensor name that ends in one of the suffixes: the first suffix that any name has decides.

        Shortest, because multimodal models and drafters for multi-token prediction carry further heads deeper down.
        """
        for suffix in suffixes:
            names = [name for name in self._files if name == suffix or name.endswith("." + suffix)]
            if names:
                return min(names, key=lambda name: (len(name), name))
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def parameters(self) -> int:
        """Number of values in all tensors."""
        return sum(math.prod(self.shape(name)) for name in self._files)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a matrix, in the file's dtype."""
        part: torch.Tensor = self._slice(name)[start:stop]
        return part

    def whole(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle(name).get_tensor(name)
        return tensor

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DataError(str(self.folder / file), f"cannot be read ({error})", "the target's weights") from error
        return self._open[file]

    def _file_of_each(self) -> dict[str, str]:
        index, single = self.folder / _INDEX, self.folder / _SINGLE
        try:
            if index.is_file():
                return dict(json.loads(index.read_text())["weight_map"])
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), _SINGLE)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DataError(
                str(self.folder),
                f"its weights cannot be read ({error})",
                f"{_SINGLE}, or {_INDEX} with its parts",
                "Is this the target's Hugging Face folder?",
            ) from error
