"""Hands each step and each MoE layer of it to all that keep account of them: the recorder, the
predictor, the policies of the tiers, and the counters of the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.counters import Counters
from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.experts import ExpertKey, Ints, Routing, Step, without_gaps
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder


class Bookkeeping:
    """The account of one model. An expert of MoE layer i takes `layer_bytes[i]` on disk."""

    def __init__(
        self,
        *,
        tiers: Sequence[SlotTier],
        keys: Sequence[Sequence[ExpertKey]],  # by MoE layer
        num_experts: int,  # of the widest MoE layer
        layer_bytes: Sequence[int],
        predictor: Predictor | None,
        keeps_history: bool,  # what the predictor has learned is wanted in the end
        local_LE: NDArray[np.bool_] | None = None,  # computed here, may change; None: all
    ) -> None:
        self.tiers = tiers
        self.keys = keys
        self.total_experts = sum(map(len, keys))
        # [MoE layers, experts of the widest]: False where a layer has fewer experts.
        self.exists_LE = np.array([[e < len(own) for e in range(num_experts)] for own in keys])
        self.local_LE = self.exists_LE if local_LE is None else local_LE
        self.predictor = predictor
        self._predictor = predictor  # also while nothing has to be predicted
        self.recorder = Recorder(len(keys), num_experts)
        self.counters = Counters()
        self.activated: list[list[int]] = [[] for _ in keys]  # by each layer's last step
        self._layer_bytes = layer_bytes
        self._keeps_history = keeps_history

    def local_keys(self, moe_layer_idx: int) -> Sequence[ExpertKey]:
        """Return the keys of the experts of a layer that are computed here."""
        is_local_E = self.local_LE[moe_layer_idx]
        return [key for key in self.keys[moe_layer_idx] if is_local_E[key.expert_idx]]

    def expert_states(self) -> NDArray[np.int8]:
        """Return [MoE layers, experts], where each expert is now, see `MoE.expert_states`."""
        table = self.tiers[0].table
        states_LE = np.where(self.exists_LE, 0, -1).astype(np.int8)
        for tier in self.tiers[1:]:
            states_LE[tier.table.cells()] = 4
        states_LE[table.cells()] = 2
        for key in table.loading_keys():
            states_LE[key] = 1
        for moe_layer_idx, activated in enumerate(self.activated):
            here = states_LE[moe_layer_idx, activated] == 2
            states_LE[moe_layer_idx, np.array(activated, dtype=int)[here]] = 3
        return states_LE

    def note_begin(self, step: Step, *, is_cut: bool = False) -> None:
        """A forward pass begins. `is_cut`: layers take its tokens in blocks, so that the experts of
        one layer are needed for a while.
        """
        if self.tiers[0].table.num_slots < self.total_experts:
            self.predictor = self._predictor
        ended = self.recorder.begin_step(step)
        if self.predictor is not None:
            self.predictor.begin_step(self.recorder.step, ended)
        for policy in self._policies():
            policy.begin_step(self.recorder.step)
        for tier in self.tiers:
            tier.table.begin_step(step.phase, least_quota=len(self.exists_LE[0]) if is_cut else 1)
        counters = self.counters.of(step.phase)
        counters.steps += 1
        counters.tokens += step.num_counted

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, other steps may run. The one under way goes on afterwards."""
        step = self.recorder.step
        quotas = [tier.table.least_quota for tier in self.tiers]
        with self.recorder.set_aside():
            yield
            if self.recorder.step is step:  # none ran
                return
        for tier, quota in zip(self.tiers, quotas, strict=True):
            tier.table.least_quota = quota
        step = replace(step, begins_B=np.zeros_like(step.begins_B))
        if self.predictor is not None:
            self.predictor.begin_step(step)
        for policy in self._policies():
            policy.begin_step(step)

    def _policies(self) -> list[EvictionPolicy]:
        """The policies that may have to choose who leaves: not of a tier with room for all."""
        return [t.policy for t in self.tiers if t.table.num_slots < self.total_experts]

    def note_all_resident(self) -> None:
        """All experts are in memory: nothing has to be predicted while all have slots."""
        if not self._keeps_history:
            self.predictor = None

    def note_known(self, step: Step, experts_TLK: Ints) -> None:
        """Tokens that are not computed, because their keys and values are known, but belong to
        requests. What they activated counts for the requests, not for the caches.
        """
        ended = self.recorder.begin_step(step)
        if self.predictor is not None:
            self.predictor.begin_step(step, ended)
        for moe_layer_idx in range(len(self.keys)):
            counted_TK = self.recorder.record(moe_layer_idx, experts_TLK[:, moe_layer_idx])
            if self.predictor is not None:
                self.predictor.observe(moe_layer_idx, counted_TK)

    def note_routing(
        self, moe_layer_idx: int, routing: Routing, block: slice | None = None
    ) -> None:
        """Record what the router of this layer chose in the step that began last, for all of its
        tokens or for a block of them.
        """
        activated = routing.activated
        if block is not None and block.start > 0:
            activated = sorted({*self.activated[moe_layer_idx], *activated})
        self.activated[moe_layer_idx] = activated
        if routing.top_k_index_TK is not None:
            top_k_index_TK = routing.top_k_index_TK
            if routing.num_without:
                top_k_index_TK = without_gaps(top_k_index_TK)
            counted_TK = self.recorder.record(moe_layer_idx, top_k_index_TK, block)
            is_whole = block is None or block.stop == self.recorder.step.num_tokens
            if self.predictor is not None and is_whole:
                self.predictor.observe(moe_layer_idx, counted_TK)
        for policy in self._policies():
            policy.touch(moe_layer_idx, routing.activated, routing.counts)

    def note_lookups(self, keys: Sequence[ExpertKey]) -> None:
        """These experts are about to be looked up in the tier that computes."""
        counters = self.counters.of(self.recorder.step.phase)
        counters.add_lookups(*self.tiers[0].table.census(keys))

    def note_residents(self, moe_layer_idx: int, top_k_index_TK: Ints) -> None:
        """Record what a layer of the step that began last chose, all of it in memory."""
        routing = Routing.of_experts(top_k_index_TK, None)
        self.note_routing(moe_layer_idx, routing)
        counters = self.counters.of(self.recorder.step.phase)
        counters.add_lookups(len(routing.activated), 0, 0)

    def note_loads(self, moe_layer_idx: int, num_read: int) -> None:
        """The step that began last reads `num_read` experts of this layer from disk."""
        counters = self.counters.of(self.recorder.step.phase)
        counters.bytes_read += num_read * self._layer_bytes[moe_layer_idx]

    def note_preload(self, key: ExpertKey) -> None:
        """This expert is read from disk into a slot that was free."""
        self.counters.preload.experts += 1
        self.counters.preload.bytes_read += self._layer_bytes[key.moe_layer_idx]
