"""The kinds of layers that the caches of models have, and what each keeps of a sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from moe_infinity.architectures import attention_inputs
from moe_infinity.kernels.kv_layers import keep_alone

# Not DynamicIndexedLayer: sparse attention also selects positions of the padding, so a sequence's
# tokens depend on its neighbours (seen with DeepSeek-V3.2 and GLM-5, tiny and random).
JOINABLE = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def layers_that_cannot_join(config: Any) -> list[str]:
    """Names of the cache layer classes of a model whose caches cannot be joined."""
    layers = DynamicCache(config=config).layers
    kept = [layer for layer in layers if not attention_inputs.keeps_nothing(layer)]
    return sorted({type(layer).__name__ for layer in kept if type(layer) not in JOINABLE})


def has_recurrent_layers(config: Any) -> bool:
    """Return True if a layer of the model keeps a recurrent state instead of keys and values."""
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, LinearAttentionLayer) for layer in layers)


def has_tokens(cache: DynamicCache, num_tokens: int) -> bool:
    """Return True if a cache holds this many tokens of each sequence, padding included. A recurrent
    state does not say how many it has seen: where there is nothing else, one that exists is enough.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    if not layers:
        return any(map(tensors_of, cache.layers))
    return any(layer.get_seq_length() == num_tokens for layer in layers)


def recurrent_states_of(layer: Any) -> list[dict[int, Tensor | None]]:
    is_recurrent = isinstance(layer, LinearAttentionLayer)
    return [layer.conv_states, layer.recurrent_states] if is_recurrent else []


def growing_names_of(layer: Any) -> tuple[str, ...]:
    """Names of a layer's tensors that grow with the sequence.

    There are none in a layer without attention, or that shares keys and values with another layer.
    """
    is_growing = isinstance(layer, DynamicLayer) and layer.is_initialized
    return ("keys", "values") if is_growing else ()


def tensors_of(layer: Any) -> list[Tensor]:
    states = [state for states in recurrent_states_of(layer) for state in states.values()]
    growing = [getattr(layer, name) for name in growing_names_of(layer)]
    return [tensor for tensor in (*states, *growing) if tensor is not None]


def keep_windows(cache: DynamicCache) -> None:
    """Let layers with a sliding window keep the tokens of a chunk until `cut_windows`."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()


def cut_windows(cache: DynamicCache, *, is_last: bool) -> None:
    """Cut these layers to their windows; with `is_last` for good."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.crop(0)
            keep_alone(layer)
            layer.record_past = not is_last
