"""The work of one MoE layer in one step. This is the architecture:

    1 record     what the router chose                      engine/bookkeeping.py
    2 look up    the activated experts, and hold them       cache/residency.py
    3 load       those that are absent                      memory/mover.py, memory/device_mover.py
    4 prefetch   what later layers will need                predict/planner.py
    5 compute    the residents, then the others             engine/compute.py
    6 release    the held experts

A decode step prefetches by prediction. A prompt does not: it streams the next layer's experts in
file order, and it can be cancelled between two groups of experts.

If a layer activates more experts than there are slots, steps 2 to 6 are repeated in waves. The sum
over experts has a fixed order, so a result depends neither on the budget nor on the policy nor on
which expert arrives first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.architectures.prompt_blocks import PromptBlock
from moe_infinity.cache.residency import Held
from moe_infinity.engine.bookkeeping import Bookkeeping
from moe_infinity.engine.compute import LayerComputer, Work
from moe_infinity.experts import ExpertKey, Phase, Routing, Step
from moe_infinity.kernels.residents import Residents
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.predict.planner import Prefetcher

# A prompt that activates this share of a layer's experts is taken to need all of the next layer's.
STREAMED_SHARE = 0.75
# On a CPU a prompt checks for cancellation about every so many expert rows: every 0.05 to 0.2 s on
# two idle cores, with experts of 9 MB in bf16. At the end of fewer rows a core waits for the other:
# with 512 a prompt of 2,000 tokens took 50 s, not 44. A GPU computes a layer in less.
STOPPABLE_ROWS = 2048
BEFORE_THE_FIRST = -1  # in place of the index of an MoE layer


class OngoingStep(NamedTuple):
    """How far the engine has come in the current forward pass."""

    step: Step
    moe_layer_idx: int = BEFORE_THE_FIRST  # the last one that was entered
    is_unfinished: bool = False  # True while a layer runs, and if an error or Ctrl-C cut it short
    block: PromptBlock | None = None  # of the prompt, that the layer computes; None: the whole pass


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
        # Begins to load experts that a long prompt will need next and returns those that it began.
        # None: they are loaded when their layer asks for them.
        stream: Callable[[Sequence[ExpertKey]], Sequence[ExpertKey]] | None,
        is_on_cpu: bool,  # it streams while a layer computes, not only afterwards
    ) -> None:
        self.computers = computers
        self._table = tier.table
        self._mover = tier.mover
        self._books = bookkeeping
        self._prefetcher = prefetcher
        self._early_router = early_router
        self._stream = stream
        self._is_on_cpu = is_on_cpu
        # Copies to a GPU wait in one queue: what comes later would hold up what is waited for.
        self._streams_within_a_layer = is_on_cpu and stream is not None
        self._residents: dict[int, Residents | None] = {}  # filled once all experts have slots

    def run_layer(
        self,
        ongoing: OngoingStep,
        routing: Routing,
        expert_idxs: Sequence[int],
        work: Work,
        stop_if_cancelled: Callable[[], None],
    ) -> None:
        """Do the work that these experts have in the layer that `ongoing` has just entered.
        Usually they are all that the routing activates. Raises CheckpointError if an expert cannot
        be read, and what `stop_if_cancelled` raises.
        """
        block = None if ongoing.block is None else ongoing.block.tokens
        self._books.note_routing(ongoing.moe_layer_idx, routing, block)  # 1 record
        self.run_recorded_layer(ongoing, routing, expert_idxs, work, stop_if_cancelled)

    def run_recorded_layer(
        self,
        ongoing: OngoingStep,
        routing: Routing,
        expert_idxs: Sequence[int],
        work: Work,
        stop_if_cancelled: Callable[[], None],
    ) -> None:
        """Do the same for a layer whose routing is recorded already."""
        if ongoing.step.phase is Phase.DECODE:
            self._decode_layer(ongoing, expert_idxs, work)
        else:
            self._prefill_layer(ongoing, routing, expert_idxs, work, stop_if_cancelled)

    def _decode_layer(self, ongoing: OngoingStep, expert_idxs: Sequence[int], work: Work) -> None:
        """Steps 2 to 6 for one token of each sequence."""
        layer_idx = ongoing.moe_layer_idx
        counters = self._books.counters.decode
        waiting = self._begin_lookups(layer_idx, expert_idxs, Phase.DECODE)
        is_first_wave = True
        while waiting:
            wave = self._table.next_wave(waiting, Phase.DECODE)
            with self._table.holding(wave, Phase.DECODE) as held:  # 2 look up
                self._load_absent(layer_idx, held)  # 3 load
                if is_first_wave:
                    self.prefetch(ongoing)  # 4 prefetch
                for arrived in self._mover.arrivals(wave, counters):
                    if arrived:
                        self.computers[layer_idx].compute(work, arrived, held.slot_ids)  # 5 compute
            # 6 release: leaving `holding`, from where on a slot may be given to another expert
            waiting = [key for key in waiting if key not in held.slot_ids]
            is_first_wave = False

    def _prefill_layer(
        self,
        ongoing: OngoingStep,
        routing: Routing,
        expert_idxs: Sequence[int],
        work: Work,
        stop_if_cancelled: Callable[[], None],
    ) -> None:
        """Steps 2 to 6 for all tokens of a prompt. Streaming takes the place of step 4."""
        layer_idx = ongoing.moe_layer_idx
        waiting = self._begin_lookups(layer_idx, expert_idxs, Phase.PREFILL)
        group_size = max(len(waiting), 1)
        if self._is_on_cpu:
            num_rows = max(int(np.sum(routing.counts)), 1)
            group_size = max(len(waiting) * STOPPABLE_ROWS // num_rows, 1)
        while waiting:
            wave = self._table.next_wave(waiting, Phase.PREFILL)
            streams_rest = len(wave) < len(waiting) and self._streams_within_a_layer
            if streams_rest:
                wave = self._with_half_of_the_absent(wave)
            with self._table.holding(wave, Phase.PREFILL) as held:  # 2 look up
                self._load_absent(layer_idx, held)  # 3 load
                if streams_rest:
                    self._begin_stream(layer_idx, [k for k in waiting if k not in held.slot_ids])
                elif len(wave) == len(waiting) and self._is_on_cpu:
                    self._stream_next(ongoing, len(routing.activated))
                for group in self._arriving_groups(wave, group_size):
                    stop_if_cancelled()
                    if group:
                        self.computers[layer_idx].compute(work, group, held.slot_ids)  # 5 compute
            # 6 release, as in a decode step
            waiting = [key for key in waiting if key not in held.slot_ids]
        self._stream_next(ongoing, len(routing.activated))

    def _begin_lookups(
        self, layer_idx: int, expert_idxs: Sequence[int], phase: Phase
    ) -> Sequence[ExpertKey]:
        """Count a layer's lookups before anything is loaded for it. The prefetcher measures the
        time between two of these calls.
        """
        if self._prefetcher is not None:
            self._prefetcher.begin_layer(phase, self._books.counters)
        keys = [self._books.keys[layer_idx][expert_idx] for expert_idx in expert_idxs]
        self._books.note_lookups(keys)
        return keys

    def _load_absent(self, layer_idx: int, held: Held) -> None:
        if held.absent:
            self._mover.load_now(held.absent, held.slot_ids)
            self._books.note_loads(layer_idx, self._mover.num_read(held.absent))

    def _arriving_groups(
        self, keys: Sequence[ExpertKey], group_size: int
    ) -> Iterator[Sequence[ExpertKey]]:
        """Yield the experts of a prompt as they become RESIDENT, at most `group_size` at a time; an
        empty group now and then while nothing arrives.
        """
        for arrived in self._mover.arrivals(keys, self._books.counters.prefill):
            for start in range(0, len(arrived) or 1, group_size):
                yield arrived[start : start + group_size]

    def residents(self, moe_layer_idx: int) -> Residents | None:
        """The experts of one layer at their fixed addresses. None if not all experts of the model
        are in their slots, or if no kernel computes this layer's experts in place.
        """
        if self._table.num_resident < self._books.total_experts:
            self._residents.clear()
            return None
        if moe_layer_idx not in self._residents:
            slot_ids = self._table.slots_of(self._books.keys[moe_layer_idx])
            self._residents[moe_layer_idx] = self.computers[moe_layer_idx].residents(slot_ids)
        return self._residents[moe_layer_idx]

    def prefetch(self, ongoing: OngoingStep) -> None:
        """Begin loads for later layers, as many as the disk (or the link to the GPU) can begin
        while this layer computes. The early router may give the predictor a hint.
        """
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
        """True if predictions may begin loads."""
        return self._prefetcher is not None

    def begin_step(self) -> None:
        """Begin a forward pass."""
        if self._early_router is not None:
            self._early_router.begin_step()

    def begin_decode(self, ongoing: OngoingStep) -> None:
        """Prefetch before the first layer of a decode step, whose experts may be predicted."""
        if self._prefetcher is not None:
            self._prefetcher.begin_decode()
            self._prefetcher.begin_layer(ongoing.step.phase, self._books.counters)
            self.prefetch(ongoing)

    def _stream_next(self, ongoing: OngoingStep, num_activated: int) -> None:
        """In a layer of a long prompt, keep the link busy until the next layer is routed. Until the
        last block the experts of this layer are needed again.
        """
        keys = self._books.keys
        next_idx = ongoing.moe_layer_idx + 1
        is_long = num_activated >= STREAMED_SHARE * len(keys[ongoing.moe_layer_idx])
        is_last = ongoing.block is None or ongoing.block.is_last
        if is_long and is_last and next_idx < len(keys):
            self._begin_stream(next_idx, self._books.local_keys(next_idx))

    def _with_half_of_the_absent(self, wave: Sequence[ExpertKey]) -> Sequence[ExpertKey]:
        """Leave room for the wave after this one, which is loaded while this one is computed."""
        num_absent = sum(self._table.lookup(key) is None for key in wave)
        return wave[: len(wave) - num_absent // 2]

    def _begin_stream(self, layer_idx: int, keys: Sequence[ExpertKey]) -> None:
        """Begin to load experts of a layer, as many as have room, while others compute."""
        if self._stream is not None:
            begun = self._stream(keys)
            self._books.note_loads(layer_idx, self._mover.num_read(begun))

    def recover(self) -> None:
        """Recover from a layer that was cut short: release what it held, settle what it began."""
        self._residents.clear()
        self._table.recover()
        self._mover.recover()
