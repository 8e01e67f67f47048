"""Decode steps that the device decides alone, and how the host keeps in step.

    begin     the report of the step before is read: what it took is in our table, too
    compute   of every row: resolve, fill, slot_moe (kernels/slot_kernels.py), only launched here
    end       a report is asked for. While the device works, the host does the bookkeeping of the
              step *before*, and evicts; the slots are the device's from the next step on

So policies hear of a step when the next one is under way: nobody waits for them, and slots are
evicted ahead of the misses that will take them. Both ways of a step share one residency table.
Steps of many tokens are the host's: it takes all slots back (`leave`) until the next `begin`.

An expert that only the disk has loses the step at its row. Then the host brings the row's experts
to HOST: at once, if it looks after every row (`is_careful`, which waits for the device), or when
the whole step is run again by who could rewind it (models/graphed_step.py).

Legend: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase, Residency
from moe_infinity.kernels.device_table import DeviceTable
from moe_infinity.kernels.slot_kernels import slot_kernels
from moe_infinity.kernels.slot_mlp import SlotMlp
from moe_infinity.memory.device import DeviceSlots, SourceSlots
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.models.computing import slot_row
from moe_infinity.models.planning import Plan
from moe_infinity.trace.recorder import Step

logger = logging.getLogger(__name__)

MAX_PAIRS = 64  # (token, k) of one row in one step; more are the host's
# Slots kept free: for the misses of two steps, at most an eighth of all. Conventions, not
# measurements.
RESERVED_STEPS, RESERVE_SHARE = 2, 8
FORGETS = 0.9  # of the highest number of misses lately, in each step


class DecidedStep(NamedTuple):
    """A step that the device decided."""

    step: Step
    routing: list[NDArray[np.int64]]  # [T, K] of each row
    missed: set[ExpertKey]


class DeviceSteps:
    """Used by one thread, between `begin` and the next `begin` or `leave`."""

    def __init__(
        self,
        tiers: Sequence[SlotTier],
        mlps: Sequence[SlotMlp],
        *,
        num_experts: int,  # of a row
        total_experts: int,
        note_step: Callable[[DecidedStep], None],
        note_reads: Callable[[int, int], PhaseCounters],  # row, experts: whose waiting it is
    ) -> None:
        self._device, self._host = tiers
        slots, self._host_slots = self._device.slots, self._host.slots
        assert isinstance(slots, DeviceSlots), slots
        self._link = slots.link
        self._mlps = mlps
        self._kernels = slot_kernels(slots.device)
        self._total_experts = total_experts
        self._note_step, self._note_reads = note_step, note_reads
        self._table = DeviceTable(
            slots.tensor_of(0, slots.num_bytes).view(slots.num_slots, slots.slot_bytes),
            num_rows=len(mlps),
            num_experts=num_experts,
            max_pairs=MAX_PAIRS,
            max_misses=2 * len(mlps) * min(MAX_PAIRS, num_experts),  # a row may be resolved twice
        )
        self.top_k: dict[int, int] = {}  # by row, once a prompt was routed
        self.has_begun = False  # a step, which is still to run
        self.is_running = False
        self._is_careful = False
        self._is_broken = False  # set while the tables may disagree
        self._is_told = False  # the device knows what the residency table knows
        self._addresses: dict[ExpertKey, int] = {}  # that the device was told
        self._step: Step | None = None
        self._unread: Step | None = None  # whose report was asked for
        self._decided: DecidedStep | None = None  # of which nobody has heard yet
        self._missed: set[ExpertKey] = set()
        self._is_lost = False
        self._misses_lately = 0.0

    # Between steps

    def begin(self, step: Step) -> bool:
        """A forward pass begins; False if the host decides in it."""
        if self._is_broken:
            self._recover()
        if not self._takes(step):
            self.leave()
            return False
        self._take_report()
        self._is_broken = True
        if not self._is_told:
            self._tell_everything()
        self._missed, self._step, self.has_begun = set(), step, True
        return True

    def _takes(self, step: Step) -> bool:
        if step.phase is not Phase.DECODE or len(self.top_k) < len(self._mlps):
            return False
        return step.num_tokens * max(self.top_k.values()) <= MAX_PAIRS

    def settle(self) -> None:
        """Wait for the step under way, and let everybody know of it."""
        if not self._is_broken:
            self._take_report()
            self._note_decided()

    def leave(self) -> None:
        """Wait, and take back all slots: from now on the host decides."""
        self.has_begun = False
        if self._is_told:
            self.settle()
            self._forget()

    def _forget(self) -> None:
        self._is_broken, self._is_told = True, False
        self._table.reset()
        self._addresses = {}
        self._unread = self._decided = None
        self._is_broken = False

    def _recover(self) -> None:
        """After a step was interrupted: what it took counts for nothing."""
        self._device.table.recover()
        self._device.mover.recover()  # waits for copies and kernels
        self.has_begun = self.is_running = False
        self._forget()

    def _tell_everything(self) -> None:
        residency = self._device.table
        if residency.num_loading or self._host.table.num_loading:
            self._device.mover.recover()
        self._table.place({key: residency.slot_of(key) for key in residency.resident_keys()})
        self._table.free(residency.free_slots())
        self._tell_addresses()
        self._refill()
        self._is_told = True

    def _tell_addresses(self) -> None:
        """Where experts lie in HOST. No kernel runs that reads them."""
        table, slots, found = self._host.table, self._host_slots, {}
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
        changed = dict.fromkeys(self._addresses.keys() - found.keys(), 0)
        changed |= {key: at for key, at in found.items() if self._addresses.get(key) != at}
        if changed:
            self._table.set_host_addresses(changed)
        self._addresses = found

    def _refill(self) -> None:
        """Evict, so that misses find slots."""
        residency = self._device.table
        wanted = math.ceil(RESERVED_STEPS * self._misses_lately)
        wanted = max(1, min(wanted, residency.num_slots // RESERVE_SHARE))
        num_absent = self._total_experts - len(residency)
        victims = residency.free_up(min(wanted, num_absent))
        if victims:
            self._table.free(self._table.withdraw(victims))

    def _take_report(self) -> None:
        """Of the last step, if it was not read yet. The device had finished with it when the
        caller read the token it gave: so nobody waits here.
        """
        if self._unread is None:
            return
        self._is_broken = True
        report = self._table.finish_read()
        for key, slot_id in report.misses:
            if slot_id >= 0:
                self._device.table.adopt(key, slot_id)
        self._missed.update(miss.key for miss in report.misses)
        step, self._unread = self._unread, None
        self._is_lost = report.lost_row is not None
        if not self._is_lost:
            shapes = [(step.num_tokens, self.top_k[row]) for row in range(len(self._mlps))]
            routing = [
                routing_P[: math.prod(shape)].reshape(shape).astype(np.int64)
                for routing_P, shape in zip(report.routing_LP, shapes, strict=True)
            ]
            self._decided, self._missed = DecidedStep(step, routing, self._missed), set()
        self._is_broken = False

    def _note_decided(self) -> None:
        decided, self._decided = self._decided, None
        if decided is not None:
            self._misses_lately = max(FORGETS * self._misses_lately, len(decided.missed))
            self._note_step(decided)

    # In a step

    @contextmanager
    def running(self, *, is_careful: bool) -> Iterator[None]:
        """What was begun runs inside, and may run again if it is lost. Careful: cannot be lost."""
        self._is_broken, self._is_careful, self.is_running = True, is_careful, True
        try:
            yield
        finally:
            self.is_running = False
        self._table.begin_read()
        self._unread = self._step
        self._note_decided()
        self._refill()
        self._is_broken = False

    def is_lost(self) -> bool:
        """Whether the step came to an expert on disk. Waits for it if there are any."""
        if len(self._addresses) == self._total_experts:
            return False
        self._take_report()
        return self._is_lost

    def compute(
        self, moe_row: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]: the routed experts of one layer."""
        pointers_TK = self._find(moe_row, top_k_index_TK.contiguous())
        weights_TK = top_k_weights_TK.contiguous()
        return self._kernels.slot_moe(
            self._mlps[moe_row], x_TD.contiguous(), pointers_TK, weights_TK
        )

    def _find(self, moe_row: int, index_TK: Tensor) -> Tensor:
        while True:
            pointers_TK = self._kernels.resolve(self._table, moe_row, index_TK)
            self._kernels.fill(self._table)
            if not self._is_careful or len(self._addresses) == self._total_experts:
                return pointers_TK
            if not self._table.is_lost():
                return pointers_TK
            self._bring(moe_row, index_TK)
            self._table.find_again()

    def _bring(self, moe_row: int, index_TK: Tensor) -> None:
        """Experts of this row to HOST, unless they have a slot. The device waits for us."""
        chosen = sorted({expert for expert in index_TK.flatten().tolist() if expert >= 0})
        keys = [ExpertKey(moe_row, expert) for expert in chosen]
        here = self._device.table.lookup
        absent = [key for key in keys if here(key) is not Residency.RESIDENT]
        with self._host.table.holding(absent, Phase.DECODE) as held:
            counters = self._note_reads(moe_row, len(held.absent))
            mover = self._host.mover
            mover.load_now(held.absent, held.slot_ids)
            for _ in mover.arrivals(absent, counters):
                pass
        self._tell_addresses()

    def check_invariants(self) -> None:
        """The device knows what the residency table says, when all reports were read."""
        if self._is_told and not self._is_broken:
            self._take_report()
            self._table.check_invariants()
            residency = self._device.table
            known = {key: residency.slot_of(key) for key in residency.resident_keys()}
            assert known == dict(self._table.resident), (known, self._table.resident)


def make_device_steps(
    config: OffloadConfig,
    plan: Plan,
    tiers: Sequence[SlotTier],
    *,
    note_step: Callable[[DecidedStep], None],
    note_reads: Callable[[int, int], PhaseCounters],
) -> DeviceSteps | None:
    """None if the host decides in every step. Raises ConfigError."""
    if config.experts_implementation != "fast" or len(tiers) == 1:
        return None
    if config.prefetch:
        logger.warning("prefetch=True: the host decides in every step, no CUDA graphs")
        return None
    mlps = [slot_row(*pair) for pair in zip(plan.rows, plan.recipes, strict=True)]
    known = [mlp for mlp in mlps if mlp is not None]
    if len(known) < len(mlps):
        name = plan.rows[mlps.index(None)].name
        logger.warning("no kernel reads the experts of %s: the host decides in every step", name)
        return None
    num_experts = max(row.num_experts for row in plan.rows)
    least, num_slots = min(MAX_PAIRS, num_experts), tiers[1].slots.num_slots
    if num_slots < least:
        raise ConfigError(
            f"host_memory holds {num_slots} experts; experts_implementation='fast' on a GPU needs "
            f"{least}, what one step may activate in a layer\n"
            "hint: raise host_memory, or use experts_implementation='auto'"
        )
    return DeviceSteps(
        tiers,
        known,
        num_experts=num_experts,
        total_experts=sum(row.num_experts for row in plan.rows),
        note_step=note_step,
        note_reads=note_reads,
    )
