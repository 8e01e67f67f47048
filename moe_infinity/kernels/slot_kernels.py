"""What the device does in each layer of a step it decides alone; device_table.py has the protocol.

pointers = resolve(table, row, top_k_index)     where each pair's expert is; a miss takes a slot
fill(table)                                     copies the missed into their slots
out = slot_moe(mlp, x, pointers, weights)       reads every expert where it is
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.errors import ConfigError
from moe_infinity.kernels import has_triton_kernels, slot_reference
from moe_infinity.kernels.device_table import DeviceTable
from moe_infinity.kernels.slot_mlp import SlotMlp


class SlotKernels(NamedTuple):
    """Signatures as in triton_resolve.py and triton_experts.py."""

    resolve: Callable[[DeviceTable, int, Tensor], Tensor]
    fill: Callable[[DeviceTable], None]
    slot_moe: Callable[[SlotMlp, Tensor, Tensor, Tensor], Tensor]


def slot_kernels(device: torch.device) -> SlotKernels:
    """Triton's for a GPU, the plain twins for host memory. Raises ConfigError for a GPU without
    triton: twins cannot look into its memory.
    """
    if device.type == "cpu":
        return SlotKernels(slot_reference.resolve, slot_reference.fill, slot_reference.slot_moe)
    if not has_triton_kernels():
        raise ConfigError(f"kernels for {device} need triton, which is not installed")
    from moe_infinity.kernels import triton_experts, triton_resolve

    return SlotKernels(triton_resolve.resolve, triton_resolve.fill, triton_experts.slot_moe)
