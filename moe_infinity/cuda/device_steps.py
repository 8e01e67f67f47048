"""Decode steps that the device decides alone.

    begin     what the device told of the step before is taken out
    compute   of every row: resolve, fill, slot_moe (cuda/slot_kernels.py), only launched here
    then      the host follows the device, which does not wait for it (reports.py)

Both ways of a step share one residency table. Steps of many tokens are the host's: it takes all
slots back (`leave`) until the next `begin`.

An expert that only the disk has loses the step at its row. Then the host brings the row's experts
to HOST: at once, if it looks after every row (`is_careful`, which waits for the device), or when
the whole step is run again by who kept its cache (cuda/graphed_step.py).

Legend: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_infinity.cuda.reports import Follower
from moe_infinity.cuda.slot_kernels import MAX_PAIRS, SlotRows
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase
from moe_infinity.kernels.cuda.slot_mlp import SlotMlp
from moe_infinity.memory.device import SourceSlots
from moe_infinity.predict.recorder import Step

if TYPE_CHECKING:
    from moe_infinity.engine.bookkeeping import Bookkeeping as ExpertRuntime

logger = logging.getLogger(__name__)


class DeviceSteps:
    """Used by one thread, between `begin` and the next `begin` or `leave`."""

    def __init__(self, runtime: ExpertRuntime, mlps: Sequence[SlotMlp]) -> None:
        """Raises ConfigError for a HOST too small for the experts of one row in one step."""
        self._runtime = runtime
        (device, self._host), num_experts = runtime.tiers, runtime.recorder.num_experts
        least, num_slots = min(MAX_PAIRS, num_experts), self._host.slots.num_slots
        if num_slots < least:
            raise ConfigError(
                f"host_memory holds {num_slots} experts; experts_implementation='fast' on a GPU "
                f"needs {least}, what one step may activate in a layer\n"
                "hint: raise host_memory, or use experts_implementation='auto'"
            )
        slots, self._residency, self._mover = device.slots, device.table, device.mover
        slots_SB = slots.tensor_of(0, slots.num_bytes).view(slots.num_slots, slots.slot_bytes)
        self._rows = SlotRows(slots_SB, mlps, num_experts=num_experts)
        self._table = self._rows.table
        self._gpu = -1 if slots_SB.device.index is None else slots_SB.device.index  # -1: none
        self.top_k: dict[int, int] = {}  # of the rows that have run
        self.follower = Follower(runtime, self._table)
        self.has_begun = False  # a step, which is still to run
        self.is_running = False
        self.is_captured = False  # what is launched does not run yet
        self._is_careful = False
        self.is_broken = False  # set while the tables may disagree
        self._is_told = False  # the device knows what the residency table knows

    # Between steps

    def begin(self, step: Step) -> bool:
        """A forward pass begins; False if the host decides in it."""
        self.mend()
        num_pairs = step.num_tokens * max(self.top_k.values(), default=MAX_PAIRS + 1)
        if step.phase is not Phase.DECODE or num_pairs > MAX_PAIRS:
            self.leave()
            return False
        self.follower.retire()
        self.is_broken = True
        self.follower.begin(step)
        if not self._is_told:
            self._tell_everything()
        self.has_begun = True
        return True

    def settle(self) -> bool:
        """Wait for the step under way, and let everybody know of it; but not if it was
        interrupted.
        """
        if self.is_broken:
            return False
        self.follower.retire()
        self.is_broken = True
        self.follower.hear_rest()
        self.is_broken = False
        return True

    def conclude(self) -> None:
        """The same, and make order if it was."""
        self.mend()
        self.settle()

    def leave(self) -> None:
        """Wait, and take back all slots: from now on the host decides."""
        self.has_begun = False
        if self._is_told:
            self.settle()
            self._forget()

    def _forget(self) -> None:
        self.follower.forget()
        self._is_told = self.is_broken = False

    def mend(self) -> None:
        """If a step was interrupted: which slots it had filled nobody knows."""
        if self.is_broken:
            self.is_running = self.is_captured = False
            self._residency.recover()
            self._mover.recover()  # waits for copies and kernels
            self._residency.evict_all()
            self.follower.hear_rest(is_adopted=False)
            self._runtime.recorder.leave_step()
            self._forget()

    def _tell_everything(self) -> None:
        if self._residency.num_loading or self._host.table.num_loading:
            self._mover.recover()
        self._table.tell(self._residency.resident_slots())
        self._tell_addresses()
        self._is_told = True

    def _tell_addresses(self) -> None:
        """Where experts lie in HOST. No kernel runs that reads them."""
        table, slots, found = self._host.table, self._host.slots, {}
        assert isinstance(slots, SourceSlots), slots
        for key in table.resident_keys():
            slot_id = table.slot_of(key)
            if not slots.is_locked(slot_id):
                raise ConfigError(
                    "experts_implementation='fast' on a GPU reads experts from page-locked memory, "
                    "and this machine does not lock as much\n"
                    "hint: lower host_memory, or use experts_implementation='auto'"
                )
            found[key] = slots.address_of(slot_id)
        self._table.set_all_host_addresses(found)

    # In a step

    @contextmanager
    def running(self, *, is_careful: bool) -> Iterator[None]:
        """What was begun runs inside, and may run again if it is lost. Careful: cannot be lost."""
        self.is_broken, self._is_careful, self.is_running = True, is_careful, True
        self.follower.begin_run()
        try:
            with torch.cuda.device(self._gpu):  # triton launches on the current one
                yield
        finally:
            self.is_running = False
        self._table.end_step()
        self.follower.follow()
        self.is_broken = False

    @property
    def can_lose(self) -> bool:
        """Whether some expert is on disk only."""
        return len(self._table.host_addresses) < self._runtime.total_experts

    def is_lost(self) -> bool:
        """Whether the step that just ran came to an expert on disk. Waits for it if one could."""
        if not self.can_lose:
            return False
        self.is_broken = True
        is_lost = self.follower.is_lost()
        self.is_broken = False
        return is_lost

    def compute(
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]: the routed experts of one layer."""
        num_tokens, top_k = top_k_index_TK.shape
        self.follower.note_launch(moe_layer_idx, (num_tokens, top_k), is_captured=self.is_captured)
        self.top_k[moe_layer_idx] = top_k
        bring = self._bring_lost if self._is_careful and self.can_lose else None
        return self._rows.compute(moe_layer_idx, x_TD, top_k_index_TK, top_k_weights_TK, bring)

    def _bring_lost(self, moe_layer_idx: int, index_TK: Tensor) -> None:
        """For the row that the step was just lost at. The device waits for us."""
        self.follower.hear_up_to_loss()
        self._bring(moe_layer_idx, index_TK)

    def _bring(self, moe_layer_idx: int, index_TK: Tensor) -> None:
        """Experts of this row to HOST, unless they have a slot."""
        chosen, slot_E = (
            set(index_TK.flatten().tolist()),
            self._table.slot_LE[moe_layer_idx].tolist(),
        )
        absent = [ExpertKey(moe_layer_idx, e) for e in sorted(chosen) if e >= 0 and slot_E[e] < 0]
        mover = self._host.mover
        with self._host.table.holding(absent, Phase.DECODE) as held:
            mover.load_now(held.absent, held.slot_ids)
            for _ in mover.arrivals(absent, self._runtime.note_reads(moe_layer_idx, held.absent)):
                """Until all are there."""
        self._tell_addresses()

    def check_invariants(self) -> None:
        """The device knows what the residency table says, when all reports were read."""
        if self._is_told and not self.is_broken:
            self.settle()
            self._table.check_invariants()
            assert self._table.resident_slots() == self._residency.resident_slots()
