"""Experts computed several in a call give what they give one by one, whatever the order in which
they arrived.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_infinity.checkpoint.layout import WeightLayout
from moe_infinity.engine.compute import has_few_rows
from moe_infinity.engine.fused_rows import FUSED_ROWS, FusedRows
from moe_infinity.engine.routing import NO_EXPERT, RoutedRows
from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.activation import Activation
from moe_infinity.kernels.cpu.experts import fused_experts
from moe_infinity.kernels.reference import expert_mlp

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
    """What reference.expert_mlp asks of a class of transformers."""

    has_gate, is_transposed, has_bias = True, False, False

    @staticmethod
    def _apply_gate(hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def weights_of(expert: int) -> dict[str, Tensor]:
    up, down = SLOTS[expert].split([2 * EXPERT_WIDTH * WIDTH, EXPERT_WIDTH * WIDTH])
    return {"gate_up_proj": up.view(-1, WIDTH), "down_proj": down.view(WIDTH, -1)}


def routing(num_tokens: int) -> tuple[Any, Tensor, Tensor]:
    generator = np.random.default_rng(num_tokens)
    index_TK = generator.permuted(np.tile(np.arange(NUM_EXPERTS), (num_tokens, 1)), axis=1)[:, :3]
    x_TD = torch.from_numpy(generator.normal(size=(num_tokens, WIDTH))).float()
    return index_TK, x_TD, torch.from_numpy(generator.uniform(size=(num_tokens, 3))).float()


def together(num_tokens: int, portions: list[list[int]]) -> Tensor:
    fused = fused_experts([UP], [DOWN], Activation("silu"))
    assert fused is not None
    index_TK, x_TD, weights_TK = routing(num_tokens)
    rows = FusedRows(fused, index_TK.ravel().tolist(), x_TD, weights_TK)
    for portion in portions:
        rows.add(portion, [SLOTS[expert].data_ptr() for expert in portion])
    return rows.sum(torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_any_order_and_any_portions_give_the_sum_of_experts_one_by_one(num_tokens):
    index_TK, x_TD, weights_TK = routing(num_tokens)
    one_by_one = RoutedRows(index_TK, is_eager=False)
    one_by_one.gather(x_TD, weights_TK)
    for expert in one_by_one.activated:
        one_by_one.compute(expert, lambda w, x: expert_mlp(Gated, w, x), weights_of(expert))
    expected = one_by_one.sum(torch.float32)
    all_at_once = together(num_tokens, [one_by_one.activated])
    scale = expected.abs().max()
    assert (all_at_once - expected).abs().max() < 1e-5 * scale
    generator = np.random.default_rng(0)
    for _ in range(20):
        order = generator.permutation(one_by_one.activated).tolist()
        cut = int(generator.integers(0, len(order) + 1))
        portions = [portion for portion in (order[:cut], order[cut:]) if portion]
        assert torch.equal(together(num_tokens, portions), all_at_once), (order, cut)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_work_is_told_as_routed_rows_tell_it(num_tokens):
    index_TK, x_TD, weights_TK = routing(num_tokens)
    fused = fused_experts([UP], [DOWN], Activation("silu"))
    assert fused is not None
    rows, plain = (
        FusedRows(fused, index_TK.ravel().tolist(), x_TD, weights_TK),
        RoutedRows(index_TK, is_eager=False),
    )
    assert rows.activated == plain.activated
    assert np.array_equal(
        np.broadcast_to(rows.counts, len(rows.activated)),
        np.broadcast_to(plain.counts, len(rows.activated)),
    )


def test_few_rows_are_those_kernels_are_good_for():
    one_each = list(range(6 * FUSED_ROWS))
    assert has_few_rows(one_each, 3 * FUSED_ROWS, FUSED_ROWS)
    assert has_few_rows([expert % FUSED_ROWS for expert in one_each], 3 * FUSED_ROWS, FUSED_ROWS)
    assert has_few_rows([0] * FUSED_ROWS, FUSED_ROWS, FUSED_ROWS)
    assert not has_few_rows([0] * (FUSED_ROWS + 1), FUSED_ROWS + 1, FUSED_ROWS)
    assert not has_few_rows([0, 1, 2, NO_EXPERT], 2, FUSED_ROWS)
    assert not has_few_rows([], 0, FUSED_ROWS)
