"""The experts of one MoE layer at once, by Triton's kernels or by their reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_infinity.experimental.gpu.kernels.slot_mlp import SlotMlp


def slot_moe(
    kernels: Any,
    mlp: SlotMlp,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    pointers_E: Tensor,
) -> Tensor:
    """[T, D] -> [T, D]. `kernels` is experimental/gpu/kernels/experts.py or reference.py."""
    shape = index_TK.numel(), x_TD.shape[1]
    out_PD = torch.empty(shape, dtype=torch.float32, device=x_TD.device)
    kernels.compute_pairs(mlp, x_TD, index_TK, weights_TK, pointers_E, out_PD)
    found: Tensor = kernels.sum_pairs(mlp, out_PD, index_TK, weights_TK, x_TD.dtype)
    return found
