"""What the device does in each layer of a step it decides alone; device_table.py has the protocol.

pointers = resolve(table, row, top_k_index)     where each pair's expert is; a miss takes a slot
fill(table, pointers)                           copies the missed into their slots
out = slot_moe(mlp, x, pointers, weights)       reads every expert where it is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.cuda.device_table import DeviceTable
from moe_infinity.errors import ConfigError
from moe_infinity.kernels import has_triton_kernels
from moe_infinity.kernels.cuda import reference as slot_reference
from moe_infinity.kernels.cuda.slot_mlp import SlotMlp

MAX_PAIRS = 64  # (token, k) of one row in one step


class SlotKernels(NamedTuple):
    """Signatures as in resolve.py and kernels/cuda/experts.py."""

    resolve: Callable[[DeviceTable, int, Tensor], Tensor]
    fill: Callable[[DeviceTable, Tensor], None]
    slot_moe: Callable[[SlotMlp, Tensor, Tensor, Tensor], Tensor]


def slot_kernels(device: torch.device) -> SlotKernels:
    """Triton's for a GPU, the plain twins for host memory. Raises ConfigError for a GPU without
    triton: twins cannot look into its memory.
    """
    if device.type == "cpu":
        return SlotKernels(slot_reference.resolve, slot_reference.fill, slot_reference.slot_moe)
    if not has_triton_kernels():
        raise ConfigError(f"kernels for {device} need triton, which is not installed")
    from moe_infinity.cuda import resolve as triton_resolve
    from moe_infinity.kernels.cuda import experts as triton_experts

    return SlotKernels(triton_resolve.resolve, triton_resolve.fill, triton_experts.slot_moe)


class SlotRows:
    """The MoE rows of a model in such steps, all of whose experts kernels read."""

    def __init__(self, slots_SB: Tensor, mlps: Sequence[SlotMlp], *, num_experts: int) -> None:
        self._mlps, self._kernels = mlps, slot_kernels(slots_SB.device)
        self.table = DeviceTable(
            slots_SB, num_rows=len(mlps), num_experts=num_experts, max_pairs=MAX_PAIRS
        )

    def compute(
        self,
        moe_layer_idx: int,
        x_TD: Tensor,
        top_k_index_TK: Tensor,
        top_k_weights_TK: Tensor,
        bring: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """[T, D] -> [T, D]: the routed experts of one row. `bring` is asked, while the device
        waits, for the experts of a row that come from disk; without it the step is lost there.
        """
        table, index_TK = self.table, top_k_index_TK.contiguous()
        pointers_TK = self._kernels.resolve(table, moe_layer_idx, index_TK)
        self._kernels.fill(table, pointers_TK)
        if bring is not None and table.is_lost():
            bring(moe_layer_idx, index_TK)
            table.find_again(moe_layer_idx)
            pointers_TK = self._kernels.resolve(table, moe_layer_idx, index_TK)
            self._kernels.fill(table, pointers_TK)
        weights_TK = top_k_weights_TK.contiguous()
        return self._kernels.slot_moe(
            self._mlps[moe_layer_idx], x_TD.contiguous(), pointers_TK, weights_TK
        )
