"""Rows by expert are made where the tokens are. The meta device stands for a GPU: torch refuses to
mix it with the CPU, too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_infinity.kernels.dispatch import NO_EXPERT, RoutedRows


@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("is_eager", [False, True])
def test_nothing_made_on_the_way_is_on_the_cpu(is_eager, weighs_input):
    """Without `.to(x_TD.device)` in gather(), eager's sum fails."""
    x_TD = torch.empty(4, 32, device="meta", dtype=torch.bfloat16)
    rows = RoutedRows(np.array([[0, 1], [1, NO_EXPERT], [3, 0], [2, 1]]), is_eager=is_eager)
    rows.gather(x_TD, torch.empty(4, 2, device="meta"), weighs_input=weighs_input)
    weight = torch.empty(32, 32, device="meta", dtype=torch.bfloat16)
    for expert_idx in rows.activated:
        rows.compute(expert_idx, lambda weight, x_RD: x_RD @ weight, weight)
    assert rows.sum(x_TD.dtype).device.type == "meta"
