"""Decode steps that the device decides without asking the host.

    begin      apply the reports of the step before; upload what the device has to know
    compute    launch the kernels of every MoE layer: resolve, fill, slot_moe (slot_kernels.py)
    poll       apply the reports of the device, which does not wait for that (reports.py)

Host and device share one residency table: it is uploaded before the first step that the device
decides. The host decides steps of many tokens. Before such a step it takes all slots back, and the
table is uploaded again later.

If a step asks for an expert that is on disk only, the step stops at that MoE layer. The host loads
the layer's experts into HOST. It does so at once in a *checked* run, in which it looks after every
layer and so waits for the device; else the whole step needs replay, by a caller who has saved the
state of the cache (graphed_step.py).

Legend: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

import torch
from torch import Tensor

from moe_infinity.cuda.reports import ReportPoller
from moe_infinity.cuda.slot_kernels import MAX_PAIRS, SlotLayers
from moe_infinity.cuda.step_bookkeeping import StepBookkeeping
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase, Step
from moe_infinity.kernels.cuda.slot_mlp import SlotMlp
from moe_infinity.memory.device import SourceSlots

logger = logging.getLogger(__name__)


class StepState(Enum):
    """What DeviceSteps is doing.

        HOST_DECIDES, IDLE ──begin──> BEGUN ──running──> RUNNING, CHECKED ──> IDLE
                                                            │  ^
                                                            v  │
                                                         CAPTURING

    Any state but the first two is also what an interruption leaves behind: then slots may hold
    experts that the host does not know of, and `reset` empties them.
    """

    HOST_DECIDES = auto()  # the device does not know the residency table
    IDLE = auto()  # host and device agree on the residency table, when all reports are applied
    UPDATING = auto()  # tables or reports are being changed, between steps
    BEGUN = auto()  # a step has begun, and will run
    RUNNING = auto()  # the layers of a step are launched
    CHECKED = auto()  # the same, and the host looks after every layer
    CAPTURING = auto()  # launches are recorded into a graph, and do not run now


IN_A_STEP = {StepState.RUNNING, StepState.CHECKED, StepState.CAPTURING}


class DeviceSteps:
    """Used by one thread. For each step: begin(); if it returns True, running(), needs_replay()."""

    def __init__(
        self, bookkeeping: StepBookkeeping, mlps: Sequence[SlotMlp], *, is_required: bool
    ) -> None:
        """`mlps`: how kernels read the experts of each MoE layer. `is_required`: memory that cannot
        be page-locked is an error; else the host decides from then on.

        Raises ConfigError if HOST is too small for the experts of one MoE layer in one step.
        """
        self._bookkeeping = bookkeeping
        self._is_required = is_required
        self._has_warned = False
        device, self._host = bookkeeping.tiers
        num_experts = bookkeeping.recorder.num_experts
        least = min(MAX_PAIRS, num_experts)
        num_slots = self._host.slots.num_slots
        if num_slots < least:
            raise ConfigError(
                f"host_memory holds {num_slots} experts; kernels on a GPU need {least}, what one "
                "step may activate in a layer\n"
                "hint: raise host_memory, or use experts_implementation='auto'"
            )
        slots = device.slots
        self._residency = device.table
        self._mover = device.mover
        slots_SB = slots.tensor_of(0, slots.num_bytes).view(slots.num_slots, slots.slot_bytes)
        self.layers = SlotLayers(slots_SB, mlps, num_experts=num_experts)
        self.table = self.layers.table
        self._gpu = -1 if slots_SB.device.index is None else slots_SB.device.index  # -1: none
        self.top_k: dict[int, int] = {}  # of the MoE layers that have run
        self.poller = ReportPoller(bookkeeping, self.table)
        self._state = StepState.HOST_DECIDES

    @property
    def has_begun(self) -> bool:
        """Whether a step has begun that is still to run."""
        return self._state is StepState.BEGUN

    @property
    def is_running(self) -> bool:
        """Whether the MoE layers that are called belong to a step that the device decides."""
        return self._state in IN_A_STEP

    @property
    def needs_reset(self) -> bool:
        """Whether host and device may disagree: a step is under way, or was interrupted."""
        return self._state not in (StepState.HOST_DECIDES, StepState.IDLE)

    # Between steps

    def begin(self, step: Step) -> bool:
        """Begin a forward pass. Returns False if the host decides in it."""
        self.reset()
        num_pairs = step.num_tokens * max(self.top_k.values(), default=MAX_PAIRS + 1)
        if step.phase is not Phase.DECODE or num_pairs > MAX_PAIRS or not self._may_read_host():
            self._leave_to_host()
            return False
        is_uploaded = self._state is StepState.IDLE
        self.poller.finish_step()
        self._state = StepState.UPDATING
        self.poller.begin_step(step)
        if not is_uploaded:
            self._upload_residency()
        self._state = StepState.BEGUN
        return True

    def _may_read_host(self) -> bool:
        slots = self._host.slots
        assert isinstance(slots, SourceSlots), slots
        if self._is_required or not slots.is_refused:
            return True
        if not self._has_warned:
            logger.warning("the machine locks no more memory: the host decides in every step")
            self._has_warned = True
        return False

    def settle(self) -> bool:
        """Wait for the step under way and apply its reports. Returns False, and does nothing, if it
        was interrupted.
        """
        if self.needs_reset:
            return False
        state = self._state
        self.poller.finish_step()
        self._state = StepState.UPDATING
        self.poller.apply_rest()
        self._state = state
        return True

    def conclude(self) -> None:
        """Wait for the step under way and apply its reports, or reset if it was interrupted."""
        self.reset()
        self.settle()

    def _leave_to_host(self) -> None:
        """Wait, and let the host decide from now on."""
        if self._state is StepState.IDLE:
            self.settle()
            self._forget()

    def _forget(self) -> None:
        self.poller.drop_steps()
        self._state = StepState.HOST_DECIDES

    def reset(self) -> None:
        """If a step was interrupted, empty all slots: which ones it has filled is not known."""
        if self.needs_reset:
            self._state = StepState.UPDATING
            self._residency.recover()
            self._mover.recover()  # waits for copies and kernels
            self._residency.evict_all()
            self.poller.apply_rest(is_residency_known=False)
            self._bookkeeping.recorder.drop_incomplete_step()
            self._forget()

    def _upload_residency(self) -> None:
        if self._residency.num_loading or self._host.table.num_loading:
            self._mover.recover()
        self.table.upload_residency(self._residency.resident_slots())
        self._upload_host_addresses()

    def _upload_host_addresses(self) -> None:
        """Upload where experts lie in HOST. No kernel may be running that reads them."""
        table = self._host.table
        slots = self._host.slots
        assert isinstance(slots, SourceSlots), slots
        addresses: dict[ExpertKey, int] = {}
        for key in table.resident_keys():
            slot_id = table.slot_of(key)
            if not slots.is_locked(slot_id):
                raise ConfigError(
                    "kernels on a GPU read experts from page-locked memory, and this machine does "
                    "not lock as much\n"
                    "hint: lower host_memory, or use experts_implementation='auto'"
                )
            addresses[key] = slots.address_of(slot_id)
        self.table.set_all_host_addresses(addresses)

    # In a step

    @contextmanager
    def running(self, *, is_checked: bool) -> Iterator[None]:
        """Run the step that has begun, inside; again if it needs replay.

        A checked run waits for the device after every MoE layer, and does not need replay.
        """
        self._state = StepState.CHECKED if is_checked else StepState.RUNNING
        self.poller.begin_run()
        try:
            with torch.cuda.device(self._gpu):  # triton launches on the current one
                yield
        finally:
            if self.is_running:  # not if this frame is collected when all is over
                self._state = StepState.UPDATING
        self.table.end_step()
        self.poller.poll_reports()
        self._state = StepState.IDLE

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, what a run launches is recorded into a graph, and does not run."""
        self._state = StepState.CAPTURING
        try:
            yield
        finally:
            if self._state is StepState.CAPTURING:
                self._state = StepState.RUNNING

    @property
    def may_need_replay(self) -> bool:
        """Whether some expert is on disk only."""
        return len(self.table.host_addresses) < self._bookkeeping.total_experts

    def needs_replay(self) -> bool:
        """Whether the step that just ran asked for an expert on disk. Waits for it if it could."""
        if not self.may_need_replay:
            return False
        self._state = StepState.UPDATING
        needs_replay = self.poller.needs_replay()
        self._state = StepState.IDLE
        return needs_replay

    def compute(
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]: launch the routed experts of one MoE layer."""
        num_tokens, top_k = top_k_index_TK.shape
        is_captured = self._state is StepState.CAPTURING
        self.poller.note_launch(moe_layer_idx, (num_tokens, top_k), is_captured=is_captured)
        self.top_k[moe_layer_idx] = top_k
        load = None
        if self._state is StepState.CHECKED and self.may_need_replay:
            load = self._load_missing
        return self.layers.compute(moe_layer_idx, x_TD, top_k_index_TK, top_k_weights_TK, load)

    def _load_missing(self, moe_layer_idx: int, index_TK: Tensor) -> None:
        """Load the experts of the layer at which the step has stopped. The device waits."""
        self.poller.apply_launched()
        self.load_to_host(moe_layer_idx, index_TK)

    def load_to_host(self, moe_layer_idx: int, index_TK: Tensor) -> None:
        """Load these experts of a layer into HOST, unless they have a slot on the device."""
        chosen = set(index_TK.flatten().tolist())
        slot_E = self.table.slot_LE[moe_layer_idx].tolist()
        absent = [ExpertKey(moe_layer_idx, e) for e in sorted(chosen) if e >= 0 and slot_E[e] < 0]
        mover = self._host.mover
        with self._host.table.holding(absent, Phase.DECODE) as held:
            mover.load_now(held.absent, held.slot_ids)
            counters = self._bookkeeping.note_reads(moe_layer_idx, held.absent)
            for _ in mover.arrivals(absent, counters):
                pass  # waits until all are there
        self._upload_host_addresses()

    def check_invariants(self) -> None:
        """Assert that, with all reports applied, host and device agree on the residency table."""
        if self._state is StepState.IDLE:
            self.settle()
            self.table.check_invariants()
            assert self.table.resident_slots() == self._residency.resident_slots()
