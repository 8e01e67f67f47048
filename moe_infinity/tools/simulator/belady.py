"""The best any policy can do without prefetch: evict what is needed again last (Belady, 1966).

It must know the future, so it exists in replays only: `next_uses` reads it off the whole sequence
of touches, `Belady` follows it. Optimal for decode steps if the experts of each layer fit into the
slots at once. With prefill it is not, as the table first evicts what prefill brought in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.policies import EvictionPolicy, Experts, Scores
from moe_infinity.experts import Ints, Step

Touch = tuple[int, Experts]  # MoE layer, distinct experts activated in it
Times = NDArray[np.int64]  # numbers of touches, counted from 0

NEVER = np.iinfo(np.int64).max


def next_uses(touches: Sequence[Touch], *, num_layers: int, num_experts: int) -> list[Times]:
    """For each touch, when each of its experts is touched next, or NEVER. One pass, backwards."""
    next_use = np.full((num_layers, num_experts), NEVER)
    of_touch: list[Times] = []
    for time in reversed(range(len(touches))):
        moe_layer_idx, experts = touches[time]
        of_touch.append(next_use[moe_layer_idx, experts])
        next_use[moe_layer_idx, experts] = time
    return of_touch[::-1]


class Belady(EvictionPolicy):
    """The score falls with the time of the next use; future: what `next_uses` says of the very
    touches that follow.
    """

    def __init__(self, future: Sequence[Times], *, num_layers: int, num_experts: int) -> None:
        self._future = iter(future)
        self._scores = np.full((num_layers, num_experts), -float(NEVER))
        self._now = 0  # number of the next touch

    def begin_step(self, step: Step) -> None:
        """Steps and requests make no difference here."""

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        self._scores[moe_layer_idx, experts] = -next(self._future)
        self._now += 1

    def chances(self) -> Scores:
        """[L, E]: 1 for what its layer will activate when it comes next, else 0. Layers take turns,
        one touch each.
        """
        return (-self._scores < self._now + len(self._scores)).astype(np.float64)

    def scores(self) -> Scores:
        return self._scores
