"""The ranks of one training: what they add up, and how the drafter's weights are spread over them (FSDP2).

Each rank keeps its share of every weight, gradient and optimiser state. The whole weights exist from the first packed
row of an optimiser step to its last backward pass, or during an evaluation; no collective runs in between, so ranks may
have unequal numbers of rows.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from drafter.model import Eagle3Drafter


class Ranks:
    """This process among those of an initialised `torch.distributed` group, or alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.count = dist.get_world_size() if dist.is_initialized() else 1
        self.first = self.count == 1 or dist.get_rank() == 0

    def shard(self, drafter: Eagle3Drafter) -> None:
        """Leaves each rank its share of every weight; nothing when alone. Optimisers are to be made afterwards."""
        if self.count == 1 or isinstance(drafter, FSDPModule):
            return
        mesh = init_device_mesh(self.device.type, (self.count,))
        sharded = fully_shard(drafter, mesh=mesh, reshard_after_forward=False)
        # Sums: the loss is divided by the tokens of all ranks already. Gloo knows no other kind.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(drafter, "zero")

    @contextmanager
    def gathered(self, drafter: Eagle3Drafter) -> Iterator[None]:
        """Whole weights within; no gradients are exchanged."""
        if not isinstance(drafter, FSDPModule):
            yield
            return
        drafter.unshard()
        yield
        drafter.reshard()

    @contextmanager
    def summed_gradients(self, drafter: Eagle3Drafter) -> Iterator[None]:
        """Whole weights within; on leaving, the gradients of all backward passes made there are summed over the ranks.
        Every weight has a gradient then, also where no row had a loss."""
        if not isinstance(drafter, FSDPModule):
            yield
            for weight in drafter.parameters():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            return
        drafter.unshard()
        drafter.set_requires_gradient_sync(False)
        drafter.set_reshard_after_backward(False)
        yield
        drafter.set_requires_gradient_sync(True)
        drafter.set_reshard_after_backward(True)
        drafter.zero().backward()

    def sum(self, values: Tensor) -> None:
        """Adds up over the ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)

    def total(self, value: float) -> float:
        """Added up over the ranks."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """The largest over the ranks, so that their clocks do not make their learning rates differ."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        if self.count == 1:
            return value
        reduced = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, how)
        return float(reduced)

    def anywhere(self, here: bool) -> bool:
        """True when it is true on some rank, so that all ranks turn together."""
        return self.largest(float(here)) > 0

    def wait(self) -> None:
        """Until every rank is here."""
        if self.count > 1:
            dist.barrier()


def whole(value: Tensor) -> Tensor:
    """A tensor spread over the ranks, whole on each of them (every rank must ask); any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Name -> weight or buffer, whole, on the CPU; every rank must ask."""
    return {name: whole(value.detach()).cpu().contiguous() for name, value in module.state_dict().items()}


def leave(code: int) -> NoReturn:
    """Ends this process, out of its group if it is in one. Whatever must outlive it is on disk by then.

    A thread of Gloo may still hold a tensor that Python made. When it lets go of it while the interpreter shuts down,
    the process aborts ("terminate called without an active exception"), and torchrun calls a training that is done a
    failure. So a rank leaves without that shutdown.
    """
    if not dist.is_initialized():
        sys.exit(code)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
