"""Rung 1 of the numerics ladder: one expert, and the sum over a token's experts.

The MLP is compared with an einsum in fp64 that shares no code with it; the routing and the sum are
compared bit for bit with what transformers itself computes.

T tokens, K experts per token, E experts, D model width, F expert width, R rows of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import MixtralConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moe_infinity.engine.torch_backend import TorchBackend, TorchWork
from moe_infinity.experts import NO_EXPERT, Routing
from moe_infinity.kernels.reference import PlainMlp

pytestmark = pytest.mark.arithmetic

# torch rounds the last elements of an activation otherwise than those that fill whole vectors
# (twice 16 floats with AVX-512): an expert without a gate whose width were no multiple of 32 would
# differ from stock in the last bit.
NUM_EXPERTS, MODEL_WIDTH, EXPERT_WIDTH = 8, 64, 96
FP32, BF16 = torch.float32, torch.bfloat16


def silu_gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Layout:
    """How an architecture stores its experts."""

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False

    def __str__(self) -> str:
        flags = ("gate", self.has_gate), ("bias", self.has_bias), ("transposed", self.is_transposed)
        return "-".join(name for name, is_set in flags if is_set) or "plain"


LAYOUTS = [Layout(*flags) for flags in product([True, False], repeat=3)]


def make_experts(layout: Layout, dtype: torch.dtype) -> SimpleNamespace:
    """What a kernel must know of an experts module, with random weights."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    up_name = "gate_up_proj" if layout.has_gate else "up_proj"
    up_width = EXPERT_WIDTH * (2 if layout.has_gate else 1)
    weights = {
        up_name: random(NUM_EXPERTS, up_width, MODEL_WIDTH),
        "down_proj": random(NUM_EXPERTS, MODEL_WIDTH, EXPERT_WIDTH),
    }
    if layout.is_transposed:
        weights = {name: w.transpose(1, 2).contiguous() for name, w in weights.items()}
    if layout.has_bias:
        weights[f"{up_name}_bias"] = random(NUM_EXPERTS, up_width)
        weights["down_proj_bias"] = random(NUM_EXPERTS, MODEL_WIDTH)
    return SimpleNamespace(
        num_experts=NUM_EXPERTS,
        names=list(weights),
        act_fn=F.silu,
        _apply_gate=silu_gate,
        **vars(layout),
        **weights,
    )


def weights_of(experts: Any, expert_idx: int) -> dict[str, Tensor]:
    return {name: getattr(experts, name)[expert_idx].detach() for name in experts.names}


def rows_of(num_rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((num_rows, MODEL_WIDTH), generator=generator).to(dtype)


# One expert


def einsum_mlp(layout: Layout, weights: dict[str, Tensor], x_RD: Tensor) -> Tensor:
    """The definition of an expert's MLP, written again in fp64."""
    w = {name: weight.double() for name, weight in weights.items()}
    equation = "rd,df->rf" if layout.is_transposed else "rd,fd->rf"

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.einsum(equation, x, w[name]) + w.get(f"{name}_bias", 0.0)

    if layout.has_gate:
        gate_up = linear("gate_up_proj", x_RD.double())
        gate, up = gate_up[:, :EXPERT_WIDTH], gate_up[:, EXPERT_WIDTH:]
    else:
        gate, up = linear("up_proj", x_RD.double()), torch.tensor(1.0)
    return linear("down_proj", gate / (1 + torch.exp(-gate)) * up)


def assert_close_for(dtype: torch.dtype, got: Tensor, expected: Tensor) -> None:
    """Rounding errors of a sum of n terms grow like eps * sqrt(n); a sum of D feeds one of F."""
    length = MODEL_WIDTH**0.5 + EXPERT_WIDTH**0.5
    tolerance = torch.finfo(dtype).eps * length * expected.abs().max().item()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_rows", [1, 2, 33])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_expert_computes_its_definition(layout, dtype, num_rows):
    weights = weights_of(make_experts(layout, dtype), 3)
    x_RD = rows_of(num_rows, dtype)
    out_RD = PlainMlp(make_experts(layout, dtype))(weights, x_RD)
    assert (out_RD.dtype, out_RD.shape) == (dtype, x_RD.shape)
    assert_close_for(dtype, out_RD, einsum_mlp(layout, weights, x_RD))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_tolerance_rejects_what_is_wrong(layout, dtype):
    experts = make_experts(layout, dtype)
    weights, x_RD = weights_of(experts, 3), rows_of(33, dtype)
    expected = einsum_mlp(layout, weights, x_RD)
    zeroed = torch.zeros_like(x_RD)
    swapped = PlainMlp(experts)(weights_of(experts, 4), x_RD)
    row_swapped = PlainMlp(experts)(weights, x_RD.roll(1, dims=0))
    one_row_zeroed = expected.clone()
    one_row_zeroed[7] = 0
    for wrong in (zeroed, swapped, row_swapped, one_row_zeroed):
        with pytest.raises(AssertionError, match="not close"):
            assert_close_for(dtype, wrong, expected)


def test_an_experts_own_norm_comes_after_its_down_projection():
    experts = make_experts(Layout(), FP32)
    experts.has_post_expert_norm = True
    experts.post_expert_norm = torch.nn.RMSNorm(MODEL_WIDTH, eps=1e-6)
    weights, x_RD = weights_of(experts, 3), rows_of(33, FP32)
    plain = einsum_mlp(Layout(), weights, x_RD)
    normed = plain / (plain.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
    with torch.no_grad():
        assert_close_for(FP32, PlainMlp(experts)(weights, x_RD), normed)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_expert_changes_neither_its_weights_nor_its_input(layout):
    experts = make_experts(layout, BF16)
    weights, x_RD = weights_of(experts, 0), rows_of(5, BF16)
    before = [tensor.clone() for tensor in (x_RD, *weights.values())]
    PlainMlp(experts)(weights, x_RD)
    for now, then in zip((x_RD, *weights.values()), before, strict=True):
        assert torch.equal(now, then)


# A layer, compared with transformers bit for bit

SHAPES = [(1, 1), (1, 2), (2, 4), (37, 2), (37, 8)]


def routing(num_tokens: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Distinct experts per token, in random order, with weights that sum to 1."""
    generator = torch.Generator().manual_seed(2)
    scores_TE = torch.rand((num_tokens, NUM_EXPERTS), generator=generator)
    weights_TK = torch.rand((num_tokens, top_k), generator=generator).softmax(dim=1)
    return scores_TE.argsort(dim=1)[:, :top_k], weights_TK.to(dtype)


def repeat_an_expert(top_k_index_TK: Tensor) -> Tensor:
    repeated = top_k_index_TK.clone()
    repeated[::2, -1] = repeated[::2, 0]
    return repeated


def our_layer(
    experts: Any,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    *,
    is_eager: bool,
    order: list[int] | None = None,
) -> Tensor:
    """What the engine does; `order`: permutation in which the activated experts arrive."""
    routing = Routing.of(index_TK, weights_TK)
    backend = TorchBackend(
        PlainMlp(experts),
        partial(weights_of, experts),
        is_eager=is_eager,
        weighs_input=False,
    )
    work, activated = TorchWork(backend, x_TD, routing), routing.activated
    for position in order if order is not None else range(len(activated)):
        expert_idx = activated[position % len(activated)]
        work.compute([expert_idx], [expert_idx])  # slot i holds expert i
    return work.sum()


def stock_experts(dtype: torch.dtype, layout: Layout | None = None) -> Any:
    """transformers' own module, with the weights of `make_experts`."""
    config = MixtralConfig(
        hidden_size=MODEL_WIDTH, intermediate_size=EXPERT_WIDTH, num_local_experts=NUM_EXPERTS
    )
    module = MixtralExperts(config)
    random = make_experts(layout or Layout(), dtype)
    for name in random.names:
        setattr(module, name, torch.nn.Parameter(getattr(random, name), requires_grad=False))
    for name, value in vars(layout or Layout()).items():
        setattr(module, name, value)
    module.names = random.names
    return module


def stock_layer(
    experts: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor, *, is_eager: bool
) -> Tensor:
    forward = MixtralExperts.forward.__wrapped__ if is_eager else grouped_mm_experts_forward
    result: Tensor = forward(experts, x_TD, index_TK, weights_TK)
    return result


@pytest.mark.parametrize("weights_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("num_tokens", "top_k"), SHAPES)
@pytest.mark.parametrize("is_eager", [False, True], ids=["grouped_mm", "eager"])
def test_a_layer_is_stock_transformers_bit_for_bit(
    is_eager, num_tokens, top_k, dtype, weights_dtype
):
    experts, x_TD = stock_experts(dtype), rows_of(num_tokens, dtype)
    index_TK, weights_TK = routing(num_tokens, top_k, weights_dtype)
    ours = our_layer(experts, x_TD, index_TK, weights_TK, is_eager=is_eager)
    stock = stock_layer(experts, x_TD, index_TK, weights_TK, is_eager=is_eager)
    assert ours.dtype == stock.dtype
    assert torch.equal(ours, stock)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("is_eager", [False, True], ids=["grouped_mm", "eager"])
def test_a_pair_without_an_expert_adds_nothing_and_activates_nothing(is_eager):
    """Tokens beyond an expert's capacity (Switch), identity experts (LongCat)."""
    experts, x_TD = stock_experts(FP32), rows_of(5, FP32)
    index_TK, weights_TK = routing(5, 2, FP32)
    index_TK[index_TK == 3] = NO_EXPERT
    index_TK[4] = NO_EXPERT
    is_pair_TK = index_TK != NO_EXPERT
    ours = our_layer(experts, x_TD, index_TK, weights_TK, is_eager=is_eager)
    stock = stock_layer(experts, x_TD, index_TK.clip(0), weights_TK * is_pair_TK, is_eager=is_eager)
    torch.testing.assert_close(ours, stock)
    assert (ours[4] == 0).all()
    without = torch.full_like(index_TK, NO_EXPERT)
    assert (our_layer(experts, x_TD, without, weights_TK, is_eager=is_eager) == 0).all()


@pytest.mark.sample(4)
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_tokens", [16, 37])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("is_eager", [False, True], ids=["grouped_mm", "eager"])
def test_a_layer_is_stock_transformers_bit_for_bit_on_two_threads(is_eager, dtype, num_tokens):
    """With threads the bits of a matrix product depend on the place of a row in it, and from 17
    (token, k) pairs on stock's sort by expert does not keep rows in token order.
    """
    experts, x_TD = stock_experts(dtype), rows_of(num_tokens, dtype)
    index_TK, weights_TK = routing(num_tokens, 2, dtype)
    ours = our_layer(experts, x_TD, index_TK, weights_TK, is_eager=is_eager)
    assert torch.equal(ours, stock_layer(experts, x_TD, index_TK, weights_TK, is_eager=is_eager))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("is_eager", [False, True], ids=["grouped_mm", "eager"])
def test_an_expert_chosen_twice_by_a_token_counts_twice_as_in_stock(is_eager, dtype):
    """No top-k router does this. Stock's eager loop adds the two in fp32 and rounds once."""
    experts, x_TD = stock_experts(dtype), rows_of(37, dtype)
    index_TK, weights_TK = routing(37, 4, dtype)
    index_TK = repeat_an_expert(index_TK)
    ours = our_layer(experts, x_TD, index_TK, weights_TK, is_eager=is_eager)
    stock = stock_layer(experts, x_TD, index_TK, weights_TK, is_eager=is_eager)
    assert torch.equal(ours, stock)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layer_of_any_layout_is_grouped_mm_bit_for_bit(layout, dtype):
    experts, x_TD = stock_experts(dtype, layout), rows_of(37, dtype)
    index_TK, weights_TK = routing(37, 2, dtype)
    ours = our_layer(experts, x_TD, index_TK, weights_TK, is_eager=False)
    assert torch.equal(ours, stock_layer(experts, x_TD, index_TK, weights_TK, is_eager=False))


def test_rows_are_computed_in_the_dtype_of_the_weights():
    experts, x_TD = stock_experts(BF16), rows_of(5, FP32)
    index_TK, weights_TK = routing(5, 2, FP32)
    ours = our_layer(experts, x_TD, index_TK, weights_TK, is_eager=False)
    assert ours.dtype == FP32
    assert torch.equal(ours, stock_layer(experts, x_TD, index_TK, weights_TK, is_eager=False))


# Which rows, and in which order

routings = st.integers(1, 4).flatmap(
    lambda top_k: st.lists(
        st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=top_k, max_size=top_k),
        min_size=1,
        max_size=9,
    )
)


@settings(max_examples=50)
@given(top_k_index=routings, is_eager=st.booleans())
def test_every_expert_gets_the_rows_of_its_tokens(top_k_index, is_eager):
    """By k, then token, for eager; for grouped_mm in the order of stock's sort."""
    index_TK = np.array(top_k_index)
    num_tokens, top_k = index_TK.shape
    x_TD = torch.arange(num_tokens)[:, None].expand(num_tokens, 3)  # a row is its token's number
    inputs: dict[int, list[list[int]]] = {}
    slots: Any = int  # slot i holds expert i

    def note(expert_idx: int, inputs_RD: Tensor) -> Tensor:
        inputs[expert_idx] = inputs_RD.tolist()
        return inputs_RD

    routing = Routing.of(torch.from_numpy(index_TK), torch.ones(num_tokens, top_k))
    backend = TorchBackend(note, slots, is_eager=is_eager, weighs_input=False)
    TorchWork(backend, x_TD, routing).compute(routing.activated, routing.activated)
    assert [*inputs] == routing.activated == sorted(set(index_TK.ravel().tolist()))
    pairs = [(t, k) for k in range(top_k) for t in range(num_tokens)]
    for expert_idx, got in inputs.items():
        expected = [[t] * 3 for t, k in pairs if index_TK[t, k] == expert_idx]
        assert got == expected if is_eager else sorted(got) == sorted(expected)


@pytest.mark.parametrize("is_eager", [False, True], ids=["grouped_mm", "eager"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@settings(max_examples=30)
@given(order=st.permutations(range(NUM_EXPERTS)))
def test_the_order_in_which_experts_arrive_changes_no_bit(is_eager, dtype, order):
    experts, x_TD = make_experts(Layout(), dtype), rows_of(12, dtype)
    index_TK, weights_TK = routing(12, 4, dtype)
    index_TK = repeat_an_expert(index_TK)
    assert len(index_TK.unique()) == NUM_EXPERTS
    in_order = our_layer(experts, x_TD, index_TK, weights_TK, is_eager=is_eager)
    shuffled = our_layer(experts, x_TD, index_TK, weights_TK, is_eager=is_eager, order=order)
    assert torch.equal(shuffled, in_order)
