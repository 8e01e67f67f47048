"""The backend of a GPU: one kernel computes the experts that have arrived, where they lie in their
slots, for any number of tokens (kernels/triton/experts.py).

The output of each pair of token and expert is kept in float32, so the sum over a token's experts
has one order, whichever arrive first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.experts import Routing
from moe_infinity.kernels.triton.slot_mlp import SlotMlp


class PairKernels(NamedTuple):
    """How experts compute pairs, and how the pairs of a token are added up. The signatures are
    those of kernels/triton/experts.py.
    """

    compute_pairs: Callable[[SlotMlp, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    sum_pairs: Callable[[SlotMlp, Tensor, Tensor, Tensor, torch.dtype], Tensor]


class PairWork:
    """The pairs of token and expert of one MoE layer in one step."""

    def __init__(
        self,
        kernels: PairKernels,
        mlp: SlotMlp,
        x_TD: Tensor,
        top_k_index_TK: Tensor,
        top_k_weights_TK: Tensor,
    ) -> None:
        self._kernels = kernels
        self._mlp = mlp
        self._x_TD = x_TD.contiguous()
        self._index_TK = top_k_index_TK.contiguous()
        self._weights_TK = top_k_weights_TK.contiguous()
        shape = top_k_index_TK.numel(), x_TD.shape[1]
        self._out_PD = torch.empty(shape, dtype=torch.float32, device=x_TD.device)

    def compute(self, pointers_E: Tensor) -> None:
        """Compute the pairs whose experts have an address here that is not 0."""
        given = self._x_TD, self._index_TK, self._weights_TK, pointers_E, self._out_PD
        self._kernels.compute_pairs(self._mlp, *given)

    def sum(self) -> Tensor:
        """Return [T, D], when all pairs are computed."""
        given = self._out_PD, self._index_TK, self._weights_TK, self._x_TD.dtype
        return self._kernels.sum_pairs(self._mlp, *given)


class SlotBackend:
    """Computes the experts of one MoE layer from slots on a GPU."""

    def __init__(
        self,
        kernels: PairKernels,
        mlp: SlotMlp,
        address_of: Callable[[int], int],
        *,
        num_experts: int,
    ) -> None:
        """`address_of(slot_id)` is where a slot begins in memory."""
        self.kernels = kernels
        self.mlp = mlp
        self.num_experts = num_experts
        self._address_of = address_of

    def pointers(
        self, expert_idxs: Sequence[int], slot_ids: Sequence[int], device: torch.device
    ) -> Tensor:
        """Return int64 [E]: the addresses of these experts, and 0 for the others."""
        pointers_E = torch.zeros(self.num_experts, dtype=torch.int64, device="cpu")
        addresses = [self._address_of(slot_id) for slot_id in slot_ids]
        pointers_E[list(expert_idxs)] = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        return _on_device(pointers_E, device)


class SlotWork:
    """One MoE layer in one step, whose routing the host knows."""

    def __init__(self, backend: SlotBackend, x_TD: Tensor, routing: Routing) -> None:
        assert routing.top_k_index_TK is not None, routing
        assert routing.top_k_weights_TK is not None, routing
        self._backend = backend
        self._device = x_TD.device
        index_TK = _on_device(torch.from_numpy(routing.top_k_index_TK), self._device)
        self._pairs = PairWork(
            backend.kernels, backend.mlp, x_TD, index_TK, routing.top_k_weights_TK
        )

    def compute(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""
        self._pairs.compute(self._backend.pointers(expert_idxs, slot_ids, self._device))

    def sum(self) -> Tensor:
        """Return [T, D]: the same bits in whatever order experts were computed."""
        return self._pairs.sum()


def _on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Begin a copy that no thread waits for: torch reuses page-locked memory only after copies from
    it are over.
    """
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
