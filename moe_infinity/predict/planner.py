"""What to load ahead, now: the absent experts that save most waiting, as many as the link can begin
before the next plan.

A plan is made after every row and holds for that row only, so nothing goes stale in a queue and
nothing is planned twice: what was predicted and is no longer is simply not in the next plan.
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
LOADING_SHARE = 4  # of the slots, one in so many may be loading: the others are for demand


@runtime_checkable
class PredictingPolicy(EvictionPolicy, Protocol):
    """A policy that knows how likely each expert is to be used when its row comes next."""

    def chances(self) -> NDArray[np.floating[Any]]:
        """[R, E]; the caller only reads it."""


class Planner:
    """For one residency table and the policy that orders it."""

    def __init__(
        self,
        table: ResidencyTable,
        policy: EvictionPolicy,
        exists_RE: NDArray[np.bool_] | None = None,
    ) -> None:
        """`exists_RE` is False where a row has fewer experts than the widest; None: all exist."""
        if not isinstance(policy, PredictingPolicy):
            raise ConfigError(f"{type(policy).__name__} predicts nothing, so it cannot prefetch")
        self._table = table
        self._policy = policy
        self._exists_RE = exists_RE
        self._most_loading = table.num_slots // LOADING_SHARE

    def num_loads(self, *, load_s: float, row_s: float, queued_s: float) -> int:
        """How many loads the link can begin before the next plan; 0 or less for none."""
        wanted = ceil((row_s - queued_s) / load_s)
        return min(wanted, self._most_loading - self._table.num_loading)

    def plan(self, row: int, *, load_s: float, row_s: float, queued_s: float) -> list[ExpertKey]:
        """The loads to begin while `row` computes, the most useful first.

        An expert takes `load_s` to load, a row `row_s` from its routing to the next one's, and what
        was begun before keeps the link busy for `queued_s`. A prefetch never takes the slot of an
        expert scored higher than what it brings.
        """
        num_loads = self.num_loads(load_s=load_s, row_s=row_s, queued_s=queued_s)
        if num_loads <= 0:
            return []
        chances_RE = self._policy.chances()
        num_rows = len(chances_RE)
        rows_ahead_R1 = (np.arange(num_rows)[:, None] - row - 1) % num_rows + 1
        saved_R1 = np.clip(rows_ahead_R1 * row_s - queued_s, 0, load_s)
        value_RE = np.where(chances_RE >= MIN_CHANCE, chances_RE, 0) * saved_R1
        value_RE[self._table.cells()] = 0
        if self._exists_RE is not None:
            value_RE *= self._exists_RE
        values = value_RE.ravel()
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
                taken.append(ExpertKey(*divmod(cell, chances_RE.shape[1])))
        return taken
