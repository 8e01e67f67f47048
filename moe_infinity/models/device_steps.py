"""Decode steps that the device decides alone, and how the host follows.

    begin     what the device told of the step before is taken out
    compute   of every row: resolve, fill, slot_moe (kernels/slot_kernels.py), only launched here
    follow    while the device works: what it tells of each row is entered in our table, everyone
              learns from it, and who may leave is scored anew

The device never waits for this. One that waits for its link is followed row by row, and evicts by
what the rows before were routed to. Of a faster one the host hears the rest while the next step
runs. Both ways of a step share one residency table. Steps of many tokens are the host's: it takes
all slots back (`leave`) until the next `begin`.

An expert that only the disk has loses the step at its row. Then the host brings the row's experts
to HOST: at once, if it looks after every row (`is_careful`, which waits for the device), or when
the whole step is run again by who kept its cache (kernels/graphed_step.py).

Legend: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError, UnsupportedModelError
from moe_infinity.experts import ExpertKey, Phase
from moe_infinity.kernels.device_table import RowReport
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

FOLLOW_SECONDS = 10.0  # at most; the rest is heard later
POLL_SECONDS = 20e-6  # a fraction of what a row with a miss takes


@dataclass(slots=True)
class Followed:
    """A step of the device, as far as the host has come with it."""

    step: Step
    has_begun: bool = False  # everyone knows of it
    is_taken_out: bool = False  # nothing more will be told
    # Told and not yet heard, in order. A row at which the step was lost is the last one.
    rows: deque[tuple[int, RowReport]] = field(default_factory=deque)
    last_told: int = -1
    last_noted: int = -1  # everyone learned of the rows up to there
    missed: set[ExpertKey] = field(default_factory=set)  # in rows that are told a second time

    @property
    def is_lost(self) -> bool:
        return bool(self.rows) and self.rows[-1][1].is_lost


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
        self._num_pairs: dict[int, int] = {}  # of rows in the last step that launched them
        self._launched: set[int] = set()  # in this run
        self.has_begun = False  # a step, which is still to run
        self.is_running = False
        self.is_captured = False  # what is launched does not run yet
        self._is_careful = False
        self.is_broken = False  # set while the tables may disagree
        self._is_told = False  # the device knows what the residency table knows
        self._now: Followed | None = None  # begun; it runs, or was the last that ran
        self._before: Followed | None = None  # of which nobody has heard all

    # Between steps

    def begin(self, step: Step) -> bool:
        """A forward pass begins; False if the host decides in it."""
        self.mend()
        num_pairs = step.num_tokens * max(self.top_k.values(), default=MAX_PAIRS + 1)
        if step.phase is not Phase.DECODE or num_pairs > MAX_PAIRS:
            self.leave()
            return False
        self._retire()
        self.is_broken = True
        if self._before is not None:
            self._take_out(self._before)
        if not self._is_told:
            self._tell_everything()
        self._now, self.has_begun = Followed(step), True
        return True

    def settle(self) -> bool:
        """Wait for the step under way, and let everybody know of it; but not if it was
        interrupted.
        """
        if self.is_broken:
            return False
        self._retire()
        self.is_broken = True
        self._hear_rest()
        self.is_broken = False
        return True

    def conclude(self) -> None:
        """The same, and make order if it was."""
        self.mend()
        self.settle()

    def _retire(self) -> None:
        """What ran last is the step before: its token was given."""
        if self._now is not None:
            self._before, self._now = self._now, None

    def leave(self) -> None:
        """Wait, and take back all slots: from now on the host decides."""
        self.has_begun = False
        if self._is_told:
            self.settle()
            self._forget()

    def _forget(self) -> None:
        self._now = self._before = None
        self._is_told = self.is_broken = False

    def mend(self) -> None:
        """If a step was interrupted: which slots it had filled nobody knows."""
        if self.is_broken:
            self.is_running = self.is_captured = False
            self._residency.recover()
            self._mover.recover()  # waits for copies and kernels
            self._residency.evict_all()
            self._hear_rest(is_adopted=False)
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

    @property
    def _may_evict(self) -> bool:
        return self._residency.num_slots < self._runtime.total_experts

    def _offer(self, moe_row: int | None = None) -> None:
        """Score who may leave, if it comes to that; of one row anew, or of all."""
        if self._may_evict:
            first_row, last_row = (0, -1) if moe_row is None else (moe_row, moe_row)
            rows = slice(first_row, last_row + 1 or None)
            scores = [self._residency.leaving_scores(r)[rows] for r in self._table.last_rows]
            self._table.offer(np.stack(scores, axis=1), first_row)

    # Hearing of a step

    def _listen(self, followed: Followed, *, is_over: bool) -> None:
        """Add what the device has told by now. A row that it skips is known as such when it is
        over.
        """
        for row, num_pairs in sorted(self._num_pairs.items()):
            if row > followed.last_told and not followed.is_lost:
                report = self._table.told(row, num_pairs)
                if report is not None:
                    followed.rows.append((row, report))
                    followed.last_told = row
                elif not is_over:
                    return

    def _take_out(self, followed: Followed) -> None:
        """All that is told of a step that was launched. Where the caller has read the token it
        gave, the device is done with it, and nobody waits here.
        """
        if not followed.is_taken_out:
            self._table.wait()
            self._listen(followed, is_over=True)
            followed.is_taken_out = True
            self._table.begin_step()

    def _hear(self, followed: Followed, *, is_adopted: bool = True) -> None:
        """Of one row."""
        row, report = followed.rows[0]
        if is_adopted:
            self._adopt(report)
        followed.rows.popleft()
        if row > followed.last_noted:
            followed.last_noted = row
            index_TK = report.expert_P.reshape(-1, self.top_k[row])
            self._runtime.note_row(row, index_TK, followed.missed | report.misses.keys())

    def _adopt(self, report: RowReport) -> None:
        for key, slot_id in report.misses.items():
            if slot_id >= 0:
                self._residency.adopt(key, slot_id)

    def _hear_rest(self, *, is_adopted: bool = True) -> None:
        """Of the step before."""
        if self._before is not None:
            self._take_out(self._before)
            while self._before.rows:
                self._hear(self._before, is_adopted=is_adopted)
            self._before = None

    def _hear_of_loss(self, now: Followed) -> int:
        """Of all before the row that the step was lost at. Gives this row, which is told again."""
        lost_row, report = now.rows.pop()
        while now.rows:
            self._hear(now)
        self._adopt(report)
        now.missed |= report.misses.keys()
        return lost_row

    def _catch_up(self, now: Followed) -> None:
        """With the step before, and with the beginning of this one."""
        if not now.has_begun:
            self._hear_rest()
            self._runtime.note_begin(now.step)
            now.has_begun = True
            self._offer()

    def _hear_news(self, now: Followed) -> bool:
        """Of the next row, if the device has come there, and score anew who of it may leave."""
        self._catch_up(now)
        self._listen(now, is_over=False)
        if not now.rows or now.rows[0][1].is_lost:
            return False
        row, is_new = now.rows[0][0], now.rows[0][0] > now.last_noted
        self._hear(now)
        if is_new:
            self._offer(row)
        return True

    def _follow(self, now: Followed) -> None:
        """Until the device has come to the last row. It is still busy then, and what our caller
        launches next will be there when it is done.
        """
        self._catch_up(now)
        last_row = max(self._num_pairs, default=-1) if self._may_evict else -1
        until = time.monotonic() + FOLLOW_SECONDS
        while now.last_told < last_row and not self._table.is_over():
            if not self._hear_news(now):
                time.sleep(POLL_SECONDS)
            if time.monotonic() > until:
                break

    # In a step

    @contextmanager
    def running(self, *, is_careful: bool) -> Iterator[None]:
        """What was begun runs inside, and may run again if it is lost. Careful: cannot be lost."""
        self.is_broken, self._is_careful, self.is_running = True, is_careful, True
        self._launched.clear()
        assert self._now is not None
        try:
            with torch.cuda.device(self._gpu):  # triton launches on the current one
                yield
        finally:
            self.is_running = False
        self._table.end_step()
        self._follow(self._now)
        self.is_broken = False

    @property
    def can_lose(self) -> bool:
        """Whether some expert is on disk only."""
        return len(self._table.host_addresses) < self._runtime.total_experts

    def is_lost(self) -> bool:
        """Whether the step that just ran came to an expert on disk. Waits for it if one could."""
        if not self.can_lose:
            return False
        assert self._now is not None
        self.is_broken = True
        self._take_out(self._now)
        is_lost = self._now.is_lost
        if is_lost:
            self._hear_of_loss(self._now)
            self._now.last_told, self._now.is_taken_out = -1, False
        self.is_broken = False
        return is_lost

    def compute(
        self, moe_row: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]: the routed experts of one layer."""
        self.top_k[moe_row] = top_k_index_TK.shape[1]
        self._num_pairs[moe_row] = top_k_index_TK.numel()
        if not self.is_captured:
            self._note_launch(moe_row)
        bring = self._bring_lost if self._is_careful and self.can_lose else None
        return self._rows.compute(moe_row, x_TD, top_k_index_TK, top_k_weights_TK, bring)

    def _note_launch(self, moe_row: int) -> None:
        """Raises UnsupportedModelError."""
        if moe_row in self._launched:
            raise UnsupportedModelError(
                f"MoE row {moe_row} ran twice in one step, which a GPU that decides cannot tell\n"
                "hint: use experts_implementation='auto'"
            )
        self._launched.add(moe_row)
        if self._now is not None and self._may_evict:
            self._hear_news(self._now)

    def _bring_lost(self, moe_row: int, index_TK: Tensor) -> None:
        """For the row that the step was just lost at. The device waits for us."""
        assert self._now is not None
        self._catch_up(self._now)
        self._listen(self._now, is_over=True)
        self._now.last_told = self._hear_of_loss(self._now) - 1
        self._bring(moe_row, index_TK)

    def _bring(self, moe_row: int, index_TK: Tensor) -> None:
        """Experts of this row to HOST, unless they have a slot."""
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
        if self._is_told and not self.is_broken:
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
