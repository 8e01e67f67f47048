"""The sliding windows of a StaticCache in a captured step.

In stock transformers a Python int says whether the window is full: a graph would keep its value.
And an index is copied from the host, which no graph may do. Here the counter on the device decides.
The kernels are the same before and after the window is full, and give the same bits as stock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer


class StaticWindows:
    """The sliding window layers of one cache, in steps of one token. Other states of such a layer
    are not touched.
    """

    def __init__(self, cache: StaticCache) -> None:
        self._layers = [
            layer for layer in cache.layers if isinstance(layer, StaticSlidingWindowLayer)
        ]

    def catch_up(self) -> None:
        """Set the counters on the device: stock no longer does so once a window is full."""
        for layer in self._layers:
            layer.cumulative_length.fill_(layer.cumulative_length_int)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, only the counters on the device are used."""
        try:
            for layer in self._layers:
                vars(layer).update({name: partial(own, layer) for name, own in OWN.items()})
            yield
        finally:
            for layer in self._layers:
                for name in OWN:
                    vars(layer).pop(name, None)

    def advance(self) -> None:
        """Count the token of a replay, in which no Python ran."""
        for layer in self._layers:
            layer.cumulative_length_int += 1


def _update(
    layer: StaticSlidingWindowLayer, keys: Tensor, values: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """[B, heads, 1, width] each: append one token; a full window first drops its oldest.

    Returns the windows, [B, heads, size of the window, width] each.
    """
    assert keys.shape[2] == 1, keys.shape
    counter = layer.cumulative_length
    size = layer.max_cache_len
    at = counter.clamp(max=size - 1).view(1)
    is_full = counter >= size
    for window, new in ((layer.keys, keys), (layer.values, values)):
        moved = torch.where(is_full, window.roll(-1, dims=2), window)
        window.copy_(moved.index_copy_(2, at, new))
    counter.add_(1)
    return layer.keys, layer.values


def _seq_length(layer: StaticSlidingWindowLayer) -> Any:
    """The length before this step. A copy, as callers may look at it after the update."""
    return layer.cumulative_length.clone()


def _mask_sizes(layer: StaticSlidingWindowLayer, _: int) -> tuple[int, Tensor]:
    """The size of the window, and the position of its first token."""
    size = layer.max_cache_len
    return size, (layer.cumulative_length - size + 1).clamp(min=0)


OWN: dict[str, Callable[..., Any]] = {
    "update": _update, "get_seq_length": _seq_length, "get_mask_sizes": _mask_sizes
}  # fmt: skip
