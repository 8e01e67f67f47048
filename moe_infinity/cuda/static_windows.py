"""The sliding windows of a StaticCache in a captured step.

Stock's layer asks a Python int whether its window is full, which a graph would keep as it was, and
copies an index from the host, which no graph may. Here the counter on the device decides, by the
same kernels before and after the window is full, and with the bits of stock.
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
    """The sliding layers of one cache, one token a step; states beside a window are left alone."""

    def __init__(self, cache: StaticCache) -> None:
        self._layers = [la for la in cache.layers if isinstance(la, StaticSlidingWindowLayer)]

    def catch_up(self) -> None:
        """Stock leaves the counter on the device alone once a window is full."""
        for layer in self._layers:
            layer.cumulative_length.fill_(layer.cumulative_length_int)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The Python int is not asked inside."""
        try:
            for layer in self._layers:
                vars(layer).update({name: partial(own, layer) for name, own in OWN.items()})
            yield
        finally:
            for layer in self._layers:
                for name in OWN:
                    vars(layer).pop(name, None)

    def advance(self) -> None:
        """After a replay, in which no Python ran."""
        for layer in self._layers:
            layer.cumulative_length_int += 1


def _update(
    layer: StaticSlidingWindowLayer, keys: Tensor, values: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """[B, heads, 1, width] each: at the end of a full window, which moves on, or where it ends."""
    assert keys.shape[2] == 1, keys.shape
    counter, size = layer.cumulative_length, layer.max_cache_len
    at, is_full = counter.clamp(max=size - 1).view(1), counter >= size
    for window, new in ((layer.keys, keys), (layer.values, values)):
        moved = torch.where(is_full, window.roll(-1, dims=2), window)
        window.copy_(moved.index_copy_(2, at, new))
    counter.add_(1)
    return layer.keys, layer.values


def _seq_length(layer: StaticSlidingWindowLayer) -> Any:
    """Before this step, even if it is looked at after the update."""
    return layer.cumulative_length.clone()


def _mask_sizes(layer: StaticSlidingWindowLayer, _: int) -> tuple[int, Tensor]:
    """How many, and the position of the first."""
    size = layer.max_cache_len
    return size, (layer.cumulative_length - size + 1).clamp(min=0)


OWN: dict[str, Callable[..., Any]] = {
    "update": _update, "get_seq_length": _seq_length, "get_mask_sizes": _mask_sizes
}  # fmt: skip
