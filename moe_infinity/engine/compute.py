"""How the experts of one MoE layer compute once they are in their slots.

    fused.py   on a CPU those that arrived together in one call of our kernels
    slots.py   the same on a GPU
    exact.py   one by one, with the bits of stock transformers; packed ones are unpacked first

All begin a piece of work from a routing, run experts as they arrive, and sum their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from moe_infinity.architectures.adapters import ExpertCalls, ExpertsModule
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.cluster.share import Share
from moe_infinity.engine.exact import ExactBackend
from moe_infinity.engine.expert_kernels import fused_layer, slot_layer
from moe_infinity.engine.fused import FusedBackend
from moe_infinity.engine.slots import SlotBackend, SlotResidents
from moe_infinity.experimental.gpu.slot_kernels import has_slot_kernels, slot_kernels
from moe_infinity.experts import ExpertKey
from moe_infinity.kernels.many_rows import is_for_torch
from moe_infinity.kernels.residents import Residents
from moe_infinity.memory.device import DeviceSlots
from moe_infinity.memory.slots import Slots
from moe_infinity.routing import Routing


class Work(Protocol):
    """What the experts of one MoE layer have to do in one step."""

    def run(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""


class LayerWork(Work, Protocol):
    """Work that ends in the layer's output."""

    def sum(self) -> Tensor:
        """[T, D]: the weighted sum over each token's experts, when all have run."""


class SharedWork(LayerWork, Protocol):
    """Of which other hosts may do a part."""

    def share(self, expert_idxs: list[int]) -> Share:
        """The part of the work that these experts have, for another host."""

    def put(self, share: Share, out_PD: Tensor) -> None:
        """Keep what another host has computed."""


class ShareWork(Work, Protocol):
    """Work that another host asked for."""

    def outputs(self) -> Tensor:
        """[P, D]: what the experts made of the rows, when all have run."""


class Backend(Protocol):
    """One way to compute the experts of a layer on a CPU, or exactly."""

    def begin(self, x_TD: Tensor, routing: Routing) -> SharedWork:
        """The work of one step, for T tokens."""

    def begin_share(self, share: Share) -> ShareWork:
        """A part of the work of one step on another host."""


class LayerComputer:
    """Computes the experts of one MoE layer from their slots."""

    def __init__(
        self,
        layer: ExpertsModule,
        recipes: LayerRecipes,
        slots: Slots,
        *,
        is_exact: bool,  # with the bits of transformers
        is_eager: bool,  # those of its eager implementation; a class may know only one
        copies_experts: bool = False,  # to where their rows are, each time they compute
    ) -> None:
        if layer.adapter.is_eager is not None:
            is_eager = layer.adapter.is_eager
        self._slots = slots
        self._exact = ExactBackend(
            recipes.computing(_copying(layer.compute) if copies_experts else layer.compute),
            slots.views(recipes.layout).__getitem__,
            is_eager=is_eager,
            weighs_input=layer.adapter.weighs_input,
        )
        uses_kernels = not is_exact and not copies_experts
        self._fused = self._fused_backend(layer, recipes) if uses_kernels else None
        self._in_slots = self._slot_backend(layer, recipes) if uses_kernels else None
        self._is_packed = recipes.is_packed
        self._num_experts = layer.num_experts
        read, other = ("read by kernels", "unpacked") if recipes.is_packed else ("fast", "exact")
        has_kernels = self._fused is not None or self._in_slots is not None
        self.how = read if has_kernels else other
        self.is_slow = self._is_packed and not is_exact and not has_kernels

    def _fused_backend(self, layer: ExpertsModule, recipes: LayerRecipes) -> FusedBackend | None:
        """None if no kernel of the CPU reads these experts."""
        if isinstance(self._slots, DeviceSlots):
            return None
        experts = fused_layer(layer, recipes)
        if experts is None:
            return None
        return FusedBackend(
            experts,
            self._slots.address_of,
            weighs_input=layer.adapter.weighs_input,
        )

    def _slot_backend(self, layer: ExpertsModule, recipes: LayerRecipes) -> SlotBackend | None:
        """None if no kernel of a GPU reads these experts."""
        slots = self._slots
        mlp = slot_layer(layer, recipes) if isinstance(slots, DeviceSlots) else None
        if mlp is None or not has_slot_kernels(slots.device):
            return None
        return SlotBackend(
            slot_kernels(slots.device), mlp, slots.address_of, num_experts=layer.num_experts
        )

    def begin(self, x_TD: Tensor, routing: Routing) -> LayerWork:
        """The work of one step."""
        if self._in_slots is not None and routing.experts_TK is not None:
            return self._in_slots.begin(x_TD, routing)
        return self.begin_shared(x_TD, routing)

    def begin_shared(self, x_TD: Tensor, routing: Routing) -> SharedWork:
        """The same with other hosts, which have no GPU."""
        backend: Backend = self._exact
        if self._fused is not None and routing.experts_TK is not None:
            mean_rows = routing.experts_TK.size / self._num_experts
            is_plain = not self._is_packed
            if not (is_plain and is_for_torch(routing.num_tokens, x_TD.dtype, mean_rows)):
                backend = self._fused
        return backend.begin(x_TD, routing)

    def begin_share(self, share: Share) -> ShareWork:
        """A part of the work of one step on another host, which has chosen the backend."""
        backend: Backend = self._exact
        if share.by_kernels:
            assert self._fused is not None, self.how
            backend = self._fused
        return backend.begin_share(share)

    def residents(self, slot_ids: Sequence[int]) -> Residents | SlotResidents | None:
        """All experts of the layer, which lie in these slots; on a CPU for steps of few tokens.
        None if no kernel computes them as they are.
        """
        if self._in_slots is not None:
            assert isinstance(self._slots, DeviceSlots)
            return SlotResidents(self._in_slots, slot_ids, self._slots.device)
        if self._fused is None or self._fused.weighs_input:
            return None
        addresses = [self._fused.address_of(slot_id) for slot_id in slot_ids]
        return Residents(self._fused.experts, np.array(addresses, np.int64))

    def answering(self, calls: ExpertCalls) -> Work:
        """The work of answering calls of experts, each with the bits of the expert's own class."""
        return CallsWork(self._exact, calls)

    def run(self, work: Work, keys: Sequence[ExpertKey], slot_ids: Mapping[ExpertKey, int]) -> None:
        """Do the part of the work that these experts have."""
        work.run([key.expert_idx for key in keys], [slot_ids[key] for key in keys])


def _copying(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`compute`, for rows on another device than the weights of the expert."""

    def compute_there(weights: Mapping[str, Tensor], x_RD: Tensor, *args: Any) -> Tensor:
        there = {name: weight.to(x_RD.device) for name, weight in weights.items()}
        return compute(there, x_RD, *args)

    return compute_there


class CallsWork:
    """Answers calls of experts. It has no sum: the block that called weighs and adds by itself."""

    def __init__(self, exact: ExactBackend, calls: ExpertCalls) -> None:
        self._exact = exact
        self._calls = calls

    def run(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        for expert_idx, slot_id in zip(expert_idxs, slot_ids, strict=True):
            self._calls.answer(expert_idx, self._exact.mlp, self._exact.weights_of(slot_id))
