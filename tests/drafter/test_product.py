"""Both libraries give the same products, whatever the matrices look like in memory."""

import pytest
import torch

from drafter import product
from drafter.product import backward_product, forward_product


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(product, "_mkl_is_slow", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 200])
@pytest.mark.parametrize("form", ["whole", "part of a wider weight", "rows of a wider matrix", "transposed"])
def test_a_product_is_what_torch_makes_of_it(library: bool, dtype: torch.dtype, rows: int, form: str) -> None:
    torch.manual_seed(rows)
    x, grad, weight = torch.randn(rows, 96), torch.randn(rows, 160), torch.randn(160, 96)
    if form == "part of a wider weight":
        weight = torch.randn(160, 192)[:, 96:]
    elif form == "rows of a wider matrix":
        x, grad = torch.randn(rows, 192)[:, :96], torch.randn(rows, 320)[:, 160:]
    elif form == "transposed":
        weight, x = torch.randn(96, 160).T, torch.randn(96, rows).T
    x, grad, weight = x.to(dtype), grad.to(dtype), weight.to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5}[dtype]
    assert torch.allclose(forward_product(x, weight), x @ weight.T, rtol=tolerance, atol=tolerance)
    assert torch.allclose(backward_product(grad, weight), grad @ weight, rtol=tolerance, atol=tolerance)


def test_a_product_takes_the_faster_library_only_where_it_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies a part of a wider weight a thousand times slower."""
    called = []
    monkeypatch.setattr(product, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(product, "_onednn", lambda x, weight: called.append(x.shape) or x @ weight.T)
    x, weight = torch.randn(100, 96), torch.randn(160, 192)
    forward_product(x, weight[:, :96])
    forward_product(x[:10], weight[:, :96].contiguous())
    forward_product(x.double(), weight[:, :96].double())
    assert not called
    forward_product(x, weight[:, :96].contiguous())
    assert len(called) == 1
