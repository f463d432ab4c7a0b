"""Autograd functions that pass over memory less often than their composition would, and keep less of it.

Shapes: R rows, H features of a row, I features of the MLP. Each is checked against its composition in float64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        wide = x.to(scale.dtype)
        grad = grad.to(scale.dtype)
        unit = wide * scale  # the normed row before the weight
        grad_weight = (grad * unit).sum(0) if ctx.needs_input_grad[1] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_unit = grad * weight
            along = torch.linalg.vecdot(grad_unit, unit).div_(x.shape[-1]).unsqueeze_(-1)
            grad_x = grad_unit.addcmul_(unit, along, value=-1).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [R, H], in at least float32 inside."""
    out: Tensor = _RMSNorm.apply(x, weight, eps, out_dtype or x.dtype)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = torch.nn.functional.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(up * grad, gate), grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [R, I]; keeps only its inputs."""
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


class SharedWeight:
    """A weight [out, in] used once at every step, whose gradient is summed where it is made.

    Autograd would make a full gradient per use and add them up: at K steps that is K-1 more passes over every weight
    than over the products themselves. Here each use adds its outer product to one buffer inside the matrix product, and
    the last use to be differentiated hands the sum on. Every use must reach the loss; uses are known by their step, so
    that a recomputed forward pass (activation checkpointing) is not taken for another one.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.pending: set[int] = set()
        self.total: Tensor | None = None

    def __call__(self, x: Tensor, use: int) -> Tensor:
        """x [R, in] -> [R, out]."""
        out: Tensor = _SharedProduct.apply(x, self.weight, self, use)
        return out


class _SharedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shared: SharedWeight, use: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shared, ctx.use = shared, use
        if ctx.needs_input_grad[1]:
            shared.pending.add(use)
        return x @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        shared: SharedWeight = ctx.shared
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            if shared.total is None:
                shared.total = grad.T @ x
            else:
                shared.total.addmm_(grad.T, x)
            shared.pending.discard(ctx.use)
            if not shared.pending:
                grad_weight, shared.total = shared.total, None
        return grad_x, grad_weight, None, None
