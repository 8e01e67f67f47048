"""Experts computed several in a call give what they give one by one, whatever the order in which
they arrived.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_infinity.engine.fused import FusedBackend, FusedWork
from moe_infinity.engine.torch_backend import TorchBackend, TorchWork
from moe_infinity.experts import NO_EXPERT, ParamSpec, Routing
from moe_infinity.kernels import many_rows
from moe_infinity.kernels.cpu.experts import fused_experts
from moe_infinity.kernels.reference import Activation, PlainMlp
from moe_infinity.layout import WeightLayout
from moe_infinity.memory.slots import BufferSlots

pytestmark = pytest.mark.arithmetic

NUM_EXPERTS, WIDTH, EXPERT_WIDTH = 6, 64, 32
SHAPES = {"gate_up_proj": (2 * EXPERT_WIDTH, WIDTH), "down_proj": (WIDTH, EXPERT_WIDTH)}
SLOTS = torch.randn(
    NUM_EXPERTS, 3 * WIDTH * EXPERT_WIDTH, generator=torch.Generator().manual_seed(0)
)
UP, DOWN = (
    WeightLayout.plain(ParamSpec("", shape, "float32", at))
    for shape, at in zip(SHAPES.values(), (0, 4 * 2 * EXPERT_WIDTH * WIDTH), strict=True)
)


class Gated:
    """What reference.PlainMlp asks of a class of transformers."""

    has_gate, is_transposed, has_bias = True, False, False

    @staticmethod
    def _apply_gate(hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def weights_of(expert: int) -> dict[str, Tensor]:
    up, down = SLOTS[expert].split([2 * EXPERT_WIDTH * WIDTH, EXPERT_WIDTH * WIDTH])
    return {"gate_up_proj": up.view(-1, WIDTH), "down_proj": down.view(WIDTH, -1)}


def routing_of(num_tokens: int) -> tuple[Routing, Tensor]:
    """Three different experts for each token, and [T, D]: what goes into them."""
    generator = np.random.default_rng(num_tokens)
    index_TK = generator.permuted(np.tile(np.arange(NUM_EXPERTS), (num_tokens, 1)), axis=1)[:, :3]
    x_TD = torch.from_numpy(generator.normal(size=(num_tokens, WIDTH))).float()
    weights_TK = torch.from_numpy(generator.uniform(size=(num_tokens, 3))).float()
    return Routing.of(torch.from_numpy(index_TK), weights_TK), x_TD


def fused_backend(*, weighs_input: bool = False) -> FusedBackend:
    fused = fused_experts([UP], [DOWN], Activation("silu"))
    assert fused is not None
    return FusedBackend(
        fused,
        BufferSlots(SLOTS.view(torch.uint8).flatten(), SLOTS.shape[1] * 4),
        weighs_input=weighs_input,
    )


def exact_backend(*, weighs_input: bool = False) -> TorchBackend:
    return TorchBackend(
        lambda weights, x: PlainMlp(Gated)(weights, x),
        weights_of,
        is_eager=False,
        weighs_input=weighs_input,
    )


def work_of(
    backend: FusedBackend | TorchBackend, x_TD: Tensor, routing: Routing
) -> FusedWork | TorchWork:
    if isinstance(backend, FusedBackend):
        return FusedWork(backend, x_TD, routing)
    return TorchWork(backend, x_TD, routing)


def sum_of(
    backend: FusedBackend | TorchBackend, num_tokens: int, portions: list[list[int]]
) -> Tensor:
    """Slot i holds expert i."""
    routing, x_TD = routing_of(num_tokens)
    work = work_of(backend, x_TD, routing)
    for portion in portions:
        work.compute(portion, portion)
    return work.sum()


@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 40])
def test_any_order_and_any_portions_give_the_sum_of_experts_one_by_one(num_tokens, weighs_input):
    fused, exact = (make(weighs_input=weighs_input) for make in (fused_backend, exact_backend))
    activated = routing_of(num_tokens)[0].activated
    expected = sum_of(exact, num_tokens, [activated])
    all_at_once = sum_of(fused, num_tokens, [activated])
    assert (all_at_once - expected).abs().max() < 1e-4 * expected.abs().max()
    generator = np.random.default_rng(0)
    for _ in range(20):
        order = generator.permutation(activated).tolist()
        cut = int(generator.integers(0, len(order) + 1))
        portions = [portion for portion in (order[:cut], order[cut:]) if portion]
        assert torch.equal(sum_of(fused, num_tokens, portions), all_at_once), (order, cut)
        assert torch.equal(sum_of(exact, num_tokens, portions), expected), (order, cut)


def test_a_pair_without_an_expert_adds_nothing():
    x_TD = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    with_gap = torch.tensor([[0, 1, NO_EXPERT], [2, NO_EXPERT, 3]])
    weights_TK = torch.rand(2, 3, generator=torch.Generator().manual_seed(2))
    found = []
    for backend in (fused_backend(), exact_backend()):
        routing = Routing.of(with_gap, weights_TK)
        work = work_of(backend, x_TD, routing)
        work.compute(routing.activated, routing.activated)
        found.append(work.sum())
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[1].abs().max()


def test_a_token_may_name_an_expert_twice():
    index_TK = torch.tensor([[3, 1, 3]])
    x_TD = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    routing = Routing.of(index_TK, torch.tensor([[0.5, 1.0, 0.25]]))
    work = FusedWork(fused_backend(), x_TD, routing)
    work.compute([3, 1], [3, 1])
    one, three = (PlainMlp(Gated)(weights_of(expert), x_TD) for expert in (1, 3))
    expected = one + 0.75 * three
    assert (work.sum() - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_token_gets_the_same_bits_with_any_number_of_others():
    routing, x_TD = routing_of(90)
    assert routing.top_k_index_TK is not None
    assert routing.top_k_weights_TK is not None
    together = sum_of(fused_backend(), 90, [routing.activated])
    for token in range(0, 90, 7):
        rows = slice(token, token + 1)
        alone = Routing.of(
            torch.from_numpy(routing.top_k_index_TK[rows]), routing.top_k_weights_TK[rows]
        )
        work = FusedWork(fused_backend(), x_TD[rows], alone)
        work.compute(alone.activated, alone.activated)
        assert torch.equal(work.sum(), together[rows])


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "mean_rows", "expected"),
    [
        (64, torch.bfloat16, 100.0, False),
        (65, torch.bfloat16, 100.0, True),
        (600, torch.bfloat16, 5.0, False),
        (600, torch.float32, 100.0, False),
        (600, torch.float16, 100.0, False),
    ],
)
def test_long_passes_go_to_torch_where_it_has_products_of_bfloat16(
    num_tokens, dtype, mean_rows, expected, monkeypatch
):
    monkeypatch.setattr(many_rows, "has_products_of_bfloat16", lambda: True)
    assert many_rows.is_for_torch(num_tokens, dtype, mean_rows) == expected
    if num_tokens <= many_rows.MOST_TOKENS_UNPACKED:
        most = many_rows.MOST_TOKENS_UNPACKED
        assert not many_rows.is_for_torch(num_tokens, dtype, mean_rows, most_tokens=most)
    monkeypatch.setattr(many_rows, "has_products_of_bfloat16", lambda: False)
    assert not many_rows.is_for_torch(num_tokens, dtype, mean_rows)
