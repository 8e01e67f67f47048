"""The kernels of an MoE layer in a step that the device decides (protocol: device_table.py).

pointers = resolve(table, moe_layer_idx, top_k_index)    finds each pair's expert
fill(table, pointers)                                    copies missed experts into their slots
out = slot_moe(mlp, x, pointers, weights)                reads every expert where it is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.cuda import resolve_reference
from moe_infinity.cuda.device_table import DeviceTable
from moe_infinity.errors import ConfigError
from moe_infinity.kernels import has_triton_kernels
from moe_infinity.kernels.cuda import reference as slot_reference
from moe_infinity.kernels.cuda.slot_mlp import SlotMlp

MAX_PAIRS = 64  # (token, k) of one MoE layer in one step


class SlotKernels(NamedTuple):
    """Their signatures are those of resolve.py and kernels/cuda/experts.py."""

    resolve: Callable[[DeviceTable, int, Tensor], Tensor]
    fill: Callable[[DeviceTable, Tensor], None]
    slot_moe: Callable[[SlotMlp, Tensor, Tensor, Tensor], Tensor]


def slot_kernels(device: torch.device) -> SlotKernels:
    """Triton's kernels for a GPU, the plain reference for host memory.

    Raises ConfigError for a GPU without triton: the reference cannot read its memory.
    """
    if device.type == "cpu":
        return SlotKernels(
            resolve_reference.resolve, resolve_reference.fill, slot_reference.slot_moe
        )
    if not has_triton_kernels():
        raise ConfigError(f"kernels for {device} need triton, which is not installed")
    from moe_infinity.cuda import resolve as triton_resolve
    from moe_infinity.kernels.cuda import experts as triton_experts

    return SlotKernels(triton_resolve.resolve, triton_resolve.fill, triton_experts.slot_moe)


class SlotLayers:
    """The MoE layers of a model, for steps that the device decides. Kernels read all experts."""

    def __init__(self, slots_SB: Tensor, mlps: Sequence[SlotMlp], *, num_experts: int) -> None:
        """`slots_SB`: uint8 [slots, bytes of a slot]; `mlps`: one for each MoE layer.

        Raises ConfigError without kernels for the device of the slots.
        """
        self.mlps = mlps
        self.kernels = slot_kernels(slots_SB.device)
        self.table = DeviceTable(
            slots_SB, num_layers=len(mlps), num_experts=num_experts, max_pairs=MAX_PAIRS
        )

    def compute(
        self,
        moe_layer_idx: int,
        x_TD: Tensor,
        top_k_index_TK: Tensor,
        top_k_weights_TK: Tensor,
        load_from_disk: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """[T, D] -> [T, D]: the routed experts of one MoE layer.

        If some of them are on disk only, the device waits while `load_from_disk(moe_layer_idx,
        index_TK)` loads them into HOST. Without it the step needs replay.
        """
        table = self.table
        index_TK = top_k_index_TK.contiguous()
        pointers_TK = self.kernels.resolve(table, moe_layer_idx, index_TK)
        self.kernels.fill(table, pointers_TK)
        if load_from_disk is not None and table.needs_replay():
            load_from_disk(moe_layer_idx, index_TK)
            table.prepare_retry(moe_layer_idx)
            pointers_TK = self.kernels.resolve(table, moe_layer_idx, index_TK)
            self.kernels.fill(table, pointers_TK)
        weights_TK = top_k_weights_TK.contiguous()
        return self.kernels.slot_moe(
            self.mlps[moe_layer_idx], x_TD.contiguous(), pointers_TK, weights_TK
        )
