"""The states of the gated delta rule in transformers' caches, as the kernel reaches them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from moe_infinity.kernels.cpu.decoder_steps import States
from moe_infinity.kernels.cpu.delta_rule import DeltaShape

UPDATES = {"update_conv_state", "update_recurrent_state"}  # methods of cache layers


class SpareStates:
    """Memory for the next states, which all layers of a model share. A layer that takes new states
    gives back those that it had.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # all of one kind

    def take(self, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a pair of the same shapes and dtypes."""
        kinds = [*map(_kind_of, like)]
        if self._pairs and [*map(_kind_of, self._pairs[-1])] != kinds:
            self._pairs.clear()
        if self._pairs:
            return self._pairs.pop()
        return torch.empty_like(like[0]), torch.empty_like(like[1])

    def give_back(self, pair: tuple[Tensor, Tensor]) -> None:
        """Keep a pair that nobody needs any more."""
        self._pairs.append(pair)


class DeltaStates:
    """How the kernel reaches the states that one layer has in a cache. They change places with
    spare ones at each token.
    """

    def __init__(self, shape: DeltaShape, spare: SpareStates) -> None:
        self._shape = shape
        self._spare = spare

    def fits(self, cache_layer: Any, x: Tensor, mask: Tensor | None) -> bool:
        """Return True if the kernel can go on with its states."""
        if mask is not None or not isinstance(cache_layer, LinearAttentionLayer):
            return False
        is_own = UPDATES & vars(cache_layer).keys()
        if is_own or cache_layer.record_past or not cache_layer.has_previous_state[0]:
            return False
        shape = self._shape
        window, state = _states_of(cache_layer)
        heads = len(x), shape.num_value_heads, shape.key_width, shape.value_width
        return bool(
            state is not None
            and state.shape == heads
            and state.dtype == torch.float32
            and state.is_contiguous()
            and window.shape[:2] == (len(x), shape.num_channels)
            and window.shape[2] >= shape.taps - 1
            and window.dtype == x.dtype
            and window.is_contiguous()
        )

    def open(self, cache_layer: Any) -> States:
        """Return the states, with memory for the next ones."""
        now = _states_of(cache_layer)
        return States(*now, *self._spare.take(now))

    def add_token(self, cache_layer: Any, states: States) -> None:
        """Let the layer have the states that were written, see `open`."""
        cache_layer.conv_states[0] = states.next_window
        cache_layer.recurrent_states[0] = states.next_recurrent
        self._spare.give_back((states.window, states.recurrent))

    def mark(self, cache_layer: Any) -> Tensor:
        """Return a tensor that is another one after each token."""
        return _states_of(cache_layer)[1]


def _states_of(cache_layer: Any) -> tuple[Tensor, Tensor]:
    return cache_layer.conv_states[0], cache_layer.recurrent_states[0]


def _kind_of(state: Tensor) -> tuple[Any, ...]:
    return state.shape, state.dtype, state.is_inference()
