"""Plans which experts to load ahead now: the absent ones that save most waiting, as many as the
link can begin before the next plan.

A plan is made after every MoE layer and holds for that layer only. Nothing waits in a queue, so an
expert that is no longer predicted is simply not in the next plan.
"""

from __future__ import annotations

from math import ceil
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey

# Chance of being used below which nothing is loaded ahead. Chosen, not tuned: halved or doubled it
# changed no stall that showed (docs/experiments.md, one request of each trace).
MIN_CHANCE = 0.1
LOADING_SHARE = 4  # one slot in four may be loading: the others are for demand loads


@runtime_checkable
class PredictingPolicy(EvictionPolicy, Protocol):
    """A policy that knows how likely each expert is to be used when its layer comes next."""

    def chances(self) -> NDArray[np.floating[Any]]:
        """[L, E]; the caller only reads it."""


class Planner:
    """For one residency table and the policy that orders it."""

    def __init__(
        self,
        table: ResidencyTable,
        policy: EvictionPolicy,
        exists_LE: NDArray[np.bool_] | None = None,
    ) -> None:
        """`exists_LE` is False where a layer has fewer experts than the widest; None: all exist."""
        if not isinstance(policy, PredictingPolicy):
            raise ConfigError(f"{type(policy).__name__} predicts nothing, so it cannot prefetch")
        self._table = table
        self._policy = policy
        self._exists_LE = exists_LE
        self._most_loading = table.num_slots // LOADING_SHARE

    def num_loads(self, *, load_s: float, layer_s: float, queued_s: float) -> int:
        """The number of loads that the link can begin before the next plan; 0 or less for none."""
        wanted = ceil((layer_s - queued_s) / load_s)
        return min(wanted, self._most_loading - self._table.num_loading)

    def plan(
        self, moe_layer_idx: int, *, load_s: float, layer_s: float, queued_s: float
    ) -> list[ExpertKey]:
        """The loads to begin while this layer computes, the most useful first.

        One load takes `load_s`. From the routing of one layer to that of the next it takes
        `layer_s`. Loads that were begun before keep the link busy for `queued_s`. A prefetch never
        evicts an expert with a higher score than the one it brings.
        """
        num_loads = self.num_loads(load_s=load_s, layer_s=layer_s, queued_s=queued_s)
        if num_loads <= 0:
            return []
        chances_LE = self._policy.chances()
        num_layers = len(chances_LE)
        layers_ahead_L1 = (np.arange(num_layers)[:, None] - moe_layer_idx - 1) % num_layers + 1
        saved_L1 = np.clip(layers_ahead_L1 * layer_s - queued_s, 0, load_s)
        value_LE = np.where(chances_LE >= MIN_CHANCE, chances_LE, 0) * saved_L1
        value_LE[self._table.cells()] = 0
        if self._exists_LE is not None:
            value_LE *= self._exists_LE
        values = value_LE.ravel()
        best = (
            values.argpartition(-num_loads)[-num_loads:]
            if num_loads < len(values)
            else values.argsort()
        )
        best = best[np.argsort(-values[best], kind="stable")]
        best = best[values[best] > 0]
        scores = self._policy.scores().ravel()[best]
        lowest = self._table.lowest_scores(len(best))
        taken: list[ExpertKey] = []
        for cell, score in zip(best.tolist(), scores.tolist(), strict=True):
            if score > lowest[len(taken)]:
                taken.append(ExpertKey(*divmod(cell, chances_LE.shape[1])))
        return taken
