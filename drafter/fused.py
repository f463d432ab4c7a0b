"""Autograd functions that pass over memory less often than their composition would, and keep less of it.

Shapes: R rows, H features of a row, I features of the MLP. Each is checked against its composition in float64.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from drafter.product import backward_product, forward_product


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = wide * scale  # the normed row before the weight
        ctx.save_for_backward(unit, weight, scale)
        ctx.dtype = x.dtype
        return (unit * weight).to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        unit, weight, scale = ctx.saved_tensors
        grad = grad.to(scale.dtype)
        grad_weight = (grad * unit).sum(0) if ctx.needs_input_grad[1] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_unit = grad * weight
            along = torch.linalg.vecdot(grad_unit, unit).div_(unit.shape[-1]).unsqueeze_(-1)
            grad_x = grad_unit.addcmul_(unit, along, value=-1).mul_(scale).to(ctx.dtype)
        return grad_x, grad_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [R, H], in at least float32 inside."""
    out: Tensor = _RMSNorm.apply(x, weight, eps, out_dtype or x.dtype)
    return out


class RMSNorm(nn.Module):
    """Holds an RMSNorm's weight; `rms_norm` does the work."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [R, size] -> the same shape."""
        return rms_norm(x, self.weight, self.eps, out_dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        open_ = torch.nn.functional.silu(gate)
        ctx.save_for_backward(gate_up, open_)
        return open_ * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, open_ = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(open_, grad, out=grad_up)
        torch.ops.aten.silu_backward(up * grad, gate, grad_input=grad_gate)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [R, I] of gate and up side by side [R, 2I]."""
    out: Tensor = _SwiGLU.apply(gate_up)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours, ctx.dtype = neighbours, x.dtype
        out = x.new_empty(x.shape, dtype=cos.dtype)
        _turn(_pairs(x, neighbours), _pairs(out, False), cos, sin, 1)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        out = grad.new_empty(grad.shape, dtype=cos.dtype)
        _turn(_pairs(grad, False), _pairs(out, ctx.neighbours), cos, sin, -1)
        return out.to(ctx.dtype), None, None, None


def _pairs(x: Tensor, neighbours: bool) -> tuple[Tensor, ...]:
    return (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)


def _turn(x: tuple[Tensor, ...], out: tuple[Tensor, ...], cos: Tensor, sin: Tensor, sign: int) -> None:
    torch.mul(x[0], cos, out=out[0]).addcmul_(x[1], sin, value=-sign)
    torch.mul(x[1], cos, out=out[1]).addcmul_(x[0], sin, value=sign)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """Turns the pairs (i, i + half) of x [R, heads, size], as Llama's weights expect, or `neighbours` (2i, 2i + 1), as
    DeepSeek's do; these leave in the first form: query and key alike, so that their product is the same. cos and sin
    [R, 1, size/2] are at least as wide as x."""
    out: Tensor = _Rotate.apply(x, cos, sin, neighbours)
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
        return forward_product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        shared: SharedWeight = ctx.shared
        grad_x = backward_product(grad, weight) if ctx.needs_input_grad[0] else None
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


class SharedRows:
    """Rows [T, W] looked up at every step, whose gradient is summed in place as in `SharedWeight`. (Autograd's gradient
    of indexing makes a full buffer per use, and adds to it with locks.)"""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.pending: set[int] = set()
        self.total: Tensor | None = None

    def __call__(self, index: Tensor, use: int, first: int = 0) -> Tensor:
        """Rows `index` [R], from column `first` on -> [R, W - first]."""
        out: Tensor = _SharedLookUp.apply(self.rows, index, self, use, first)
        return out


class _SharedLookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, shared: SharedRows, use: int, first: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shared, ctx.use, ctx.first, ctx.shape = shared, use, first, rows.shape
        if ctx.needs_input_grad[0]:
            shared.pending.add(use)
        return rows[:, first:].index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        shared: SharedRows = ctx.shared
        if shared.total is None:
            shared.total = grad.new_zeros(ctx.shape)
        shared.total[:, ctx.first :].index_add_(0, index, grad)
        shared.pending.discard(ctx.use)
        if shared.pending:
            return None, None, None, None, None
        total, shared.total = shared.total, None
        return total, None, None, None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_add_(0, index, grad), None


def take_rows(x: Tensor, index: Tensor | None) -> Tensor:
    """x[index], or x itself without an index; its gradient is made without autograd's locks."""
    if index is None:
        return x
    out: Tensor = _TakeRows.apply(x, index)
    return out
