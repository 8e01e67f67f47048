"""The work of one MoE layer in one step. This is the architecture:

    1 record     what the router chose                      engine/bookkeeping.py
    2 look up    the activated experts, and hold them       cache/residency.py
    3 load       those that are absent                      memory/mover.py, memory/device_mover.py
    4 prefetch   what later layers will need                predict/prefetcher.py
    5 compute    the residents, then the others             engine/compute.py
    6 release    the held experts

If a layer activates more experts than there are slots, steps 2 to 6 are repeated in waves. The sum
over experts has a fixed order, so a result depends neither on the budget nor on the policy nor on
which expert arrives first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.engine.bookkeeping import Bookkeeping
from moe_infinity.engine.compute import LayerComputer, Work
from moe_infinity.engine.slots import SlotResidents
from moe_infinity.experts import ExpertKey, Phase, Step
from moe_infinity.kernels.residents import Residents
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.predict.prefetcher import Prefetcher
from moe_infinity.routing import Routing

# A prompt that activates this share of a layer's experts is taken to need all of the next layer's.
STREAMED_SHARE = 0.75
# Rows that experts of a prompt compute before anybody may stop it: 0.1 to 0.5 s on two cores, with
# experts of 9 MB in bf16.
STOPPABLE_ROWS = 512
BEFORE_THE_FIRST = -1  # in place of the index of an MoE layer


class OngoingStep(NamedTuple):
    """The forward pass under way, as far as the engine has come with it."""

    step: Step
    moe_layer_idx: int = BEFORE_THE_FIRST  # the last one that was entered
    is_loading: bool = False  # stays so if an error or Ctrl-C cut a layer short


class LayerPath:
    """Runs the MoE layers of one model, in the tier that computes."""

    def __init__(
        self,
        *,
        tier: SlotTier,
        computers: Sequence[LayerComputer],  # by MoE layer
        bookkeeping: Bookkeeping,
        prefetcher: Prefetcher | None,
        early_router: EarlyRouter | None,
        # Begins to load experts that a long prompt will need next; returns those it began. None:
        # they are loaded when their layer asks for them.
        stream: Callable[[Sequence[ExpertKey]], Sequence[ExpertKey]] | None,
        streams_while_computing: bool,  # and not only when a layer has computed
    ) -> None:
        self.computers = computers
        self._table = tier.table
        self._mover = tier.mover
        self._books = bookkeeping
        self._prefetcher = prefetcher
        self._early_router = early_router
        self._stream = stream
        self._streams_while_computing = streams_while_computing
        self._residents: dict[int, Residents | SlotResidents | None] = {}  # once all experts are

    def record(self, moe_layer_idx: int, routing: Routing) -> None:
        """What the router of a layer of this step chose."""
        self._books.note_routing(moe_layer_idx, routing)  # 1 record

    def run(
        self,
        ongoing: OngoingStep,
        routing: Routing,
        expert_idxs: Sequence[int],
        work: Work,
        go_on: Callable[[], None],
    ) -> None:
        """Do the work that these experts have in the layer that `ongoing` has just entered.
        `go_on` is called now and then and may raise. Raises CheckpointError if an expert cannot be
        read.
        """
        layer_idx = ongoing.moe_layer_idx
        phase = ongoing.step.phase
        counters = self._books.counters.of(phase)

        if self._prefetcher is not None:
            self._prefetcher.begin_layer(phase, self._books.counters)
        keys = self._books.keys[layer_idx]
        waiting: Sequence[ExpertKey] = [keys[expert_idx] for expert_idx in expert_idxs]
        self._books.note_lookups(waiting)

        may_prefetch = phase is Phase.DECODE
        most_at_once = len(waiting)
        if phase is Phase.PREFILL:
            num_rows = max(int(np.sum(routing.counts)), 1)
            most_at_once = max(len(waiting) * STOPPABLE_ROWS // num_rows, 1)
        while waiting:
            wave = self._table.next_wave(waiting, phase)
            with self._table.holding(wave, phase) as held:  # 2 look up
                if held.absent:
                    self._mover.load_now(held.absent, held.slot_ids)  # 3 load
                    self._books.note_loads(layer_idx, self._mover.num_read(held.absent))
                if may_prefetch:
                    self.prefetch(ongoing)  # 4 prefetch
                    may_prefetch = False
                is_last = len(wave) == len(waiting)
                if phase is Phase.PREFILL and is_last and self._streams_while_computing:
                    self._stream_next(layer_idx, len(routing.activated))
                for some in self._arrivals(wave, counters, most_at_once):
                    go_on()
                    if some:
                        self.computers[layer_idx].run(work, some, held.slot_ids)  # 5 compute
            # 6 release: leaving `holding`, from where on a slot may be given to another expert
            waiting = [key for key in waiting if key not in held.slot_ids]

        if phase is Phase.PREFILL:
            self._stream_next(layer_idx, len(routing.activated))

    def residents(self, moe_layer_idx: int) -> Residents | SlotResidents | None:
        """The experts of one layer, where they stay; None if not all experts of the model are in
        their slots, or this layer's are not computed by kernels as they are.
        """
        if self._table.num_resident < self._books.total_experts:
            self._residents.clear()
            return None
        if moe_layer_idx not in self._residents:
            slot_ids = self._table.slots_of(self._books.keys[moe_layer_idx])
            self._residents[moe_layer_idx] = self.computers[moe_layer_idx].residents(slot_ids)
        return self._residents[moe_layer_idx]

    def _arrivals(
        self, keys: Sequence[ExpertKey], counters: PhaseCounters, most: int
    ) -> Iterator[Sequence[ExpertKey]]:
        """The experts as they become RESIDENT, at most so many together."""
        for arrived in self._mover.arrivals(keys, counters):
            yield from (arrived[at : at + most] for at in range(0, len(arrived) or 1, most))

    def prefetch(self, ongoing: OngoingStep) -> None:
        """Begin loads for later layers, as many as the link can begin while this layer computes."""
        prefetcher = self._prefetcher
        layer_idx = ongoing.moe_layer_idx
        if prefetcher is None or not prefetcher.has_room():
            return
        router = self._early_router
        predictor = self._books.predictor
        if router is not None and predictor is not None and layer_idx != BEFORE_THE_FIRST:
            router.hint(layer_idx + 1, ongoing.step, predictor)
        for key in prefetcher.begin_loads(layer_idx):
            self._books.note_loads(key.moe_layer_idx, self._mover.num_read([key]))

    @property
    def is_prefetching(self) -> bool:
        return self._prefetcher is not None

    def begin_step(self) -> None:
        """A forward pass begins that the host decides."""
        if self._early_router is not None:
            self._early_router.begin_step()

    def begin_decode(self, ongoing: OngoingStep) -> None:
        """Before the first layer of a decode step: its experts may be predicted already."""
        if self._prefetcher is not None:
            self._prefetcher.begin_decode()
            self._prefetcher.begin_layer(ongoing.step.phase, self._books.counters)
            self.prefetch(ongoing)

    def _stream_next(self, layer_idx: int, num_activated: int) -> None:
        """In a layer of a long prompt: keep the link busy until the next one is routed."""
        keys = self._books.keys
        next_idx = layer_idx + 1
        is_long = num_activated >= STREAMED_SHARE * len(keys[layer_idx])
        if self._stream is not None and is_long and next_idx < len(keys):
            begun = self._stream(self._books.own_keys(next_idx))
            self._books.note_loads(next_idx, self._mover.num_read(begun))

    def recover(self) -> None:
        """After a layer that was cut short: release what it held, settle what it had begun."""
        self._residents.clear()
        self._table.recover()
        self._mover.recover()
