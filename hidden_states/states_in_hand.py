"""States that do not come from a dump: another trainer's file, or a dataset that is written again. They are packed like
dumps; what a dump's record says of its tensors is summed up here instead."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eyas_capture import contract
from hidden_states.captured_rows import raw_bytes


class StatesInHand:
    """One sample's states: `aux` [S,A,H] and `final` [S,H], as `captured_rows.Captured` wants them."""

    def __init__(
        self,
        input_ids: list[int],
        aux: Tensor,
        final: Tensor,
        after_block: tuple[int, ...],
        final_norm: str,
        origin: str,
    ) -> None:
        self._tensors = {contract.INPUT_IDS: torch.tensor(input_ids, dtype=torch.int64)}
        self._tensors |= {contract.block_tensor(block): aux[:, i] for i, block in enumerate(after_block)}
        self._tensors[contract.FINAL] = final
        self._writer = SimpleNamespace(after_block=after_block, final_norm=final_norm, writer_id=origin)

    @property
    def record(self) -> Any:
        sums: Mapping[str, str] = {
            name: contract.tensor_checksum(raw_bytes(tensor)) for name, tensor in self._tensors.items()
        }
        return SimpleNamespace(checksums=sums)

    @property
    def writer(self) -> Any:
        return self._writer

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]
