"""Decode steps that the device decides alone, and how the host keeps in step.

    begin     the report of the step before is read
    compute   of every row: resolve, fill, slot_moe (kernels/slot_kernels.py), only launched here
    then      a report is asked for. While the device works, the host does the bookkeeping of the
              step *before* (what it took is in our table, too), and scores who may leave next

So policies hear of a step when the next one is under way, and nobody waits for them: the device
evicts by scores that are one step old. Both ways of a step share one residency table. Steps of many
tokens are the host's: it takes all slots back (`leave`) until the next `begin`.

An expert that only the disk has loses the step at its row. Then the host brings the row's experts
to HOST: at once, if it looks after every row (`is_careful`, which waits for the device), or when
the whole step is run again by who kept its cache (kernels/graphed_step.py).

Legend: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase
from moe_infinity.kernels.device_table import Miss, StepReport
from moe_infinity.kernels.graphed_step import GraphedStep
from moe_infinity.kernels.slot_kernels import MAX_PAIRS, SlotRows
from moe_infinity.kernels.slot_mlp import SlotMlp
from moe_infinity.memory.device import SourceSlots
from moe_infinity.models.computing import slot_row
from moe_infinity.models.planning import Plan
from moe_infinity.trace.recorder import Step

if TYPE_CHECKING:
    from moe_infinity.runtime import ExpertRuntime

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
        self.has_begun = False  # a step, which is still to run
        self.is_running = False
        self._is_careful = False
        self._is_broken = False  # set while the tables may disagree
        self._is_told = False  # the device knows what the residency table knows
        self._step: Step | None = None
        self._unread: Step | None = None  # whose report was asked for
        self._missed: list[Miss] = []
        # Of which nobody has heard yet; with all it missed, if it was run again.
        self._decided: tuple[Step, StepReport, list[Miss]] | None = None

    # Between steps

    def begin(self, step: Step) -> bool:
        """A forward pass begins; False if the host decides in it."""
        if self._is_broken:
            self._recover()
        num_pairs = step.num_tokens * max(self.top_k.values(), default=MAX_PAIRS + 1)
        if step.phase is not Phase.DECODE or num_pairs > MAX_PAIRS:
            self.leave()
            return False
        self._take_report()
        self._is_broken = True
        if not self._is_told:
            self._tell_everything()
        self._missed, self._step, self.has_begun = [], step, True
        return True

    def settle(self) -> None:
        """Wait for the step under way, and let everybody know of it."""
        if not self._is_broken:
            self._take_report()
            self._is_broken = True
            self._note_decided()
            self._is_broken = False

    def leave(self) -> None:
        """Wait, and take back all slots: from now on the host decides."""
        self.has_begun = False
        if self._is_told:
            self.settle()
            self._forget()

    def _forget(self) -> None:
        self._unread = self._decided = None
        self._is_told = self._is_broken = False

    def _recover(self) -> None:
        """After a step was interrupted: which slots it had filled nobody knows."""
        self.is_running = False
        self._residency.recover()
        self._mover.recover()  # waits for copies and kernels
        self._note_decided()  # of the step before, whose token was given
        self._residency.evict_all()
        self._forget()

    def _tell_everything(self) -> None:
        if self._residency.num_loading or self._host.table.num_loading:
            self._mover.recover()
        self._table.tell(self._residency.resident_slots())
        self._tell_addresses()
        self._offer()
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

    def _offer(self) -> None:
        """Say who may leave, if it comes to that."""
        if self._residency.num_slots < self._runtime.total_experts:
            rows = self._table.last_rows
            self._table.offer(np.stack([self._residency.leaving_scores(row) for row in rows]))

    def _take_report(self) -> None:
        """Of the last step, if it was not read yet. The device had finished with it when the
        caller read the token it gave: so nobody waits here.
        """
        if self._unread is None:
            return
        self._is_broken = True
        report = self._table.finish_read()
        assert report.lost_row is None or self.can_lose, report.lost_row
        self._missed += report.misses
        step, self._unread = self._unread, None
        if report.lost_row is None:
            self._decided, self._missed = (step, report, self._missed), []
        self._is_broken = False

    def _note_decided(self) -> None:
        if self._decided is None:
            return
        (step, report, misses), self._decided = self._decided, None
        for key, slot_id in misses:
            if slot_id >= 0:
                self._residency.adopt(key, slot_id)
        routing = {
            row: index_TK
            for row, top_k in sorted(self.top_k.items())
            if (index_TK := report.routing(row, step.num_tokens, top_k)) is not None
        }
        self._runtime.note_step(step, routing, {miss.key for miss in misses})

    # In a step

    @contextmanager
    def running(self, *, is_careful: bool) -> Iterator[None]:
        """What was begun runs inside, and may run again if it is lost. Careful: cannot be lost."""
        self._is_broken, self._is_careful, self.is_running = True, is_careful, True
        try:
            with torch.cuda.device(self._gpu):  # triton launches on the current one
                yield
        finally:
            self.is_running = False
        self._table.begin_read()
        self._unread = self._step
        self._note_decided()
        self._offer()
        self._is_broken = False

    @property
    def can_lose(self) -> bool:
        """Whether some expert is on disk only."""
        return len(self._table.host_addresses) < self._runtime.total_experts

    def is_lost(self) -> bool:
        """Whether the step that just ran came to an expert on disk. Waits for it if one could."""
        if not self.can_lose:
            return False
        self._take_report()
        return self._decided is None

    def compute(
        self, moe_row: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]: the routed experts of one layer."""
        self.top_k[moe_row] = top_k_index_TK.shape[1]
        bring = self._bring if self._is_careful and self.can_lose else None
        return self._rows.compute(moe_row, x_TD, top_k_index_TK, top_k_weights_TK, bring)

    def _bring(self, moe_row: int, index_TK: Tensor) -> None:
        """Experts of this row to HOST, unless they have a slot. The device waits for us."""
        chosen, slot_E = set(index_TK.flatten().tolist()), self._table.slot_LE[moe_row].tolist()
        absent = [ExpertKey(moe_row, e) for e in sorted(chosen) if e >= 0 and slot_E[e] < 0]
        mover = self._host.mover
        with self._host.table.holding(absent, Phase.DECODE) as held:
            mover.load_now(held.absent, held.slot_ids)
            for _ in mover.arrivals(absent, self._runtime.note_reads(moe_row, held.absent)):
                """Until all are there."""
        self._tell_addresses()

    def check_invariants(self) -> None:
        """The device knows what the residency table says, when all reports were read."""
        if self._is_told and not self._is_broken:
            self.settle()
            self._table.check_invariants()
            assert self._table.resident_slots() == self._residency.resident_slots()


def let_device_decide(
    model: PreTrainedModel, plan: Plan, runtime: ExpertRuntime, config: OffloadConfig
) -> GraphedStep | None:
    """Steps of few tokens, if it can; else None. Raises ConfigError."""
    if config.experts_implementation != "fast" or len(runtime.tiers) == 1:
        return None
    mlps = [slot_row(*pair) for pair in zip(plan.rows, plan.recipes, strict=True)]
    known = [mlp for mlp in mlps if mlp is not None]
    reasons = {
        "prefetch": config.prefetch,
        "split_misses": config.split_misses,
        "several devices": len(config.devices) > 1,
        "an encoder": model.config.is_encoder_decoder,
        "experts that no kernel of ours reads": len(known) < len(mlps),
    }
    if any(reasons.values()):
        found = " and ".join(reason for reason, is_so in reasons.items() if is_so)
        logger.warning("with %s the host decides in every step, without CUDA graphs", found)
        return None
    runtime.device_steps = DeviceSteps(runtime, known)
    runtime.experts += ", steps of few tokens by the device alone"
    return GraphedStep(model, runtime.device_steps)
