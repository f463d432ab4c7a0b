"""Products of rows with a weight, by the library that is faster on this processor.

PyTorch multiplies float32 with MKL, which gives a processor that is not Intel's its AVX2 kernels, also where there is
AVX-512. There oneDNN takes 0.7 to 0.9 of the time (461 to 1,792 rows, 576 to 8,192 wide, an AMD EPYC, two threads);
for a weight's gradient they take longer. The choice follows from the processor alone, so that a training goes on to the
bit.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

_FEW = 64  # rows: the call costs more than it saves


def forward_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, in] @ weight [out, in].T. No autograd."""
    return _onednn(x, weight) if _may(x, weight) else x @ weight.T


def backward_product(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [R, out] @ weight [out, in]. No autograd."""
    return _onednn(grad, weight.T) if _may(grad, weight) else grad @ weight


def _may(x: Tensor, weight: Tensor) -> bool:
    if not (x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and len(x) >= _FEW):
        return False
    # A part of a wider matrix it multiplies value by value, in seconds.
    return x.is_contiguous() and weight.is_contiguous() and _mkl_is_slow()


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch has no public name for it; its compiler calls the same."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


@functools.cache
def _mkl_is_slow() -> bool:
    """Whether this is a processor with AVX-512 that is not Intel's, and this PyTorch has both libraries."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        vendors = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("vendor_id")]
    except OSError:
        return False
    return bool(vendors) and "GenuineIntel" not in vendors[0]
