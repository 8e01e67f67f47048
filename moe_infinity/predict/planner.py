"""Plans which experts to load ahead now: the absent ones that save most waiting, as many as the
link can begin before the next plan.

A plan is made after every MoE layer and holds for that layer only. Nothing waits in a queue, so an
expert that is no longer predicted is simply not in the next plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import ceil
from statistics import median
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.counters import Counters
from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase

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
        num_layers, num_experts = chances_LE.shape
        is_wanted_LE = chances_LE >= MIN_CHANCE
        is_wanted_LE[self._table.cells()] = False
        if self._exists_LE is not None:
            is_wanted_LE &= self._exists_LE
        cells = np.flatnonzero(is_wanted_LE)
        layers_ahead = (cells // num_experts - moe_layer_idx - 1) % num_layers + 1
        saved = np.clip(layers_ahead * layer_s - queued_s, 0, load_s)
        values = chances_LE.ravel()[cells] * saved
        best = np.argsort(-values, kind="stable")[:num_loads]
        best = cells[best[values[best] > 0]]
        scores = self._policy.scores().ravel()[best]
        lowest = self._table.lowest_scores(len(best))
        taken: list[ExpertKey] = []
        for cell, score in zip(best.tolist(), scores.tolist(), strict=True):
            if score > lowest[len(taken)]:
                taken.append(ExpertKey(*divmod(cell, num_experts)))
        return taken


FIRST = 32  # steps before the first trial: short answers are not tried on
BLOCK = 4
TRIAL = (False, True, True, False)  # blocks with and without prefetch
KEPT = 256  # steps between two trials; 8 of them with prefetch cost 1 % if it costs a third
LAYER_TIME_RATE = 0.1  # of the moving average of the time between two layers


class PayOff:
    """Decides if the next decode step shall prefetch, from the time that each one took.

    Now and then it measures whether prefetch pays on this machine, for this model and this text: a
    disk, a processor or a prediction that is not good enough makes it cost more than it saves.

        decode steps   32 without | 4 without, 8 with, 4 without | 256 as was faster | a trial ...

    The four blocks of a trial stand so that a cache which fills up meanwhile favours neither side.
    The first step of a block is not counted: the block before decided what it waits for.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._until_trial = FIRST
        self._taken: dict[bool, list[float]] = {False: [], True: []}
        self._step_of_trial = 0

    def end_step(self, seconds: float) -> None:
        """Note the time of a decode step, which prefetched if `is_on`."""
        if self._until_trial > 0:
            self._until_trial -= 1
            if self._until_trial == 0:
                self.is_on = TRIAL[0]
            return
        block, step = divmod(self._step_of_trial, BLOCK)
        if step > 0:
            self._taken[TRIAL[block]].append(seconds)
        self._step_of_trial += 1
        if self._step_of_trial < BLOCK * len(TRIAL):
            self.is_on = TRIAL[self._step_of_trial // BLOCK]
            return
        self.is_on = median(self._taken[True]) < median(self._taken[False])
        self._until_trial = KEPT
        self._taken = {False: [], True: []}
        self._step_of_trial = 0


class AheadMover(Protocol):
    """The part of a mover that prefetch uses."""

    failed: set[ExpertKey]  # prefetches that failed; until a demand load succeeds
    load_s: float  # what a prefetch took lately; 0 before the first

    def record_arrivals(self) -> float:
        """Take note of the prefetches that arrived; seconds until the others will have."""

    def load_ahead(self, slot_ids: Mapping[ExpertKey, int]) -> None:
        """Begin loads no layer waits for yet. The slots are reserved already."""


class Prefetcher:
    """Begins loads ahead of their layers. Raises ConfigError for a policy that predicts nothing."""

    def __init__(
        self,
        table: ResidencyTable,
        policy: EvictionPolicy,
        mover: AheadMover,
        exists_LE: NDArray[np.bool_],
        *,
        pay_off: PayOff | None,  # None: prefetch whether it pays or not
    ) -> None:
        self._pay_off = pay_off
        self._began_s: float | None = None  # when the decode step under way did
        self._table = table
        self._planner = Planner(table, policy, exists_LE)
        self._mover = mover
        self._layer_s = 0.0  # from one layer's routing to the next one's, waiting left out: lately
        self._last_layer: tuple[float, float] | None = None  # when it began, all waiting until then
        self._queued_s = 0.0

    def begin_decode(self) -> None:
        """A decode step begins."""
        if self._pay_off is not None and self._began_s is not None and self._last_layer is not None:
            self._pay_off.end_step(self._last_layer[0] - self._began_s)
        self._began_s = time.perf_counter()

    def begin_layer(self, phase: Phase, counters: Counters) -> None:
        """A layer was routed: note what arrived, before its experts are looked up."""
        self._queued_s = self._mover.record_arrivals()
        now = time.perf_counter()
        stall_s = counters.decode.stall_s
        if phase is Phase.PREFILL:  # its layers take longer than those to plan for
            self._last_layer = None
            self._began_s = None
            return
        if self._last_layer is not None:
            layer_s = now - self._last_layer[0] - (stall_s - self._last_layer[1])
            self._layer_s += (layer_s - self._layer_s) * (LAYER_TIME_RATE if self._layer_s else 1)
        self._last_layer = now, stall_s

    def has_room(self) -> bool:
        """True if the link can begin a load while this layer computes."""
        if self._pay_off is not None and not self._pay_off.is_on:
            return False
        return self._layer_s > 0 and self._planner.num_loads(**self._times()) > 0

    def begin_loads(self, moe_layer_idx: int) -> list[ExpertKey]:
        """Begin the planned loads while this layer computes, and return their experts. The layer's
        own experts are held, and there is room.
        """
        planned = self._planner.plan(moe_layer_idx, **self._times())
        keys = [key for key in planned if key not in self._mover.failed]
        self._mover.load_ahead({key: self._table.begin_prefetch(key) for key in keys})
        return keys

    def _times(self) -> dict[str, float]:
        load_s = self._mover.load_s or self._layer_s
        return {"load_s": load_s, "layer_s": self._layer_s, "queued_s": self._queued_s}
