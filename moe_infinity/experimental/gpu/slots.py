"""The backend of a GPU: kernels read the experts that have arrived where they lie in their slots.
They are those of steps that the device decides (experimental/gpu/slot_kernels.py), so it does not
matter to a token who decides.

While all experts of the model have slots, nobody has to know what a router chose before experts
compute: the routing comes to the host later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_infinity.experimental.gpu.kernels.slot_mlp import SlotMlp
from moe_infinity.experimental.gpu.slot_kernels import SlotKernels, SlotWork
from moe_infinity.experts import Ints
from moe_infinity.memory.cuda import CudaDevice
from moe_infinity.routing import Routing


class SlotBackend:
    """For the experts of one MoE layer."""

    def __init__(
        self,
        kernels: SlotKernels,
        mlp: SlotMlp,
        address_of: Callable[[int], int],
        *,
        num_experts: int,
    ) -> None:
        """`address_of(slot_id)` is where a slot begins in memory."""
        self.kernels = kernels
        self.mlp = mlp
        self.address_of = address_of
        self.num_experts = num_experts

    def begin(self, x_TD: Tensor, routing: Routing) -> LayerSlots:
        return LayerSlots(self, x_TD, routing)


class LayerSlots:
    """One MoE layer in one step."""

    def __init__(self, backend: SlotBackend, x_TD: Tensor, routing: Routing) -> None:
        assert routing.top_k_index_TK is not None, routing
        assert routing.top_k_weights_TK is not None, routing
        self._backend = backend
        self._device = x_TD.device
        index_TK = on_device(torch.from_numpy(routing.top_k_index_TK), self._device)
        self._work = SlotWork(
            backend.kernels, backend.mlp, x_TD, index_TK, routing.top_k_weights_TK
        )

    def run(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""
        pointers_E = torch.zeros(self._backend.num_experts, dtype=torch.int64, device="cpu")
        addresses = [self._backend.address_of(slot_id) for slot_id in slot_ids]
        pointers_E[list(expert_idxs)] = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        self._work.compute(on_device(pointers_E, self._device))

    def sum(self) -> Tensor:
        """[T, D]: the same bits in whatever order experts were run."""
        return self._work.sum()


class SlotResidents:
    """All experts of one MoE layer, which stay in these slots."""

    def __init__(self, backend: SlotBackend, slot_ids: Sequence[int], device: torch.device) -> None:
        addresses = [backend.address_of(slot_id) for slot_id in slot_ids]
        pointers_E = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        self._backend = backend
        self._pointers_E = on_device(pointers_E, device)

    def compute(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, D]: the same bits as by LayerSlots."""
        work = SlotWork(self._backend.kernels, self._backend.mlp, x_TD, index_TK, weights_TK)
        work.compute(self._pointers_E)
        return work.sum()


class ComingRouting:
    """What routers chose in layers of a step, on its way to the host."""

    def __init__(self, cuda_device: CudaDevice) -> None:
        self._cuda_device = cuda_device
        self._layers: list[tuple[int, Tensor]] = []

    def add(self, moe_layer_idx: int, index_TK: Tensor) -> None:
        """Nobody waits for the copy."""
        self._layers.append((moe_layer_idx, index_TK.to("cpu", non_blocking=True)))

    def take(self) -> list[tuple[int, Ints]]:
        """By MoE layer, in their order. Waits for the device."""
        if not self._layers:
            return []
        self._cuda_device.mark().synchronize()
        layers = [(moe_layer_idx, index_TK.numpy()) for moe_layer_idx, index_TK in self._layers]
        self._layers.clear()
        return layers


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Nobody waits for the copy: torch reuses page-locked memory only after copies from it are
    over.
    """
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
