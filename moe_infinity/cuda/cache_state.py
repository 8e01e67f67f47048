"""What a decode step knows of its StaticCache and overwrites in it: what a captured step depends
on, and what a lost one has to put back.

    keys and values up to a counter     only grow: the counter is put back
    windows, convolutions, recurrent    forget: all of them are copied before a step that may be
    states                              lost; 75 MB for Qwen3-Next, a window's few MB a layer
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

# Layers written where a counter on the device says, or as a whole; by name, as not every
# transformers has them all.
KNOWN = {
    "StaticLayer", "StaticIndexedLayer", "StaticSlidingWindowLayer", "LinearAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer", "DummyLayer",  # the last holds nothing
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
}  # fmt: skip
GROWING = {"keys", "values", "indexer_keys"}
LENGTH = "cumulative_length_int"  # of a window, in Python


def can_capture(cache: object) -> bool:
    """Whether steps that write it can be captured, and be put back if they are lost."""
    if not isinstance(cache, StaticCache) or cache.offloading:
        return False
    return {type(layer).__name__ for layer in cache.layers} <= KNOWN


def state_of(cache: StaticCache) -> list[Any]:
    """Where its tensors lie, which beams move and who records the past replaces in every step, and
    what Python knows of them; but how far a window is, which the device counts itself.
    """
    found = [v for owner in (cache, *cache.layers) for _, v in _values(owner, without={LENGTH})]
    return [value.data_ptr() if isinstance(value, Tensor) else value for value in found]


def _values(owner: object, *, without: set[str]) -> Iterator[tuple[str, Any]]:
    """By name; those of several states or layers one by one."""
    for name, value in vars(owner).items():
        if name in without:
            continue
        if isinstance(value, dict):
            yield from ((name, each) for each in value.values())
        elif isinstance(value, list | tuple):
            yield from ((name, each) for each in value)
        else:
            yield name, value


class Before:
    """What a cache was before a step. Of one whose tensors stay where they are."""

    def __init__(self, cache: StaticCache) -> None:
        self._owners = cache, *cache.layers
        self._tensors = [t for layer in cache.layers for t in _overwritten(layer)]
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        self._held: list[dict[str, Any]] = []  # by owner; some replace tensors, and add them

    @torch.no_grad()
    def keep(self) -> None:
        torch._foreach_copy_(self._copies, self._tensors)
        self._held = [
            {name: dict(v) if isinstance(v, dict) else v for name, v in vars(owner).items()}
            for owner in self._owners
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        torch._foreach_copy_(self._tensors, self._copies)
        for owner, held in zip(self._owners, self._held, strict=True):
            vars(owner).clear()
            vars(owner).update(held)


def _overwritten(layer: Any) -> list[Tensor]:
    grows = isinstance(layer, StaticLayer) and not isinstance(layer, StaticSlidingWindowLayer)
    found = _values(layer, without=GROWING if grows else set())
    return [v for _, v in found if isinstance(v, Tensor) and not _is_expanded(v)]


def _is_expanded(tensor: Tensor) -> bool:
    """Some of its numbers lie at one place: torch lets nobody write into it."""
    return any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
