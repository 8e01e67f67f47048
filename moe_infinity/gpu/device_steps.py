"""Decode steps that the device decides without asking the host.

    begin_step   apply the reports of the step before; upload what the device has to know
    run_layer    launch the kernels of every MoE layer: resolve, fill, compute_pairs, sum_pairs
    finish_step  wait for the step, and apply its reports

While a step runs, the host polls the device's reports, and the device does not wait for that
(reports.py).

The device decides once HOST holds all experts, page-locked: the engine fills it in the background
(engine/preloader.py). Until then, and wherever HOST is smaller, the host decides, and so it does in
steps of many tokens. Both compute with the same kernels, so no token depends on who decides.

Host and device share one residency table: it is uploaded before the first step that the device
decides. Before a step that the host decides it takes all slots back, and the table is uploaded
again later.

Legend: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

import torch
from torch import Tensor

from moe_infinity.engine.bookkeeping import Bookkeeping
from moe_infinity.engine.slots import PairWork
from moe_infinity.experts import Phase, Step
from moe_infinity.gpu.device_table import DeviceTable
from moe_infinity.gpu.kernels import Kernels
from moe_infinity.gpu.reports import ReportPoller, evict_all
from moe_infinity.kernels.triton.slot_mlp import SlotMlp
from moe_infinity.memory.device import DeviceSlots, SourceSlots
from moe_infinity.memory.slots import HostSlots

MAX_PAIRS = 512  # (token, k) of one MoE layer in one step


class StepState(Enum):
    """The state of DeviceSteps.

        HOST_DECIDES, IDLE ──begin──> BEGUN ──running──> RUNNING ──> IDLE
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
    CAPTURING = auto()  # launches are recorded into a graph, and do not run now


IN_A_STEP = {StepState.RUNNING, StepState.CAPTURING}


class DeviceSteps:
    """Used by one thread. For each step: begin_step(); if it returns True, running() and inside it
    run_layer() of every MoE layer; then finish_step().
    """

    def __init__(self, bookkeeping: Bookkeeping, mlps: Sequence[SlotMlp], kernels: Kernels) -> None:
        """`mlps`: how kernels read the experts of each MoE layer."""
        self._bookkeeping = bookkeeping
        self._mlps = mlps
        self.kernels = kernels
        device, self._host = bookkeeping.tiers
        slots = device.slots
        assert isinstance(slots, DeviceSlots), slots
        self._residency = device.table
        self._mover = device.mover
        slots_SB = slots.tensor_of(0, slots.num_bytes).view(slots.num_slots, slots.slot_bytes)
        self.table = DeviceTable(
            slots_SB,
            num_layers=len(mlps),
            num_experts=bookkeeping.recorder.num_experts,
            max_pairs=MAX_PAIRS,
        )
        self._gpu = -1 if slots_SB.device.index is None else slots_SB.device.index  # -1: none
        self.top_k: dict[int, int] = {}  # of the MoE layers that have run
        self.poller = ReportPoller(bookkeeping, self.table)
        self._state = StepState.HOST_DECIDES

    @property
    def has_begun(self) -> bool:
        """True if a step has begun that is still to run."""
        return self._state is StepState.BEGUN

    @property
    def is_running(self) -> bool:
        """True if the MoE layers that are called belong to a step that the device decides."""
        return self._state in IN_A_STEP

    @property
    def needs_reset(self) -> bool:
        """True if host and device may disagree: a step is under way, or was interrupted."""
        return self._state not in (StepState.HOST_DECIDES, StepState.IDLE)

    # Between steps

    def begin_step(self, step: Step) -> bool:
        """Begin a forward pass. Returns False if the host decides in it."""
        num_pairs = step.num_tokens * max(self.top_k.values(), default=MAX_PAIRS + 1)
        if step.phase is not Phase.DECODE or num_pairs > MAX_PAIRS or not self._may_decide():
            self.leave_to_host()
            return False
        self.reset()
        is_uploaded = self._state is StepState.IDLE
        self.poller.finish_step()
        self._state = StepState.UPDATING
        self.poller.begin_step(step)
        if not is_uploaded:
            self._upload_residency()
        self._state = StepState.BEGUN
        return True

    def _may_decide(self) -> bool:
        """True once HOST has all experts in page-locked memory, where the device can read them."""
        slots = self._host.slots
        assert isinstance(slots, SourceSlots), slots
        is_complete = self._host.table.num_resident == self._bookkeeping.total_experts
        return is_complete and not slots.is_refused

    def finish_step(self) -> bool:
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
        self.finish_step()

    def leave_to_host(self) -> None:
        """Wait, and let the host decide from now on."""
        self.reset()
        if self._state is StepState.IDLE:
            self.finish_step()
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
            evict_all(self._residency)
            self.poller.apply_rest(is_residency_known=False)
            self._bookkeeping.recorder.drop_incomplete_step()
            self._forget()

    def _upload_residency(self) -> None:
        if self._residency.num_loading:
            self._mover.recover()
        host = self._host
        assert isinstance(host.slots, HostSlots), host
        addresses = {
            key: host.slots.address_of(host.table.slot_of(key))
            for key in host.table.resident_keys()
        }
        self.table.upload_residency(self._residency.resident_slots(), addresses)

    # In a step

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the step that has begun, inside."""
        self._state = StepState.RUNNING
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

    def run_layer(
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]: launch the routed experts of one MoE layer."""
        is_captured = self._state is StepState.CAPTURING
        num_tokens, top_k = top_k_index_TK.shape
        self.poller.note_launch(moe_layer_idx, (num_tokens, top_k), is_captured=is_captured)
        self.top_k[moe_layer_idx] = top_k
        return self._compute(moe_layer_idx, x_TD, top_k_index_TK.contiguous(), top_k_weights_TK)

    def _compute(
        self, moe_layer_idx: int, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        kernels = self.kernels
        pointers_E = kernels.resolve(self.table, moe_layer_idx, index_TK)
        kernels.fill(self.table, index_TK.numel())
        work = PairWork(kernels.pairs, self._mlps[moe_layer_idx], x_TD, index_TK, weights_TK)
        work.compute(pointers_E)
        return work.sum()

    def check_invariants(self) -> None:
        """Assert that, with all reports applied, host and device agree on the residency table."""
        if self._state is StepState.IDLE:
            self.finish_step()
            self.table.check_invariants()
            assert self.table.resident_slots() == self._residency.resident_slots()
