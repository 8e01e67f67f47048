"""The keys and values of a decode step on a GPU: one more token of each sequence in transformers'
dynamic cache, whose layers have room for it (architectures/attention_inputs.py).

Kernels find them through a table on the device, which the host writes before each step. So a graph
of a step depends neither on how long the cache is, nor on where it lies, nor on whose it is.

Legend: L layers, B sequences, N tokens with the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from moe_infinity.architectures import attention_inputs
from moe_infinity.experimental.gpu.kernels.cached_layer import CachedLayer

NAME = "_moe_infinity_place"  # an attribute of cache layers and of new keys, in a step


class AttentionKernels(NamedTuple):
    """Their signatures are those of experimental/gpu/kernels/attention.py and rotary.py."""

    attend: Callable[..., Tensor]
    attend_latent: Callable[..., Tensor]
    make_heads: Callable[..., tuple[Tensor, Tensor]]


class Place(NamedTuple):
    """Where one layer has the new token of each sequence."""

    numbers: Tensor  # int64, a CachedLayer, on the device
    kernels: AttentionKernels


class CannotBeCaptured(RuntimeError):
    """A graph would keep a number that changes from step to step."""


class CachedSteps:
    """The caches of one model, one step at a time."""

    def __init__(self, device: torch.device, kernels: AttentionKernels) -> None:
        self._device = device
        self._kernels = kernels
        self._table_LN = torch.empty(0, 0, dtype=torch.int64, device=device)

    def of(self, cache: Any, num_seqs: int, mask_BN: Tensor | None) -> CachedStep | None:
        """A step that adds a token to each sequence. None for caches that kernels do not know.
        `mask_BN`: 0 for tokens that are not looked at, the new one with them.
        """
        if type(cache) is not DynamicCache or cache.offloading:
            return None
        if not all(map(_is_known, cache.layers)):
            return None
        growing = [layer for layer in cache.layers if attention_inputs.can_grow(layer)]
        if not growing or any(len(layer.keys) != num_seqs for layer in growing):
            return None
        if mask_BN is not None:
            mask_BN = mask_BN.to(torch.uint8).contiguous()
        rooms = [attention_inputs.with_room(layer) for layer in growing]
        lengths = [keys.shape[2] for keys, _ in rooms]
        if mask_BN is not None and max(lengths) > mask_BN.shape[1]:
            return None
        rows = [_numbers(*room, mask_BN) for room in rooms]
        self._upload(rows)
        places = [Place(numbers, self._kernels) for numbers in self._table_LN.unbind()]
        return CachedStep(growing, places, mask_BN, _states_of(cache.layers))

    def _upload(self, rows: Sequence[CachedLayer]) -> None:
        """The copy does not wait: pinned memory is not used again before it has been read."""
        is_pinned = self._device.type == "cuda"
        host_LN = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        if self._table_LN.shape != host_LN.shape:
            self._table_LN = torch.empty(host_LN.shape, dtype=torch.int64, device=self._device)
        self._table_LN.copy_(host_LN, non_blocking=True)


class CachedStep:
    """A step, from the room for its token to the token in the cache."""

    def __init__(
        self, layers: Sequence[Any], places: Sequence[Place], mask: Tensor | None, states: list[int]
    ) -> None:
        self._layers = layers
        self._places = places
        self._mask = mask  # kept, as the table has its address
        self.states = states  # addresses of what layers change in place, without a table

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, layers that are given new keys pass them on, for kernels to attend with."""
        try:
            for layer, place in zip(self._layers, self._places, strict=True):
                vars(layer).update({NAME: place, "update": partial(_pass_on, place)})
            yield
        finally:
            for layer in self._layers:
                for name in (NAME, "update"):
                    vars(layer).pop(name, None)

    @contextmanager
    def without_lengths(self) -> Iterator[None]:
        """Inside, whoever asks how long the cache is gets CannotBeCaptured."""
        names = "get_seq_length", "get_mask_sizes"
        try:
            for layer in self._layers:
                vars(layer).update(dict.fromkeys(names, _refuse))
            yield
        finally:
            for layer in self._layers:
                for name in names:
                    vars(layer).pop(name, None)

    def take(self) -> None:
        """The step has run: its token belongs to the cache."""
        for layer in self._layers:
            attention_inputs.add_token(layer)


def _is_known(layer: Any) -> bool:
    return (
        attention_inputs.can_grow(layer)
        or attention_inputs.keeps_nothing(layer)
        or type(layer) is LinearAttentionLayer
    )


def _states_of(layers: Sequence[Any]) -> list[int]:
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    states = [s for layer in recurrent for s in (layer.conv_states, layer.recurrent_states)]
    return [state.data_ptr() for by_idx in states for state in by_idx.values() if state is not None]


def _numbers(keys: Tensor, values: Tensor, mask_BN: Tensor | None) -> CachedLayer:
    num_tokens = keys.shape[2]
    assert keys.stride()[2:] == (keys.shape[3], 1), keys.stride()
    assert values.stride()[2:] == (values.shape[3], 1), values.stride()
    mask = 0
    if mask_BN is not None:
        mask = mask_BN.data_ptr() + mask_BN.shape[1] - num_tokens
    return CachedLayer(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        key_seq=keys.stride(0),
        key_head=keys.stride(1),
        value_seq=values.stride(0),
        value_head=values.stride(1),
        num_tokens=num_tokens,
        mask=mask,
        mask_seq=0 if mask_BN is None else mask_BN.shape[1],
    )


def _pass_on(
    place: Place, keys: Tensor, values: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """In place of a layer's update(): attention writes the cache."""
    setattr(keys, NAME, place)
    return keys, values


def _refuse(*_: Any, **__: Any) -> Any:
    raise CannotBeCaptured("the model asks how long the cache is")
