"""Decoder layers that kernels/cpu/decoder_steps.py computes in steps of one token of each sequence:
one call for what surrounds a layer's experts or, while all experts are in memory, one call for this
layer and those after it.

Whether a layer is one of them is found by trying, not by the model's name: it has the usual parts,
and on random tokens, in float32, it gives what the kernel gives. One layer of each kind is tried
when the model is loaded. The others, and all longer inputs, go the usual way; so does a call with
arguments that are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moe_infinity.architectures import growing_cache
from moe_infinity.architectures.angles import Angles
from moe_infinity.architectures.cache_argument import CACHE_NAMES, cache_in
from moe_infinity.architectures.decoder_parts import described, has_usual_parts, kind_of
from moe_infinity.architectures.decoder_trial import find_attention
from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.architectures.layer_parts import (
    ATTENTION,
    NORM,
    RESIDUAL_NORM,
    experts_of,
    feed_forward,
    router_of,
)
from moe_infinity.architectures.layers_ahead import LayersAhead
from moe_infinity.architectures.routers import KnownRouting, find_gate, gives_experts_alone
from moe_infinity.experts import Ints
from moe_infinity.kernels.cpu.decoder import Attention, DecoderKernel, Gate
from moe_infinity.kernels.cpu.decoder_steps import Cached, DecoderSteps
from moe_infinity.kernels.residents import Residents

MOST_SEQUENCES = 64  # of a step
# Arguments of a layer that the kernel serves, or that say nothing to it; others only if not given.
SERVED = {"attention_mask", "position_embeddings", *CACHE_NAMES}
KNOWN = SERVED | {"position_ids", "use_cache", "cache_position"}


class LayerKind(NamedTuple):
    """What layers of one kind have in common, as far as kernels know it."""

    attention: Attention  # of one of them
    gate: Gate | None  # of the router
    is_all: bool  # what follows the attention is a router and experts, no more


class DecoderLayer:
    """In place of the forward method of one decoder layer."""

    def __init__(
        self,
        layer: nn.Module,
        kind: LayerKind,
        angles: Angles,
        early_router: EarlyRouter | None,
        *,
        may_follow: bool,
    ) -> None:
        block = feed_forward(layer)
        self.kernel = DecoderKernel(
            described(layer, kind.attention.rotated, kind.attention.pairs, kind.gate),
            getattr(layer, NORM).weight.dtype,
        )
        self.angles = angles
        self._call = experts_of(block) if kind.is_all else None
        self.may_follow = may_follow
        self._early_router = early_router
        self._attention = getattr(layer, ATTENTION)
        self._feed_forward = block
        self._stock: Callable[..., Any] = layer.forward
        router = router_of(block)
        self._router = KnownRouting(router) if kind.gate is not None and router else None
        self._followers = [block, *block.children()]
        self._norms = getattr(layer, NORM), getattr(layer, RESIDUAL_NORM)
        modules = [*self._attention.modules(), *self._norms]
        if self._router is not None:
            modules.append(router)
        self._weights = [
            (module._parameters, name, weight.data_ptr())
            for module in modules
            for name, weight in module.named_parameters(recurse=False)
        ]

    def connect(
        self, layer: nn.Module, number: int, steps: DecoderSteps, ahead: LayersAhead
    ) -> None:
        """Become the forward method of layer `number` of the steps."""
        self._number = number
        self._steps = steps
        self._ahead = ahead
        vars(layer)["forward"] = self.forward

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the stock method."""
        if not args and (out := self._ahead.take(self._number, hidden_states, kwargs)) is not None:
            return out
        cache_layer = None if args else self.cache_layer(hidden_states, kwargs)
        if cache_layer is None:
            return self._stock(hidden_states, *args, **kwargs)
        out = self._ahead.run(self._number, hidden_states, kwargs)
        return self._with_experts(hidden_states, cache_layer, kwargs) if out is None else out

    def _with_experts(self, x: Tensor, cache_layer: Any, kwargs: dict[str, Any]) -> Tensor:
        """By the kernel, and then the block that has the experts."""
        cached = Cached(*growing_cache.with_room(cache_layer))
        angles = self.angles.of(kwargs["position_embeddings"])
        mask = self.angles.mask_of(kwargs.get("attention_mask"), cached.keys.shape[2])
        given = self._steps.attend(self._number, x[:, 0], angles, cached, mask)
        growing_cache.take(cache_layer)
        residual = given.residual[:, None]
        if self._early_router is not None:
            self._early_router.note_residual(residual)
        if self._router is not None:
            self._router.expect(given)
        out = self._feed_forward(given.normed[:, None])
        added: Tensor = out[0] if isinstance(out, tuple) else out
        return residual + added

    def cache_layer(self, x: Tensor, kwargs: dict[str, Any]) -> Any | None:
        """Its part of the cache; None if a call with these arguments is not the kernel's."""
        cache = cache_in(kwargs)
        index = getattr(self._attention, "layer_idx", None)
        known = (
            x.shape[1] == 1
            and x.is_contiguous()
            and len(x) <= MOST_SEQUENCES
            and x.dtype == self.kernel.dtype
            and not torch.is_grad_enabled()
            and type(cache) is DynamicCache
            and index is not None
            and index < len(cache.layers)
            and all(kwargs[name] is None or kwargs[name] is False for name in kwargs.keys() - KNOWN)
            and not self._is_watched()
            and self._is_current()
        )
        if not known:
            return None
        cache_layer = cache.layers[index]
        if not growing_cache.can_grow(cache_layer) or len(cache_layer.keys) != len(x):
            return None
        mask = kwargs.get("attention_mask")
        fits = mask is None or mask.shape == (len(x), 1, 1, cache_layer.keys.shape[2] + 1)
        return cache_layer if fits and cache_layer.keys.dtype == x.dtype else None

    def residents(self) -> Residents | None:
        """Its experts, if those of all layers are in memory and none has to leave. None also if
        more than router and experts follows the attention, or somebody watches these.
        """
        if self._call is None or any(map(self._has_hooks, self._followers)):
            return None
        found: Residents | None = self._call.residents()
        return found

    def note(self, experts_TK: Ints) -> None:
        """The residents were computed for these tokens."""
        assert self._call is not None
        self._call.note(experts_TK)

    def _is_current(self) -> bool:
        """Whether the weights are still those that the kernel reads."""
        return all(
            (weight := parameters[name]) is not None and weight.data_ptr() == address
            for parameters, name, address in self._weights
        )

    def _is_watched(self) -> bool:
        """Whether somebody wants to see what the modules inside are called with."""
        return any(map(self._has_hooks, (self._attention, *self._norms)))

    def _has_hooks(self, module: nn.Module) -> bool:
        return bool(module._forward_hooks) or any(
            map(self._is_others, module._forward_pre_hooks.values())
        )

    def _is_others(self, hook: Any) -> bool:
        """Whether a hook is not the early router's, which is told of the residual as it is."""
        return self._early_router is None or getattr(hook, "__self__", 0) is not self._early_router


def use_kernels(model: nn.Module, early_router: EarlyRouter | None) -> None:
    """Replace the forward methods of the decoder layers of a model that kernels can compute."""
    rotations = [m for m in model.modules() if hasattr(m, "inv_freq") and not list(m.children())]
    kinds: dict[Any, LayerKind | None] = {}
    angles: dict[int, Angles] = {}
    found: list[tuple[nn.Module, DecoderLayer]] = []
    before = ""
    for name, layer in list(model.named_modules()):
        if not has_usual_parts(layer):
            continue
        key = kind_of(layer)
        if key not in kinds:
            kinds[key] = _find_kind(layer, rotations)
        kind = kinds[key]
        if kind is not None:
            num_pairs = kind.attention.rotated // 2
            of_step = angles.setdefault(num_pairs, Angles(num_pairs))
            follows = bool(before) and name == _next_name(before)
            own = DecoderLayer(layer, kind, of_step, early_router, may_follow=follows)
            found.append((layer, own))
            before = name
    by_dtype = {own.kernel.dtype for _, own in found}
    if len(by_dtype) != 1:
        return
    steps = DecoderSteps([own.kernel for _, own in found])
    ahead = LayersAhead(steps, [own for _, own in found])
    for number, (layer, own) in enumerate(found):
        own.connect(layer, number, steps, ahead)


def _find_kind(layer: nn.Module, rotations: Sequence[nn.Module]) -> LayerKind | None:
    tried = (find_attention(layer, rotation) for rotation in rotations)
    attention = next((good for good in tried if good is not None), None)
    if attention is None:
        return None
    block = feed_forward(layer)
    router = router_of(block)
    gate = None if router is None else find_gate(router)
    return LayerKind(attention, gate, gate is not None and gives_experts_alone(block))


def _next_name(name: str) -> str:
    """Of the module after this one in its list."""
    parent, _, index = name.rpartition(".")
    return f"{parent}.{int(index) + 1}" if index.isdecimal() else ""
