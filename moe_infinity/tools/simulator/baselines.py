"""Policies that the paper compares with (arXiv 2401.14361v3). The simulator replays them; no engine
runs them.

They treat a batch as one request, like the engine's own policies other than the default.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_infinity.cache import policies
from moe_infinity.cache.activation_aware import Chances
from moe_infinity.cache.policies import EvictionPolicy, Experts, Lru, Scores
from moe_infinity.experts import Ints, Step
from moe_infinity.tools.simulator.moe_infinity_v3 import MoeInfinityV3

NEIGHBOR_LAYERS = 3  # as in the published code's lru_ds
PROTECTED = 2.0**40  # added to a time, outranks every time; the sum is still exact in float64


class Neighbor(Lru):
    """LRU that keeps the experts of the running layer and the two after it, which are needed next:
    lru_ds of the published code, the paper's "dependency" class (DeepSpeed).
    """

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        super().__init__(num_layers, num_experts, num_slots=num_slots)
        self._layers_ahead = np.arange(NEIGHBOR_LAYERS)
        self._layer = 0

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        super().touch(moe_layer_idx, experts)
        self._layer = moe_layer_idx

    def scores(self) -> Scores:
        return self.scores_after(self._layer)

    def scores_after(self, moe_layer_idx: int) -> Scores:
        """The layer after the last one is layer 0, where the next step starts."""
        scores: Scores = self._last_use.copy()
        scores[(moe_layer_idx + self._layers_ahead) % len(scores)] += PROTECTED
        return scores


class PerLayerLru(Lru):
    """Every layer owns an equal share of the slots and evicts its own least recently used expert
    (Mixtral-Offloading, arXiv 2312.17238).

    As a score: the most recently used experts of a layer, as many as its share, are protected, and
    the others leave first. A layer that activates more experts than its share borrows slots.
    """

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        super().__init__(num_layers, num_experts, num_slots=num_slots)
        share, remainder = divmod(num_slots, num_layers)
        self._shares = [share + (moe_layer_idx < remainder) for moe_layer_idx in range(num_layers)]
        self._scores = np.zeros((num_layers, num_experts))

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        super().touch(moe_layer_idx, experts)
        last_use = self._last_use[moe_layer_idx]
        newest = np.argsort(-last_use, kind="stable")[: self._shares[moe_layer_idx]]
        self._scores[moe_layer_idx] = last_use
        self._scores[moe_layer_idx, newest] += PROTECTED * (last_use[newest] > 0)

    def scores(self) -> Scores:
        return self._scores


class TokenCounts(EvictionPolicy):
    """The share of a layer's tokens that an expert served since the model was loaded, prefill
    included: the paper's "counts" class (BrainStorm).
    """

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        self._counts = np.zeros((num_layers, num_experts))
        self._scores = np.zeros((num_layers, num_experts))

    def begin_step(self, step: Step) -> None:
        """Nothing changes: this policy counts no steps and no requests."""

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        self._counts[moe_layer_idx, experts] += counts
        self._scores[moe_layer_idx] = self._counts[moe_layer_idx] / max(
            self._counts[moe_layer_idx].sum(), 1
        )

    def scores(self) -> Scores:
        return self._scores


BASELINES: dict[str, Callable[..., EvictionPolicy]] = {
    "neighbor": Neighbor,
    "per-layer-lru": PerLayerLru,
    "counts": TokenCounts,
    "moe-infinity-v3": MoeInfinityV3,
}
SIMULATED_POLICIES = (*policies.POLICIES, *BASELINES)


def make_policy(
    name: str, *, num_layers: int, num_experts: int, num_slots: int, chances: Chances | None = None
) -> EvictionPolicy:
    """A fresh policy by its name in `SIMULATED_POLICIES`."""
    if name in BASELINES:
        return BASELINES[name](num_layers, num_experts, num_slots=num_slots)
    return policies.make_policy(
        name, num_layers=num_layers, num_experts=num_experts, num_slots=num_slots, chances=chances
    )
