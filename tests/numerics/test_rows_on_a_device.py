"""Rows by expert are made where the tokens are. The meta device stands for a GPU: torch refuses to
mix it with the CPU, too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_infinity.kernels.dispatch import NO_EXPERT, RoutedRows
from tests.two_devices import SECOND, TwoDevices

pytestmark = pytest.mark.arithmetic

INDEX_TK = np.array([[0, 1], [1, NO_EXPERT], [3, 0], [2, 1]])


@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("is_eager", [False, True])
def test_nothing_made_on_the_way_is_on_the_cpu(is_eager, weighs_input):
    """Without `.to(x_TD.device)` in gather(), eager's sum fails."""
    x_TD = torch.empty(4, 32, device="meta", dtype=torch.bfloat16)
    rows = RoutedRows(INDEX_TK, is_eager=is_eager)
    rows.gather(x_TD, torch.empty(4, 2, device="meta"), weighs_input=weighs_input)
    weight = torch.empty(32, 32, device="meta", dtype=torch.bfloat16)
    for expert_idx in rows.activated:
        rows.compute(expert_idx, lambda weight, x_RD: x_RD @ weight, weight)
    assert rows.sum(x_TD.dtype).device.type == "meta"


@pytest.mark.parametrize("there", [{0}, {1, 2}, {0, 1, 2, 3}])
@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("is_eager", [False, True])
def test_experts_of_two_devices_give_the_bits_of_one(is_eager, weighs_input, there):
    """One copy there of the rows, and of their weights; one back."""
    x_TD, weights_TK = torch.randn(4, 32).bfloat16(), torch.rand(4, 2)
    experts = [torch.randn(32, 32).bfloat16() for _ in range(4)]

    def out(devices: list[torch.device]) -> Tensor:
        rows = RoutedRows(INDEX_TK, is_eager=is_eager)
        rows.gather(x_TD, weights_TK, weighs_input=weighs_input, devices=devices)
        for expert_idx in rows.activated:
            weight = experts[expert_idx]
            if devices and expert_idx in there:
                weight = weight.to(SECOND)
            scaled = {"": weight.float() if weighs_input else weight}
            rows.compute(expert_idx, lambda weights, x_RD: x_RD @ weights[""], scaled)
        return rows.sum(x_TD.dtype)

    with TwoDevices() as watch:
        found = out([x_TD.device, SECOND])
        assert watch.num_sent == len(there) + (4 if weighs_input else 3)
        assert found.device == x_TD.device
    assert torch.equal(found, out([]))
