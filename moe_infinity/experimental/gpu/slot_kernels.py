"""The kernels of an MoE layer in a step that the device decides (protocol: device_table.py).

resolve          finds the experts that pairs of token and expert use
fill             copies missed ones into their slots
compute_pairs    reads every expert where it is
sum_pairs        adds up what a token's experts gave

A step that the host decides uses the last two (engine/slots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.errors import ConfigError
from moe_infinity.experimental.gpu import resolve_reference
from moe_infinity.experimental.gpu.device_table import DeviceTable
from moe_infinity.experimental.gpu.kernels import reference as slot_reference
from moe_infinity.experimental.gpu.kernels.slot_mlp import SlotMlp
from moe_infinity.kernels import has_triton_kernels

MAX_PAIRS = 512  # (token, k) of one MoE layer in one step


class SlotKernels(NamedTuple):
    """Their signatures are those of resolve.py and experimental/gpu/kernels/experts.py."""

    resolve: Callable[[DeviceTable, int, Tensor], Tensor]
    fill: Callable[[DeviceTable, int], None]
    compute_pairs: Callable[[SlotMlp, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    sum_pairs: Callable[[SlotMlp, Tensor, Tensor, Tensor, torch.dtype], Tensor]


def has_slot_kernels(device: torch.device) -> bool:
    """Whether there are kernels for this device."""
    return device.type == "cpu" or has_triton_kernels()


def slot_kernels(device: torch.device) -> SlotKernels:
    """Triton's kernels for a GPU, the plain reference for host memory.

    Raises ConfigError for a GPU without triton: the reference cannot read its memory.
    """
    from_host = slot_reference.compute_pairs, slot_reference.sum_pairs
    if device.type == "cpu":
        return SlotKernels(resolve_reference.resolve, resolve_reference.fill, *from_host)
    if not has_slot_kernels(device):
        raise ConfigError(f"kernels for {device} need triton, which is not installed")
    from moe_infinity.experimental.gpu import resolve as triton_resolve
    from moe_infinity.experimental.gpu.kernels import experts as triton_experts

    return SlotKernels(
        triton_resolve.resolve,
        triton_resolve.fill,
        triton_experts.compute_pairs,
        triton_experts.sum_pairs,
    )


class SlotLayers:
    """The MoE layers of a model, for steps that the device decides."""

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
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]: the routed experts of one MoE layer."""
        index_TK = top_k_index_TK.contiguous()
        pointers_E = self.kernels.resolve(self.table, moe_layer_idx, index_TK)
        self.kernels.fill(self.table, index_TK.numel())
        work = SlotWork(self.kernels, self.mlps[moe_layer_idx], x_TD, index_TK, top_k_weights_TK)
        work.compute(pointers_E)
        return work.sum()


class SlotWork:
    """One MoE layer in one step: the output of each pair is kept in float32, so the sum over a
    token's experts has one order, whichever were computed first.
    """

    def __init__(
        self,
        kernels: SlotKernels,
        mlp: SlotMlp,
        x_TD: Tensor,
        index_TK: Tensor,
        weights_TK: Tensor,
    ) -> None:
        self._kernels = kernels
        self._mlp = mlp
        self._x_TD = x_TD.contiguous()
        self._index_TK = index_TK.contiguous()
        self._weights_TK = weights_TK.contiguous()
        shape = index_TK.numel(), x_TD.shape[1]
        self._out_PD = torch.empty(shape, dtype=torch.float32, device=x_TD.device)

    def compute(self, pointers_E: Tensor) -> None:
        """The pairs whose experts have an address here that is not 0."""
        given = self._x_TD, self._index_TK, self._weights_TK, pointers_E, self._out_PD
        self._kernels.compute_pairs(self._mlp, *given)

    def sum(self) -> Tensor:
        """[T, D], when all are computed."""
        given = self._out_PD, self._index_TK, self._weights_TK, self._x_TD.dtype
        return self._kernels.sum_pairs(self._mlp, *given)
