"""Norms that are one kernel on a GPU: which modules they are, and what the kernel computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe_infinity.gpu.fused_modules import FusedModules
from moe_infinity.gpu.kernels import kernels_for
from moe_infinity.gpu.kernels import rows as triton_rows
from moe_infinity.gpu.kernels.descriptions import FORMS
from moe_infinity.gpu.kernels.reference import add_rms_norm, rms_norm
from moe_infinity.gpu.residuals import find_norms
from tests.gpu.kernels.interpreted import round_as_gpus_do
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

PLAIN = kernels_for(torch.device("cpu"))
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
    own = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    for norm in own:
        norm.weight.data = torch.randn_like(norm.weight)
    rows = [torch.randn(2, 5, len(n.weight)).to(n.weight.dtype) for n in own]
    with torch.no_grad():
        expected = [norm(x) for norm, x in zip(own, rows, strict=True)]
        fused = find_norms(model, PLAIN)
        assert set(fused) == set(own)
        assert bool(own) == is_whole
        found = [fused[norm].forward(x) for norm, x in zip(own, rows, strict=True)]
    assert all(map(torch.equal, found, expected))


def test_modules_get_their_own_forward_back():
    model = tiny.tiny_model(architectures_in("qwen3_moe")[0])
    fused = FusedModules(model, PLAIN)
    modules = [module for module, _ in fused.forwards]
    assert {type(module).__name__ for module in modules} == {
        "Qwen3MoeRMSNorm", "Qwen3MoeAttention", "Qwen3MoeTopKRouter", "Qwen3MoeDecoderLayer",
    }  # fmt: skip
    with fused.installed():
        assert all("forward" in vars(module) for module in modules)
    assert not any("forward" in vars(module) for module in modules)


class Counted:
    """A norm whose kernels count how often they run."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        kernels = PLAIN._replace(
            rms_norm=self._noting("rms_norm", rms_norm),
            add_rms_norm=self._noting("add_rms_norm", add_rms_norm),
        )
        model = tiny.tiny_model(architectures_in("qwen3_moe")[0])
        self.module = model.model.norm
        self.norm = find_norms(model, kernels)[self.module]
        shape = 2, 3, len(self.module.weight)
        self.terms = [torch.randn(shape).to(self.module.weight.dtype) for _ in range(3)]

    def _noting(self, name: str, run: Any) -> Any:
        def noting(*args: Any) -> Any:
            self.calls.append(name)
            return run(*args)

        return noting


@pytest.mark.parametrize("num_added", [1, 2])
@torch.no_grad()
def test_a_sum_comes_with_its_norm(num_added):
    it = Counted()
    x, *added = it.terms[: 1 + num_added]
    total = it.norm.add(x, *added)
    assert torch.equal(total, x + sum(added[1:], added[0]))
    assert torch.equal(it.norm.forward(total), it.module(total))
    assert it.calls == ["add_rms_norm"]


@torch.no_grad()
def test_a_norm_of_anything_else_is_computed():
    it = Counted()
    x, other, third = it.terms
    it.norm.add(x, other)
    assert torch.equal(it.norm.forward(third), it.module(third))
    total = it.norm.add(x, other)
    total += 1
    assert torch.equal(it.norm.forward(total), it.module(total))
    assert it.calls == 2 * ["add_rms_norm", "rms_norm"]


def test_in_inference_mode_sums_come_alone():
    """A change in place would not be seen."""
    it = Counted()
    with torch.inference_mode():
        total = it.norm.add(*it.terms)
        assert torch.equal(it.norm.forward(total), it.module(total))
    assert it.calls == ["rms_norm"]


class Capped(nn.Module):
    """Looks like one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, "rounded twice").clamp(-1, 1)


def test_what_computes_anything_else_is_left_alone():
    assert not find_norms(nn.Sequential(Capped(), nn.LayerNorm(8)), PLAIN)


def test_gradients_take_the_modules_own_code():
    model = tiny.tiny_model(architectures_in("qwen3_moe")[0])
    FusedModules(model, PLAIN)
    x = torch.randn(1, len(model.model.norm.weight), dtype=model.dtype, requires_grad=True)
    model.model.norm(x).sum().backward()
    assert x.grad is not None


@pytest.mark.triton
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [8, 100, 512])
def test_the_kernel_is_its_definition_but_for_the_order_of_sums(form, width):
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2**-6)):
        x = torch.randn(2, 3, width).to(dtype)
        weight = torch.randn(width).to(dtype)
        found = triton_rows.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6, form).cpu()
        expected = rms_norm(x, weight, 1e-6, form)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        strided = torch.cat([x, x], -1).to(DEVICE)[0, :, :width]
        assert torch.equal(
            triton_rows.rms_norm(strided, weight.to(DEVICE), 1e-6, form).cpu(), found[0]
        )
        other = rms_norm(x, weight, 1e-6, "plus one" if form != "plus one" else FORMS[0])
        assert not torch.allclose(found, other, rtol=tolerance, atol=tolerance)


@pytest.mark.triton
@pytest.mark.parametrize("num_added", [1, 2])
@pytest.mark.parametrize("width", [8, 100])
def test_sums_of_the_kernel_have_the_bits_of_their_definition(monkeypatch, width, num_added):
    round_as_gpus_do(monkeypatch)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, *added = torch.randn(1 + num_added, 2, 3, width).to(dtype)
        weight = torch.randn(width).to(dtype)
        given = x.to(DEVICE), tuple(t.to(DEVICE) for t in added)
        total, normed = triton_rows.add_rms_norm(*given, weight.to(DEVICE), 1e-6, FORMS[0])
        expected, _ = add_rms_norm(x, tuple(added), weight, 1e-6, FORMS[0])
        assert torch.equal(total.cpu(), expected)
        assert torch.equal(normed, triton_rows.rms_norm(total, weight.to(DEVICE), 1e-6, FORMS[0]))
