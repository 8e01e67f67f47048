"""How the host hears of steps that the device decides, row by row, while they run.

What the device tells of a row is entered in our table, everyone learns from it, and who of the row
may leave is scored anew. The device never waits for this. One that waits for its link is followed
closely, and evicts by what the rows before were routed to. Of a faster one the host hears the rest
while the next step runs.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moe_infinity.cuda.device_table import DeviceTable, RowReport
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import ExpertKey
from moe_infinity.predict.recorder import Step

if TYPE_CHECKING:
    from moe_infinity.engine.bookkeeping import Bookkeeping as ExpertRuntime

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


class Follower:
    """Used by the thread that runs the steps: retire, begin; begin_run, note_launch, follow."""

    def __init__(self, runtime: ExpertRuntime, table: DeviceTable) -> None:
        self._runtime, self._table = runtime, table
        self._residency = runtime.tiers[0].table
        # (T, K) of each row, as it was launched last.
        self._shapes: dict[int, tuple[int, int]] = {}
        self._launched: set[int] = set()  # in this run
        self._now: Followed | None = None  # begun; it runs, or was the last that ran
        self._before: Followed | None = None  # of which nobody has heard all

    def retire(self) -> None:
        """What ran last is the step before: its token was given."""
        if self._now is not None:
            self._before, self._now = self._now, None

    def begin(self, step: Step) -> None:
        """A step will run; what is told of the one before makes room for it."""
        if self._before is not None:
            self._take_out(self._before)
        self._now = Followed(step)

    def begin_run(self) -> None:
        """Of a step, or one more of a step that was lost."""
        self._launched.clear()

    def note_launch(self, moe_layer_idx: int, shape: tuple[int, int], *, is_captured: bool) -> None:
        """What the device will tell of. Raises UnsupportedModelError."""
        self._shapes[moe_layer_idx] = shape
        if is_captured:
            return
        if moe_layer_idx in self._launched:
            raise UnsupportedModelError(
                f"MoE layer {moe_layer_idx} ran twice in one step, which a GPU cannot report\n"
                "hint: use experts_implementation='auto'"
            )
        self._launched.add(moe_layer_idx)
        if self._now is not None and self._may_evict:
            self._hear_news(self._now)

    def follow(self) -> None:
        """All was launched. Until the device has come to the last row: it is still busy then, and
        what our caller launches next will be there when it is done.
        """
        now = self._now
        assert now is not None
        self._catch_up(now)
        last_row = max(self._shapes, default=-1) if self._may_evict else -1
        until = time.monotonic() + FOLLOW_SECONDS
        while now.last_told < last_row and not self._table.is_over():
            if not self._hear_news(now):
                time.sleep(POLL_SECONDS)
            if time.monotonic() > until:
                break

    def is_lost(self) -> bool:
        """Whether the step that ran has to run again, which it may then. Waits for it."""
        now = self._now
        assert now is not None
        self._take_out(now)
        if not now.is_lost:
            return False
        self._hear_of_loss(now)
        now.last_told, now.is_taken_out = -1, False
        return True

    def hear_up_to_loss(self) -> None:
        """At the last row that was launched, which will be told again. The device waits for us."""
        now = self._now
        assert now is not None
        self._catch_up(now)
        self._listen(now, is_over=True)
        now.last_told = self._hear_of_loss(now) - 1

    def hear_rest(self, *, is_adopted: bool = True) -> None:
        """Of the step before."""
        if self._before is not None:
            self._take_out(self._before)
            while self._before.rows:
                self._hear(self._before, is_adopted=is_adopted)
            self._before = None

    def forget(self) -> None:
        self._now = self._before = None

    @property
    def _may_evict(self) -> bool:
        return self._residency.num_slots < self._runtime.total_experts

    def _offer(self, moe_layer_idx: int | None = None) -> None:
        """Score who may leave, if it comes to that; of one row anew, or of all."""
        if self._may_evict:
            rows = (
                slice(0, None) if moe_layer_idx is None else slice(moe_layer_idx, moe_layer_idx + 1)
            )
            scores = [self._residency.leaving_scores(r)[rows] for r in self._table.last_rows]
            self._table.offer(np.stack(scores, axis=1), rows.start)

    def _listen(self, followed: Followed, *, is_over: bool) -> None:
        """Add what the device has told by now. A row that it skips is known as such when it is
        over.
        """
        for row, (num_tokens, top_k) in sorted(self._shapes.items()):
            if row > followed.last_told and not followed.is_lost:
                report = self._table.told(row, num_tokens * top_k)
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
            index_TK = report.expert_P.reshape(-1, self._shapes[row][1])
            self._runtime.note_row(row, index_TK, followed.missed | report.misses.keys())

    def _adopt(self, report: RowReport) -> None:
        for key, slot_id in report.misses.items():
            if slot_id >= 0:
                self._residency.adopt(key, slot_id)

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
            self.hear_rest()
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
