"""Decoder layers that are computed before the model calls them, together with the first of them,
while the experts of all of them are in memory.

A layer that is called takes what is ready if it is given what was expected: the very tensor that
the layer before it gave, and the other arguments of the first. If not, it computes as if nothing
were ready. If that was for the other arguments, no later step computes ahead across that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from moe_infinity.architectures import growing_cache
from moe_infinity.architectures.angles import Angles
from moe_infinity.experts import Ints
from moe_infinity.kernels.cpu.decoder_steps import Cached, DecoderSteps
from moe_infinity.kernels.residents import Residents


class Layer(Protocol):
    """One decoder layer that kernels compute."""

    angles: Angles
    may_follow: bool  # the layer before it: in the model, and with the same arguments

    def cache_layer(self, x: Tensor, kwargs: dict[str, Any]) -> Any | None:
        """Its part of the cache; None if a call with these arguments is not the kernel's."""

    def residents(self) -> Residents | None:
        """Its experts, if those of all layers are in memory and none has to leave. None also if
        more than router and experts follows the attention, or somebody watches these.
        """

    def note(self, experts_TK: Ints) -> None:
        """The residents were computed for these tokens."""


class _Ready(NamedTuple):
    """What was computed for a layer that is not called yet."""

    x: Tensor  # what it is expected to be given
    version: int  # of the contents of x
    kwargs: dict[str, Any]
    cache_layer: Any
    keys: Tensor  # of the cache layer, to which a token is added
    out: Tensor
    chosen: Ints  # [B, K]


class LayersAhead:
    """The decoder layers of one model that kernels compute, in the order of the model."""

    def __init__(self, steps: DecoderSteps, layers: Sequence[Layer]) -> None:
        self._steps = steps
        self._layers = layers
        self._ready: dict[int, _Ready] = {}

    def take(self, number: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """What layer `number` gives; None if that was not computed yet."""
        ready = self._ready.pop(number, None)
        if ready is None or ready.x is not x or ready.version != x._version:
            return None
        is_same = kwargs.keys() == ready.kwargs.keys()
        if not is_same or any(kwargs[name] is not ready.kwargs[name] for name in kwargs):
            self._layers[number].may_follow = False
            return None
        return self._taken(number, ready) if ready.keys is ready.cache_layer.keys else None

    def run(self, number: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """What layer `number` gives, and all that follow as far as possible; None if its experts
        are not all in memory.
        """
        self._ready.clear()
        residents, cache_layers = self._reach(number, x, kwargs)
        if not residents:
            return None
        cached = [Cached(*growing_cache.with_room(own)) for own in cache_layers]
        angles = self._layers[number].angles
        outs, chosen = self._steps.run(
            number,
            x[:, 0],
            angles.of(kwargs["position_embeddings"]),
            cached,
            angles.mask_of(kwargs.get("attention_mask"), cached[0].keys.shape[2]),
            residents,
        )
        for i, own in enumerate(cache_layers):
            out = outs[i][:, None]
            ready = _Ready(x, x._version, kwargs, own, own.keys, out, chosen[i])
            self._ready[number + i] = ready
            x = out
        return self._taken(number, self._ready.pop(number))

    def _reach(
        self, number: int, x: Tensor, kwargs: dict[str, Any]
    ) -> tuple[list[Residents], list[Any]]:
        """The experts and parts of the cache of the layers that one call can compute."""
        residents: list[Residents] = []
        cache_layers: list[Any] = []
        if x.is_inference():  # has no version: a change in place would not be noticed
            return residents, cache_layers
        for layer in self._layers[number:]:
            joins = not residents or (
                layer.may_follow and layer.angles is self._layers[number].angles
            )
            own = layer.residents() if joins else None
            cache_layer = None if own is None else layer.cache_layer(x, kwargs)
            if own is None or cache_layer is None:
                break
            residents.append(own)
            cache_layers.append(cache_layer)
        return residents, cache_layers

    def _taken(self, number: int, ready: _Ready) -> Tensor:
        self._layers[number].note(ready.chosen)
        growing_cache.take(ready.cache_layer)
        return ready.out
