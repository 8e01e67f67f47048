"""How the experts of one MoE layer compute once they are in their slots.

    fused.py           on a CPU, those that arrived together in one call of our kernels
    slots.py           the same on a GPU, by one kernel
    torch_backend.py   one by one by torch, with the bits of transformers; packed ones are unpacked

All begin a piece of work from a routing, compute experts as they arrive, and sum their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from moe_infinity.architectures.adapters import ExpertCalls, ExpertsModule, rounds_by_place
from moe_infinity.architectures.trial import FellBack, Found, Verdict, path_taken
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.engine.expert_kernels import fused_layer
from moe_infinity.engine.fused import FusedBackend, FusedWork
from moe_infinity.engine.slots import SlotBackend, SlotWork
from moe_infinity.engine.torch_backend import MlpInSteps, TorchBackend, TorchWork
from moe_infinity.experts import ExpertKey, Routing
from moe_infinity.kernels.many_rows import is_for_torch, row_path
from moe_infinity.kernels.reference import PlainMlp
from moe_infinity.kernels.residents import Residents
from moe_infinity.memory.device import DeviceSlots
from moe_infinity.memory.slots import Slots
from moe_infinity.report import PathTaken

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts


class Work(Protocol):
    """The work that the experts of one MoE layer have in one step."""

    def compute(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""


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
        copies_experts: bool = False,  # to the device of their rows, each time they compute
    ) -> None:
        if layer.adapter.is_eager is not None:
            is_eager = layer.adapter.is_eager
        casts = Casts(layer)

        def of_slot(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
            compute = casts.followed_by(compute)
            return recipes.computing(_copying(compute) if copies_experts else compute)

        on_cpu = not (copies_experts or isinstance(slots, DeviceSlots))
        in_steps = None
        mlp = layer.compute
        if (
            on_cpu
            and is_exact
            and not is_eager
            and isinstance(mlp, PlainMlp)
            and rounds_by_place(mlp.activate, dtype=casts.loaded)
        ):
            in_steps = MlpInSteps(of_slot(mlp.up), mlp.activate, of_slot(mlp.down))
        self.by_torch = TorchBackend(
            of_slot(layer.compute),
            slots.views(recipes.layout).__getitem__,
            is_eager=is_eager,
            weighs_input=layer.adapter.weighs_input,
            in_steps=in_steps,
        )
        self.by_slots: SlotBackend | None = None  # of a GPU, see kernel_trial.py
        self.by_kernels: FusedBackend | None = None  # of a CPU; None: none reads these experts
        experts: Verdict[FusedExperts] = FellBack(
            "transformers' bits were asked for" if is_exact else "not on the CPU"
        )
        if on_cpu and not is_exact:
            experts = fused_layer(layer, recipes)
        if isinstance(experts, Found):
            self.by_kernels = FusedBackend(
                experts.path, slots, weighs_input=layer.adapter.weighs_input
            )
        self.verdict: Verdict[Any] = experts  # whether kernels compute them
        self._layer = layer
        self._is_packed = recipes.is_packed
        self._num_experts = layer.num_experts
        by_kernels, by_torch = (
            ("read by kernels", "unpacked") if recipes.is_packed else ("fast", "exact")
        )
        self.how = by_torch if self.by_kernels is None else by_kernels
        self._is_exact = is_exact

    @property
    def is_slow(self) -> bool:
        """True if each use unpacks the experts for want of a kernel that reads them."""
        has_kernel = self.by_kernels is not None or self.by_slots is not None
        return self._is_packed and not (self._is_exact or has_kernel)

    def note_state(self) -> None:
        """Note what the layer's modules are like, for which kernels compute."""
        self._layer.note_state()

    @property
    def path_taken(self) -> PathTaken:
        """Return what the report says of the layer's experts, as of now."""
        change = self._layer.change()
        verdict = self.verdict if change is None else FellBack(change)
        return path_taken("experts", self._layer.module, verdict)

    def begin(self, x_TD: Tensor, routing: Routing) -> FusedWork | SlotWork | TorchWork:
        """Begin the work of one step. Long prompts go to torch where its products are faster, and
        so does all work of experts that were changed after loading.
        """
        if self._layer.change() is not None:
            return TorchWork(self.by_torch, x_TD, routing)
        if self.by_slots is not None and routing.top_k_index_TK is not None:
            return SlotWork(self.by_slots, x_TD, routing)
        if self.by_kernels is None or routing.top_k_index_TK is None:
            return TorchWork(self.by_torch, x_TD, routing)
        mean_rows = routing.top_k_index_TK.size / self._num_experts
        if not self._is_packed and is_for_torch(routing.num_tokens, x_TD.dtype, mean_rows):
            return TorchWork(self.by_torch, x_TD, routing)
        path = row_path(routing.num_tokens, x_TD.dtype, mean_rows)
        return FusedWork(self.by_kernels, x_TD, routing, path)

    def answering(self, calls: ExpertCalls) -> Work:
        """Begin the work of answering calls of experts, with the bits of the expert's own class."""
        return CallsWork(self.by_torch, calls)

    def compute(
        self, work: Work, keys: Sequence[ExpertKey], slot_ids: Mapping[ExpertKey, int]
    ) -> None:
        """Do what these experts have of the work."""
        work.compute([key.expert_idx for key in keys], [slot_ids[key] for key in keys])

    def residents(self, slot_ids: Sequence[int]) -> Residents | None:
        """All experts of the layer, which lie in these slots, for steps of few tokens. None if no
        kernel computes them in place.
        """
        backend = self.by_kernels
        if backend is None or backend.weighs_input:
            return None
        tables = [backend.tables[slot_id] for slot_id in slot_ids]
        return Residents(backend.experts, np.array(tables, np.int64))


class CallsWork:
    """Answers calls of experts. The block that made them weighs and adds by itself."""

    def __init__(self, backend: TorchBackend, calls: ExpertCalls) -> None:
        self._backend = backend
        self._calls = calls

    def compute(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Answer the calls of these experts, which lie in these slots."""
        for expert_idx, slot_id in zip(expert_idxs, slot_ids, strict=True):
            weights = self._backend.weights_of(slot_id)
            self._calls.answer(expert_idx, self._backend.mlp, weights)


class Casts:
    """Notices the dtype that an experts module is cast to after loading, as by `half()`."""

    def __init__(self, layer: ExpertsModule) -> None:
        self.loaded = layer.dtype
        self._cast = torch.empty(0, dtype=self.loaded, device="cpu")
        self._apply: Callable[..., nn.Module] = layer.module._apply
        vars(layer.module)["_apply"] = self._apply_here_too

    def _apply_here_too(self, function: Callable[[Tensor], Tensor], *args: Any) -> nn.Module:
        """Do to a tensor of ours what torch does to every parameter and buffer of the module. It is
        neither, so that the module has those of stock's.
        """
        self._cast = function(self._cast)
        return self._apply(function, *args)

    def followed_by(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `compute` in the dtype that the module has when it is called."""

        def compute_as_cast(
            weights: Mapping[str, Any], x: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor:
            dtype = self._cast.dtype
            if dtype != self.loaded:
                weights = {name: _cast(weight, dtype) for name, weight in weights.items()}
            return compute(weights, x, *args, **kwargs)

        return compute_as_cast


def _cast(weight: Tensor | list[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
    if isinstance(weight, list):
        return [part.to(dtype) for part in weight]
    return weight.to(dtype)


def _copying(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`compute`, for rows on another device than the weights of the expert."""

    def compute_there(weights: Mapping[str, Tensor], x_RD: Tensor, *args: Any) -> Tensor:
        there = {name: weight.to(x_RD.device) for name, weight in weights.items()}
        return compute(there, x_RD, *args)

    return compute_there
