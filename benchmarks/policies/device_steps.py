"""What does a device that decides alone within a step cost in hits, and how closely has the host
to follow it?

    python benchmarks/policies/device_steps.py ../shared/data --requests 12

For each half of the rows the device has a score of every expert, as after the half's last row; a
miss takes the slot of the lowest resident. Experts of the rows up to there stay, and of its own row
those in use (cuda/device_table.py). The host tells the scores

    once a step         while the step before runs, of which it knows nothing yet
    following           when it has heard of a row, those of the row's experts anew; so many rows
                        behind, and of what is left when the next step begins
    by the clock        following as fast as it can a device that takes so long for a row, and for
                        each miss
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import common
import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.activation_aware import ActivationAware
from moe_infinity.cuda.device_table import NUM_PARTS
from moe_infinity.experts import Phase
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder
from moe_infinity.simulator.laboratory import num_slots_of
from moe_infinity.simulator.replay import distinct
from moe_infinity.simulator.schedule import RecordedStep, steps_of

CAPACITIES = ("10%", "20%", "30%")
ON_HOST = "the host decides in every row"
ONCE_A_STEP = -1
ROWS_BEHIND = (ONCE_A_STEP, 0, 1, 2, 4, 8, 16)
# Microseconds of a row, half of them before it needs slots, and of a miss: an expert of 12 MB, 4 MB
# or 1 MB over 25 GB/s.
CLOCKS = ((60, 500), (60, 150), (60, 50), (30, 50))
# Of the host, 48 rows x 128 experts: experiments.md, "A device that decides alone".
BEGIN_US, HEAR_US, HEAR_REST_US = 450, 70, 25


class Learner:
    """The policy, and who it learns from."""

    def __init__(self, num_rows: int, num_experts: int) -> None:
        self._recorder = Recorder(num_rows, num_experts)
        self._predictor = Predictor(num_rows, num_experts)
        self._policy = ActivationAware(self._predictor, num_rows)

    def begin(self, recorded: RecordedStep) -> None:
        ended = self._recorder.begin_step(recorded.step)
        self._predictor.begin_step(recorded.step, ended)
        self._policy.begin_step(recorded.step)

    def hear(self, recorded: RecordedStep, row: int) -> None:
        experts_TK = recorded.experts_LTK[row]
        self._recorder.record(row, experts_TK)
        self._predictor.observe(row, experts_TK)
        self._policy.touch(row, *distinct(experts_TK))

    def hear_all(self, recorded: RecordedStep) -> None:
        self.begin(recorded)
        for row in range(len(recorded.experts_LTK)):
            self.hear(recorded, row)

    def scores_after(self, row: int) -> NDArray[np.float32]:
        """Of all experts, as cells of the matrix."""
        return self._policy.scores_after(row).ravel()


class Device:
    """The slots of one run."""

    def __init__(self, num_slots: int, num_rows: int, num_experts: int) -> None:
        self._num_free, self._num_experts = num_slots, num_experts
        self._resident = np.zeros(num_rows * num_experts, dtype=bool)
        self._row_of = np.arange(num_rows * num_experts) // num_experts
        parts = range(1, NUM_PARTS + 1)
        self._last_rows = [num_rows * part // NUM_PARTS - 1 for part in parts]
        self._scores = [np.zeros(num_rows * num_experts, np.float32) for _ in parts]
        self.hits = self.lookups = 0

    def be_told(self, learner: Learner, row: int | None = None) -> None:
        """The scores of all, or of one row."""
        cells = slice(None)
        if row is not None:
            cells = slice(row * self._num_experts, (row + 1) * self._num_experts)
        for scores, last_row in zip(self._scores, self._last_rows, strict=True):
            scores[cells] = learner.scores_after(last_row)[cells]

    def run_row(self, row: int, experts_TK: NDArray[Any], *, is_counted: bool) -> int:
        """How many experts it missed."""
        cells = row * self._num_experts + distinct(experts_TK)[0]
        misses = cells[~self._resident[cells]]
        if len(misses) > self._num_free:
            self._evict(len(misses) - self._num_free, row, cells)
        num_kept = min(len(misses), self._num_free)
        self._resident[misses[:num_kept]] = True
        self._num_free -= num_kept
        if is_counted:
            self.lookups += len(cells)
            self.hits += len(cells) - len(misses)
        return len(misses)

    def _evict(self, num: int, row: int, used: NDArray[np.int64]) -> None:
        part = bisect_left(self._last_rows, row)
        is_ahead = (self._row_of > row) & (self._row_of <= self._last_rows[part])
        may_leave = self._resident & ~is_ahead
        may_leave[used] = False
        victims = np.where(may_leave, self._scores[part], np.inf).argsort(kind="stable")[:num]
        victims = victims[may_leave[victims]]
        self._resident[victims] = False
        self._num_free += len(victims)


def replayed(
    sequences: Sequence[Any], num_behind: int, capacity: str, *, num_experts: int, warmup: int
) -> float:
    """Decode hit rate in percent."""
    num_rows = sequences[0].experts_TLK.shape[1]
    device = Device(num_slots_of(capacity, num_rows * num_experts), num_rows, num_experts)
    learner, unheard = Learner(num_rows, num_experts), list[RecordedStep]()
    for recorded in steps_of(sequences):
        if recorded.step.phase is not Phase.DECODE:  # the host's
            for heard in (*unheard, recorded):
                learner.hear_all(heard)
            unheard.clear()
            continue
        is_following = num_behind != ONCE_A_STEP
        if is_following:
            learner.begin(recorded)
        device.be_told(learner)
        for row, experts_TK in enumerate(recorded.experts_LTK):
            if is_following and row > num_behind:
                learner.hear(recorded, row - 1 - num_behind)
                device.be_told(learner, row - 1 - num_behind)
            device.run_row(row, experts_TK, is_counted=recorded.num_begun > warmup)
        if is_following:
            for row in range(max(num_rows - 1 - num_behind, 0), num_rows):
                learner.hear(recorded, row)
        else:
            if unheard:
                learner.hear_all(unheard.pop())
            unheard.append(recorded)
    return 100 * device.hits / device.lookups


class Follower:
    """The host, which hears of rows one after the other, as time allows."""

    def __init__(self, device: Device, learner: Learner) -> None:
        self._device, self._learner = device, learner
        self._rest: list[tuple[RecordedStep, int]] = []  # of the step before
        self.rows_behind, self.num_rows = 0, 0  # summed up over rows that asked for slots

    def hear_rest(self) -> None:
        for recorded, row in self._rest:
            self._learner.hear(recorded, row)
        self._rest = []

    def run(self, recorded: RecordedStep, row_us: int, miss_us: int, *, is_counted: bool) -> None:
        """One step, launched when the device and the host are free."""
        now_us, host_us = 0.0, float(BEGIN_US + HEAR_REST_US * len(self._rest))
        self.hear_rest()
        self._learner.begin(recorded)
        told_us: list[float] = []
        num_heard = -1  # not even of its beginning
        for row, experts_TK in enumerate(recorded.experts_LTK):
            now_us += row_us / 2
            if num_heard < 0 and host_us <= now_us:
                self._device.be_told(self._learner)
                num_heard = 0
            while 0 <= num_heard < row and (
                (done_us := max(host_us, told_us[num_heard]) + HEAR_US) <= now_us
            ):
                self._learner.hear(recorded, num_heard)
                self._device.be_told(self._learner, num_heard)
                num_heard, host_us = num_heard + 1, done_us
            self.rows_behind, self.num_rows = self.rows_behind + row - num_heard, self.num_rows + 1
            told_us.append(now_us)
            num_missed = self._device.run_row(row, experts_TK, is_counted=is_counted)
            now_us += row_us / 2 + num_missed * miss_us
        num_rows = len(recorded.experts_LTK)
        self._rest = [(recorded, row) for row in range(max(num_heard, 0), num_rows)]


def replayed_by_the_clock(
    sequences: Sequence[Any],
    clock: tuple[int, int],
    capacity: str,
    *,
    num_experts: int,
    warmup: int,
) -> tuple[float, float]:
    """Decode hit rate in percent, and how many rows the host was behind on average."""
    num_rows = sequences[0].experts_TLK.shape[1]
    device = Device(num_slots_of(capacity, num_rows * num_experts), num_rows, num_experts)
    learner = Learner(num_rows, num_experts)
    follower = Follower(device, learner)
    for recorded in steps_of(sequences):
        if recorded.step.phase is Phase.DECODE:
            follower.run(recorded, *clock, is_counted=recorded.num_begun > warmup)
        else:
            follower.hear_rest()
            learner.hear_all(recorded)
    return 100 * device.hits / device.lookups, follower.rows_behind / follower.num_rows


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, folder in common.folders(args):
        sequences, num_experts = common.requests_of(name, folder, args.requests)
        conditions = common.describe(name, sequences, len(sequences) // 6)
        warmup = conditions["warmup"]
        cells = common.run(
            sequences, ["activation-aware"], CAPACITIES, num_experts=num_experts, warmup=warmup
        )
        rates = {c: common.percent(cells["activation-aware", c]) for c in CAPACITIES}
        found = [(ON_HOST, rates)]
        how = {"num_experts": num_experts, "warmup": warmup}
        for num_behind in ROWS_BEHIND:
            rates = {c: round(replayed(sequences, num_behind, c, **how), 2) for c in CAPACITIES}
            is_once = num_behind == ONCE_A_STEP
            found.append(("once a step" if is_once else f"{num_behind} rows behind", rates))
        for way, rates in found:
            print(f"{way:30}", *(f"{rate:7.2f}" for rate in rates.values()))
            rows.append(conditions | {"way": way, "hit_rate_percent": rates})
        for clock in CLOCKS:
            timed = {c: replayed_by_the_clock(sequences, clock, c, **how) for c in CAPACITIES}
            rates = {c: round(rate, 2) for c, (rate, _) in timed.items()}
            behind = {c: round(rows_behind, 2) for c, (_, rows_behind) in timed.items()}
            way = f"{clock[0]} us a row, {clock[1]} a miss"
            print(f"{way:30}", *(f"{rates[c]:7.2f}" for c in rates), "behind", *behind.values())
            row = {"way": way, "hit_rate_percent": rates, "rows_behind": behind}
            rows.append(conditions | row)
    return rows


if __name__ == "__main__":
    common.finish("device_steps", rows_of(common.parser(__doc__, requests=12).parse_args()))
