"""The state of a StaticCache that a captured step depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import StaticCache

# Cache layers that a step writes as a whole, or where a counter on the device says. By name, as not
# every version of transformers has them all.
KNOWN = {
    "StaticLayer", "StaticIndexedLayer", "StaticSlidingWindowLayer", "LinearAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer", "DummyLayer",  # the last holds nothing
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
}  # fmt: skip
LENGTH = "cumulative_length_int"  # how many tokens a sliding window has seen, as a Python int


def can_capture(cache: object) -> bool:
    """Whether steps that write this cache can be captured."""
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
