"""Experts read by pointer, by Triton's kernels and by their reference, against the definition in
float64.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_infinity.kernels.reference import FUNCTIONS, Activation
from moe_infinity.kernels.triton.slot_mlp import SlotMlp
from moe_infinity.layout import PLAIN
from tests.kernels.triton.slot_experts import (
    DEVICE,
    KERNELS,
    OF_GPT_OSS,
    SILU,
    TRITON,
    Experts,
    inputs,
    routing,
    slot_moe,
)

KINDS = [*PLAIN, "bf16 transposed", "f32 transposed"]
ACTIVATIONS = [
    *map(Activation, FUNCTIONS),
    OF_GPT_OSS,
    Activation("silu", limit=3.0),
    Activation("relu2", is_gated=False),
    Activation("silu", is_gated=False),
]

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weight_computes_its_definition(kernels, kind, num_tokens):
    experts = Experts(kind, 160, 96, splits=kind == "bf16")
    x, (index, weights) = inputs(kind, num_tokens, 160), routing(num_tokens, 2)
    found = experts.compute(kernels, x, index, weights)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_activations_are_their_definition(kernels, act):
    experts = Experts("f32", 40, 24, act=act)
    x, (index, weights) = 20 * torch.randn(3, 40), routing(3, 2)
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["bf16", "bf16 transposed"])
def test_gpt_oss_has_biases_and_rows_of_gate_and_up_in_turn(kernels, kind):
    experts = Experts(kind, 64, 96, act=OF_GPT_OSS, is_interleaved=True, has_bias=True)
    x, (index, weights) = inputs(kind, 2, 64), routing(2, 4)
    found = experts.compute(kernels, x, index, weights.bfloat16())
    assert experts.largest_error(found, x, index, weights.bfloat16()) < 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("kind", "width", "expert_width"),
    [("bf16", 200, 72), ("bf16", 33, 17), ("bf16 transposed", 33, 17), ("f16 transposed", 17, 17),
     ("f16", 1000, 8), ("f32", 1, 1)],
)  # fmt: skip
def test_rows_of_a_weight_may_have_any_length(kernels, kind, width, expert_width):
    experts = Experts(kind, width, expert_width)
    x, (index, weights) = inputs(kind, 2, width), routing(2, 3)
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (8, 1), (1, 8), (3, 5), (8, 8)])
def test_any_number_of_tokens_and_experts(kernels, num_tokens, top_k):
    experts = Experts("bf16", 16, 16, num=9)
    x, (index, weights) = inputs("bf16", num_tokens, 16), routing(num_tokens, top_k, 9)
    index[0, 0] = index[-1, -1] = 0
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_pair_without_an_expert_adds_nothing(kernels):
    """Nothing is read at address 0: a kernel that does would end the test's process."""
    experts = Experts("bf16", 64, 32, has_bias=True)
    x, (index, weights) = inputs("bf16", 3, 64), routing(3, 2)
    index[0, 1] = -1
    index[2] = -1
    weights[2] = torch.nan  # what is not computed is not multiplied by either
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found[:2], x[:2], index[:2], weights[:2]) < 1
    assert (found[2] == 0).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("act", [SILU, OF_GPT_OSS])
def test_weights_of_the_routing_may_scale_what_goes_in(kernels, act):
    experts = Experts("bf16", 40, 24, act=act)
    x, (index, weights) = inputs("bf16", 3, 40), routing(3, 2)
    index[0, 1], weights[0, 1] = -1, torch.nan
    experts.mlp = replace(experts.mlp, weighs_input=True)
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1
    experts.mlp = replace(experts.mlp, weighs_input=False)
    assert experts.largest_error(found, x, index, weights) > 1


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["bf16", "bf16 transposed"])
def test_the_tolerance_rejects_what_is_wrong(kernels, kind):
    experts = Experts(kind, 64, 64, splits=True)
    x, (index, weights) = inputs(kind, 2, 64), routing(2, 3)

    def error() -> float:
        found = experts.compute(kernels, x, index, weights)
        return experts.largest_error(found, x, index, weights)

    assert error() < 1
    mlp = experts.mlp
    assert mlp.up is not None
    wrong: list[SlotMlp] = [replace(mlp, gate=mlp.up, up=mlp.gate), replace(mlp, gate=mlp.up)]
    wrong.append(replace(mlp, activation=Activation("gelu")))
    for experts.mlp in wrong:
        assert error() > 1
    experts.mlp = mlp
    found = experts.compute(kernels, x, index, weights)
    other, shifted = index.clone(), weights.roll(1, dims=1)
    other[1, 2] = 6 - other[1].sum()  # one pair gets the expert that the token has not
    for routed in ((other, weights), (index, shifted)):
        assert experts.largest_error(found, x, *routed) > 1


def test_a_token_gets_the_same_bits_in_any_company():
    """Of as many tokens."""
    experts = Experts("bf16", 64, 96, num=6)
    x, (index, weights) = inputs("bf16", 4, 64), routing(4, 3, 6)
    found = experts.compute(TRITON, x, index, weights)
    for t in range(4):
        others, (other_index, _) = inputs("bf16", 4, 64), routing(4, 3, 6)
        others[t], other_index[t] = x[t], index[t]
        again = experts.compute(TRITON, others, other_index, weights)
        assert torch.equal(again[t], found[t])


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("kernels", KERNELS)
def test_experts_may_be_computed_in_any_parts(kernels, num_tokens):
    experts = Experts("bf16", 64, 96, num=6)
    x, (index, weights) = inputs("bf16", num_tokens, 64), routing(num_tokens, 4, 6)
    found = experts.compute(kernels, x, index, weights)
    device = DEVICE if kernels is TRITON else "cpu"
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


def test_many_tokens_have_larger_tiles(monkeypatch):
    """More of an expert's rows than a tile has, and experts that no token uses."""
    monkeypatch.setattr(TRITON, "MANY_ROWS", 32)
    monkeypatch.setattr(TRITON, "MANY_PAIRS", 100)
    monkeypatch.setattr(TRITON, "PLAN_BLOCK", 64)
    experts = Experts("bf16", 64, 96, num=5)
    x, (index, weights) = inputs("bf16", 90, 64), routing(90, 2, 3)
    index[7, 1] = -1
    found = experts.compute(TRITON, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


class Launches:
    """In place of a kernel."""

    def __init__(self, name: str, counter: Counter[str]) -> None:
        self._name = name
        self._counter = counter

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            tile = f" {options['TILE']}" if "TILE" in options else ""
            self._counter.update([self._name + tile])

        return launch


@pytest.mark.parametrize("num_experts", [8, 256])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 32, 2048])
def test_a_layer_takes_four_kernels_for_any_number_of_tokens_and_experts(
    monkeypatch, num_tokens, num_experts
):
    counter: Counter[str] = Counter()
    for name in ("_plan", "_up", "_down", "_sum"):
        monkeypatch.setattr(TRITON, name, Launches(name, counter))
    x, index = torch.zeros(num_tokens, 16).bfloat16(), torch.zeros(num_tokens, 8).long()
    mlp = Experts("bf16", 16, 16).mlp
    slot_moe(TRITON, mlp, x, index, torch.zeros(num_tokens, 8), torch.zeros(num_experts).long())
    tile = 64 if num_tokens == 2048 else 16
    assert counter == {f"_plan {tile}": 1, f"_up {tile}": 1, f"_down {tile}": 1, "_sum": 1}
