"""The state of a StaticCache: what a captured step depends on, and what a replay has to restore.

keys and values up to a counter     only grow: the counter alone is restored
windows, convolutions, recurrent    are overwritten: all of them are copied before a step that
states                              may need replay; 75 MB for Qwen3-Next, a few MB for a window
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

# Cache layers that a step writes as a whole, or where a counter on the device says. By name, as not
# every version of transformers has them all.
KNOWN = {
    "StaticLayer", "StaticIndexedLayer", "StaticSlidingWindowLayer", "LinearAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer", "DummyLayer",  # the last holds nothing
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
}  # fmt: skip
GROWING = {"keys", "values", "indexer_keys"}
LENGTH = "cumulative_length_int"  # how many tokens a sliding window has seen, as a Python int


def can_capture(cache: object) -> bool:
    """Whether steps that write this cache can be captured, and replayed after a restore."""
    if not isinstance(cache, StaticCache) or cache.offloading:
        return False
    return {type(layer).__name__ for layer in cache.layers} <= KNOWN


def state_of(cache: StaticCache) -> list[Any]:
    """All that a graph depends on: the addresses of the cache's tensors, and its Python values.

    Addresses change if beams are reordered, or a model records the past in new tensors. The length
    of a window is left out, as the device counts it itself.
    """
    found = [v for owner in (cache, *cache.layers) for _, v in _values(owner, without={LENGTH})]
    return [value.data_ptr() if isinstance(value, Tensor) else value for value in found]


def _values(owner: object, *, without: set[str]) -> Iterator[tuple[str, Any]]:
    """The attributes of a cache or of one of its layers; the items of a collection one by one."""
    for name, value in vars(owner).items():
        if name in without:
            continue
        if isinstance(value, dict):
            yield from ((name, each) for each in value.values())
        elif isinstance(value, list | tuple):
            yield from ((name, each) for each in value)
        else:
            yield name, value


class CacheSnapshot:
    """The state of a cache before a step. The tensors of the cache must keep their addresses."""

    def __init__(self, cache: StaticCache) -> None:
        self._owners = [cache, *cache.layers]
        self._tensors = [t for layer in cache.layers for t in _overwritten(layer)]
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        # The attributes of each owner: some models replace tensors of a cache, and add others.
        self._attributes: list[dict[str, Any]] = []

    @torch.no_grad()
    def save(self) -> None:
        """Copy what the next step overwrites."""
        torch._foreach_copy_(self._copies, self._tensors)
        self._attributes = [
            {name: dict(v) if isinstance(v, dict) else v for name, v in vars(owner).items()}
            for owner in self._owners
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Make the cache what it was at the last save()."""
        torch._foreach_copy_(self._tensors, self._copies)
        for owner, attributes in zip(self._owners, self._attributes, strict=True):
            vars(owner).clear()
            vars(owner).update(attributes)


def _overwritten(layer: Any) -> list[Tensor]:
    """The tensors of a cache layer that a step changes where a counter does not protect them."""
    grows = isinstance(layer, StaticLayer) and not isinstance(layer, StaticSlidingWindowLayer)
    found = _values(layer, without=GROWING if grows else set())
    return [v for _, v in found if isinstance(v, Tensor) and not _is_expanded(v)]


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share memory: torch refuses to write into such a tensor."""
    return any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
