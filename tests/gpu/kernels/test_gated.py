"""What an MLP computes between its products: the kernel against its definition."""

from __future__ import annotations

import pytest
import torch

from moe_infinity.gpu.kernels import reference
from moe_infinity.kernels.reference import Activation

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.gpu.kernels.rows import GATED_COLUMNS as COLUMNS
from moe_infinity.gpu.kernels.rows import gated

pytestmark = pytest.mark.triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITED = Activation("silu", alpha=1.702, shift=1.0, limit=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [3, COLUMNS + 5])
@pytest.mark.parametrize("activation", [Activation(), Activation("gelu_tanh"), LIMITED], ids=str)
def test_it_is_its_definition_but_for_rounding(activation, width, dtype):
    torch.manual_seed(0)
    gate_up = (3 * torch.randn(2, 2 * width)).to(dtype)
    found = gated(gate_up.to(DEVICE), activation).cpu()
    expected = reference.gated(gate_up, activation)
    assert found.dtype == dtype
    few = 1e-5 if dtype is torch.float32 else 2**-7  # the interpreter cuts off
    torch.testing.assert_close(found, expected, rtol=few, atol=few)
    turned = reference.gated(gate_up.roll(width, 1), activation)
    assert not torch.allclose(found, turned, rtol=few, atol=few)
