"""Our experts backend in transformers: it hands each MoE layer's routing to the engine.

transformers calls the backend of every experts module with (module, hidden states [T, D],
top_k_index [T, K], top_k_weights [T, K]), all padding included, sequences flattened.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from moe_infinity.architectures.adapters import (
    CALL_ATTRIBUTE,
    ExpertCalls,
    ExpertsModule,
    without_gradient,
)
from moe_infinity.architectures.early_router import EarlyRouter, Routed
from moe_infinity.engine.experts import Experts
from moe_infinity.experts import Ints
from moe_infinity.kernels.residents import Residents
from moe_infinity.routing import Routing

BACKEND = "moe_infinity"  # the name of our experts implementation in transformers


def experts_forward(
    self: Any, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
) -> Tensor:
    """Take the place of transformers' own loop over experts."""
    layer: EngineLayer = vars(self)[CALL_ATTRIBUTE]  # from Adapter.connect, see `attach` below
    return layer(x_TD, top_k_index_TK, top_k_weights_TK)


def register() -> None:
    """Make the backend known to transformers; again is harmless."""
    ExpertsInterface.register(BACKEND, experts_forward)


class EngineLayer:
    """One MoE layer of a model's experts, as adapters call it."""

    def __init__(
        self, experts: Experts, moe_layer_idx: int, early_router: EarlyRouter | None
    ) -> None:
        self._experts = experts
        self._moe_layer_idx = moe_layer_idx
        self._early_router = early_router

    def __call__(self, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        if self._is_asked_early:
            raise Routed(top_k_index_TK.cpu().numpy())
        layer_idx = self._moe_layer_idx
        return without_gradient(
            x_TD, lambda: self._experts.layer(layer_idx, x_TD, top_k_index_TK, top_k_weights_TK)
        )

    def answer_calls(self, calls: ExpertCalls, routing: Routing) -> None:
        if self._is_asked_early:
            raise Routed(routing.top_k_index_TK)
        self._experts.local.answer_calls(self._moe_layer_idx, routing, calls)

    def residents(self) -> Residents | None:
        """The layer's experts, if those of all layers are in memory and none has to leave."""
        return None if self._is_asked_early else self._experts.local.residents(self._moe_layer_idx)

    def note(self, top_k_index_TK: Ints) -> None:
        """Those were computed for these tokens."""
        self._experts.local.note_residents(self._moe_layer_idx, top_k_index_TK)

    @property
    def _is_asked_early(self) -> bool:
        """True if the routing is all that is wanted."""
        return self._early_router is not None and self._early_router.is_asking


def attach(
    model: PreTrainedModel,
    layers: list[ExpertsModule],
    experts: Experts,
    early_router: EarlyRouter | None,
) -> None:
    """Let the experts modules of `model` call `experts`."""
    for moe_layer_idx, layer in enumerate(layers):
        layer.connect(model, EngineLayer(experts, moe_layer_idx, early_router))
