"""Norms that are one kernel on a GPU: which modules they are, and what the kernel computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_infinity.cuda.fused_modules import FusedModules
from moe_infinity.cuda.norms import fuse_norms
from moe_infinity.kernels import has_triton_kernels
from moe_infinity.kernels.cuda.norms_reference import FORMS, plain_rms_norm
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("folder", "is_whole"),
    [
        ("qwen3_moe", True),
        ("deepseek_v2", True),
        ("gpt_oss", True),
        ("qwen3_next", True),
        ("phimoe", False),  # it has LayerNorms
    ],
)
def test_rms_norms_are_found_and_keep_their_bits(folder, is_whole):
    torch.manual_seed(0)
    model = tiny.tiny_model(architectures_in(folder)[0])
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.weight.data = torch.randn_like(norm.weight)
    rows = [torch.randn(2, 5, len(n.weight)).to(n.weight.dtype) for n in norms]
    with torch.no_grad():
        expected = [norm(x) for norm, x in zip(norms, rows, strict=True)]
        fused = dict(fuse_norms(model, CPU))
        assert set(fused) == set(norms)
        assert bool(norms) == is_whole
        found = [fused[norm](x) for norm, x in zip(norms, rows, strict=True)]
    assert all(map(torch.equal, found, expected))


def test_modules_get_their_own_forward_back():
    model = tiny.tiny_model(architectures_in("qwen3_moe")[0])
    fused = FusedModules(model, CPU)
    assert {type(module).__name__ for module in fused.modules} == {
        "Qwen3MoeRMSNorm", "Qwen3MoeAttention", "Qwen3MoeTopKRouter",
    }  # fmt: skip
    assert all("forward" in vars(module) for module in fused.modules)
    fused.close()
    assert not any("forward" in vars(module) for module in fused.modules)


class Capped(nn.Module):
    """Looks like one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return plain_rms_norm(x, self.weight, self.eps, "rounded twice").clamp(-1, 1)


def test_what_computes_anything_else_is_left_alone():
    assert not list(fuse_norms(nn.Sequential(Capped(), nn.LayerNorm(8)), CPU))


def test_gradients_take_the_modules_own_code():
    model = tiny.tiny_model(architectures_in("qwen3_moe")[0])
    FusedModules(model, CPU)
    x = torch.randn(1, len(model.model.norm.weight), dtype=model.dtype, requires_grad=True)
    model.model.norm(x).sum().backward()
    assert x.grad is not None


@pytest.mark.triton
@pytest.mark.skipif(not has_triton_kernels(), reason="needs triton")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [8, 100, 512])
def test_the_kernel_is_its_definition_but_for_the_order_of_sums(form, width):
    from moe_infinity.kernels.cuda.norms import rms_norm

    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2**-6)):
        x = torch.randn(2, 3, width).to(dtype)
        weight = torch.randn(width).to(dtype)
        found = rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6, form).cpu()
        expected = plain_rms_norm(x, weight, 1e-6, form)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        other = plain_rms_norm(x, weight, 1e-6, "plus one" if form != "plus one" else FORMS[0])
        assert not torch.allclose(found, other, rtol=tolerance, atol=tolerance)
