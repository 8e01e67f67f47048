"""What does a device that decides alone within a step cost in hits, and how closely has the host
to follow it?

    python benchmarks/policies/device_steps.py ../shared/data --requests 12

For each half of the rows the device has a score of every expert, as after the half's last row; a
miss takes the slot of the lowest resident. Experts of the rows up to there stay, and of its own row
those in use (kernels/device_table.py). The host tells the scores

    once a step         while the step before runs, of which it knows nothing yet
    following           when it has heard of a row, those of the row's experts anew; so many rows
                        behind, and of what is left when the next step begins
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
from moe_infinity.experts import Phase
from moe_infinity.kernels.device_table import NUM_PARTS
from moe_infinity.prefetch.predictors import Predictor
from moe_infinity.simulator.laboratory import num_slots_of
from moe_infinity.simulator.replay import distinct
from moe_infinity.simulator.schedule import RecordedStep, steps_of
from moe_infinity.trace.recorder import Recorder

CAPACITIES = ("10%", "20%", "30%")
ON_HOST = "the host decides in every row"
ONCE_A_STEP = -1
ROWS_BEHIND = (ONCE_A_STEP, 0, 1, 2, 4, 8, 16)


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

    def run_row(self, row: int, experts_TK: NDArray[Any], *, is_counted: bool) -> None:
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
        for num_behind in ROWS_BEHIND:
            how = {"num_experts": num_experts, "warmup": warmup}
            rates = {c: round(replayed(sequences, num_behind, c, **how), 2) for c in CAPACITIES}
            is_once = num_behind == ONCE_A_STEP
            found.append(("once a step" if is_once else f"{num_behind} rows behind", rates))
        for way, rates in found:
            print(f"{way:30}", *(f"{rate:7.2f}" for rate in rates.values()))
            rows.append(conditions | {"way": way, "hit_rate_percent": rates})
    return rows


if __name__ == "__main__":
    common.finish("device_steps", rows_of(common.parser(__doc__, requests=12).parse_args()))
