"""Experts computed several in a call give what they give one by one, whatever the order in which
they arrived.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_infinity.kernels.dispatch import NO_EXPERT, RoutedRows

NUM_EXPERTS, WIDTH = 6, 8
FACTORS = [torch.linspace(0.5, 2, WIDTH) * (1 + expert) for expert in range(NUM_EXPERTS)]


def fused(inputs_RD: Tensor, starts: list[int], addresses: list[int]) -> Tensor:
    """An expert's "address" is its id: row by row its factors."""
    out_RD = torch.empty(inputs_RD.shape)
    for expert, first, last in zip(addresses, starts[:-1], starts[1:], strict=True):
        out_RD[first:last] = inputs_RD[first:last] * FACTORS[expert]
    return out_RD


def routed(num_tokens: int, *, weighs_input: bool) -> RoutedRows:
    generator = np.random.default_rng(num_tokens)
    index_TK = generator.permuted(np.tile(np.arange(NUM_EXPERTS), (num_tokens, 1)), axis=1)[:, :3]
    if num_tokens > 2:
        index_TK[1, 2] = NO_EXPERT
    rows = RoutedRows(index_TK, is_eager=False)
    x_TD = torch.from_numpy(generator.normal(size=(num_tokens, WIDTH))).float()
    weights_TK = torch.from_numpy(generator.uniform(size=(num_tokens, 3))).float()
    rows.gather(x_TD, weights_TK, weighs_input=weighs_input)
    return rows


@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_any_order_and_any_portions_give_the_same_sum(num_tokens, weighs_input):
    one_by_one = routed(num_tokens, weighs_input=weighs_input)
    for expert in one_by_one.activated:
        one_by_one.compute(expert, lambda weights, x: x * weights, FACTORS[expert])
    expected = one_by_one.sum(torch.float32)
    generator = np.random.default_rng(0)
    for _ in range(20):
        rows = routed(num_tokens, weighs_input=weighs_input)
        order = generator.permutation(rows.activated).tolist()
        cut = int(generator.integers(0, len(order) + 1))
        for portion in filter(None, (order[:cut], order[cut:])):
            rows.compute_together(portion, fused, portion)
        assert torch.equal(rows.sum(torch.float32), expected), (order, cut)


def test_the_most_rows_of_an_expert_are_known():
    rows = RoutedRows(np.array([[0, 1], [0, 2], [0, 1]]), is_eager=False)
    assert rows.most_rows == 3
    assert RoutedRows(np.array([[4, 1]]), is_eager=False).most_rows == 1
