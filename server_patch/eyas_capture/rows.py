"""Rows on their way out of the forward pass: one asynchronous copy, and a fence that tells when it has landed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RowCopier:
    """Copies rows from the model's device into host memory without making the forward pass wait.

    On a GPU: pinned destination, a side stream that starts when the forward stream's work so far is done, and
    `record_stream`, so that the allocator does not hand the source's memory to somebody else before the copy has read
    it (the rows would silently be another layer's). On the CPU the copy is done when it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for rows; pinned when the model is on a GPU."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._side is not None)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies made inside are ordered after what the current stream has done so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target` of the same shape; inside `copying()` only."""
        target.copy_(source, non_blocking=True)
        if self._side is not None and source.is_cuda:
            source.record_stream(self._side)

    def fence(self) -> Any:
        """Done when every copy so far has landed; None when they all have. Has `synchronize()`."""
        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record(self._side)
        return event
