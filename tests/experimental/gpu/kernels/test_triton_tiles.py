"""Several tokens at once: tiles of rows, and experts that arrive in parts."""

from __future__ import annotations

import pytest
import torch

from tests.experimental.gpu.kernels.test_triton_experts import (
    DEVICE,
    KERNELS,
    Experts,
    inputs,
    routing,
)

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.experimental.gpu.kernels import experts as triton_experts
from moe_infinity.experimental.gpu.kernels import tiles as triton_tiles

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bf16", "int4 32"])
def test_a_token_gets_the_same_bits_in_any_company(kind):
    """Of as many tokens."""
    experts = Experts(kind, 64, 96, num=6)
    x, (index, weights) = inputs(kind, 4, 64), routing(4, 3, 6)
    found = experts.compute(triton_experts, x, index, weights)
    for t in range(4):
        others, (other_index, _) = inputs(kind, 4, 64), routing(4, 3, 6)
        others[t], other_index[t] = x[t], index[t]
        again = experts.compute(triton_experts, others, other_index, weights)
        assert torch.equal(again[t], found[t])


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("kernels", KERNELS)
def test_experts_may_be_computed_in_any_parts(kernels, num_tokens):
    experts = Experts("bf16", 64, 96, num=6)
    x, (index, weights) = inputs("bf16", num_tokens, 64), routing(num_tokens, 4, 6)
    found = experts.compute(kernels, x, index, weights)
    device = DEVICE if kernels is triton_experts else "cpu"
    slots = experts.slots.to(device)
    pointers = slots.data_ptr() + torch.arange(6) * slots.shape[1]
    x, index, weights = (t.to(device) for t in (x, index, weights))
    out = torch.full((num_tokens * 4, 64), torch.nan, device=device)
    for part in ([4, 1], [0], [2, 3, 5]):
        some = torch.zeros_like(pointers)
        some[part] = pointers[part]
        kernels.compute_pairs(experts.mlp, x, index, weights, some.to(device), out)
    again = kernels.sum_pairs(experts.mlp, out, index, weights, x.dtype)
    assert torch.equal(again.cpu(), found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bf16", "int4 32"])
def test_many_tokens_have_larger_tiles(kind, monkeypatch):
    """More of an expert's rows than a tile has, and experts that nobody uses."""
    monkeypatch.setattr(triton_tiles, "MANY_ROWS", 32)
    monkeypatch.setattr(triton_tiles, "MANY_PAIRS", 100)
    monkeypatch.setattr(triton_tiles, "PLAN_BLOCK", 64)
    experts = Experts(kind, 64, 96, num=5)
    x, (index, weights) = inputs(kind, 90, 64), routing(90, 2, 3)
    index[7, 1] = -1
    found = experts.compute(triton_experts, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1
