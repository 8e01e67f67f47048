"""What does a device that decides alone within a step cost in hits, and what would give them back?

    python benchmarks/policies/device_steps.py ../shared/data --requests 12

The host decides in every row, and knows all rows before it. A device decides by what the host told
it before the step, and the host tells it while the step before runs: it knows nothing of that one
yet ("late"). Two ways to tell:

    freed      slots evicted ahead, for the misses of two steps lately, an eighth of all at most;
               what finds none is read through the link and not kept
    scored     for each part of the rows a score of every expert, as after the part's last row; a
               miss takes the slot of the lowest resident. Experts of the rows up to there stay, and
               of its own row those in use. In two parts: kernels/device_table.py
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.activation_aware import ActivationAware
from moe_infinity.experts import Phase
from moe_infinity.prefetch.predictors import Predictor
from moe_infinity.simulator.laboratory import num_slots_of
from moe_infinity.simulator.replay import distinct
from moe_infinity.simulator.schedule import RecordedStep, steps_of
from moe_infinity.trace.recorder import Recorder

CAPACITIES = ("10%", "20%", "30%")
ON_HOST = "the host decides in every row"
RESERVED_STEPS, RESERVE_SHARE = 2, 8  # freed ahead: for so many steps, at most one in so many slots
FORGETS = 0.9  # of the highest number of misses lately, in each step


@dataclass(frozen=True)
class Way:
    """How the device is told who may leave."""

    is_late: bool = True
    num_parts: int = 0  # of the rows, each with its scores; 0: slots are freed ahead

    def __str__(self) -> str:
        told = f"scored in {self.num_parts} parts" if self.num_parts else "freed ahead"
        return f"{told}, {'late' if self.is_late else 'on time'}"


class Learner:
    """The policy, and who it learns from."""

    def __init__(self, num_rows: int, num_experts: int) -> None:
        self._recorder = Recorder(num_rows, num_experts)
        self._predictor = Predictor(num_rows, num_experts)
        self._policy = ActivationAware(self._predictor, num_rows)

    def hear(self, recorded: RecordedStep) -> None:
        ended = self._recorder.begin_step(recorded.step)
        self._predictor.begin_step(recorded.step, ended)
        self._policy.begin_step(recorded.step)
        for row, experts_TK in enumerate(recorded.experts_LTK):
            self._recorder.record(row, experts_TK)
            self._predictor.observe(row, experts_TK)
            self._policy.touch(row, *distinct(experts_TK))

    def scores_after(self, row: int) -> NDArray[np.float32]:
        """Of all experts, as cells of the matrix."""
        return self._policy.scores_after(row).ravel()


class Device:
    """The slots of one run."""

    def __init__(self, way: Way, num_slots: int, num_rows: int, num_experts: int) -> None:
        self.way, self._num_slots, self._num_experts = way, num_slots, num_experts
        self._resident = np.zeros(num_rows * num_experts, dtype=bool)
        self._row_of = np.arange(num_rows * num_experts) // num_experts
        self._num_free = num_slots
        self._misses_lately = 0.0
        self._last_rows = [num_rows * part // way.num_parts - 1 for part in self._parts()]
        self.hits = self.lookups = self.num_through = 0

    def _parts(self) -> range:
        return range(1, self.way.num_parts + 1)

    def run(self, recorded: RecordedStep, learner: Learner, *, is_counted: bool) -> None:
        """One decode step, with what the learner knows."""
        told = [learner.scores_after(row) for row in self._last_rows]
        num_missed = 0
        for row, experts_TK in enumerate(recorded.experts_LTK):
            cells = row * self._num_experts + distinct(experts_TK)[0]
            misses = cells[~self._resident[cells]]
            num_missed += len(misses)
            if self.way.num_parts and len(misses) > self._num_free:
                part = bisect_left(self._last_rows, row)
                self._evict(len(misses) - self._num_free, told[part], row, part, cells)
            num_kept = min(len(misses), self._num_free)
            self._resident[misses[:num_kept]] = True
            self._num_free -= num_kept
            if is_counted:
                self.lookups += len(cells)
                self.hits += len(cells) - len(misses)
                self.num_through += len(misses) - num_kept
        self._misses_lately = max(FORGETS * self._misses_lately, num_missed)

    def _evict(
        self, num: int, scores: NDArray[Any], row: int, part: int, used: NDArray[np.int64]
    ) -> None:
        is_ahead = (self._row_of > row) & (self._row_of <= self._last_rows[part])
        may_leave = self._resident & ~is_ahead
        may_leave[used] = False
        victims = np.where(may_leave, scores, np.inf).argsort(kind="stable")[:num]
        victims = victims[may_leave[victims]]
        self._resident[victims] = False
        self._num_free += len(victims)

    def free_ahead(self, learner: Learner) -> None:
        if self.way.num_parts:
            return
        wanted = math.ceil((RESERVED_STEPS if self.way.is_late else 1) * self._misses_lately)
        wanted = max(1, min(wanted, self._num_slots // RESERVE_SHARE)) - self._num_free
        if wanted > 0:
            order = learner.scores_after(self._row_of[-1]).argsort(kind="stable")
            victims = order[self._resident[order]][:wanted]
            self._resident[victims] = False
            self._num_free += len(victims)


def replayed(
    sequences: Sequence[Any], way: Way, capacity: str, *, num_experts: int, warmup: int
) -> Device:
    num_rows = sequences[0].experts_TLK.shape[1]
    num_slots = num_slots_of(capacity, num_rows * num_experts)
    device, learner = Device(way, num_slots, num_rows, num_experts), Learner(num_rows, num_experts)
    unheard: RecordedStep | None = None
    for recorded in steps_of(sequences):
        is_decode = recorded.step.phase is Phase.DECODE
        if unheard is not None and not (is_decode and way.is_late):
            learner.hear(unheard)
            unheard = None
        if not is_decode:  # the host's, which keeps it out of the decode set
            learner.hear(recorded)
            continue
        device.run(recorded, learner, is_counted=recorded.num_begun > warmup)
        if unheard is not None:  # while this one ran
            learner.hear(unheard)
        unheard = recorded
        if not way.is_late:
            learner.hear(recorded)
            unheard = None
        device.free_ahead(learner)
    return device


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, folder in common.folders(args):
        sequences, num_experts = common.requests_of(name, folder, args.requests)
        conditions = common.describe(name, sequences, len(sequences) // 6)
        warmup, num_rows = conditions["warmup"], sequences[0].experts_TLK.shape[1]
        cells = common.run(
            sequences, ["activation-aware"], CAPACITIES, num_experts=num_experts, warmup=warmup
        )
        rates = {c: common.percent(cells["activation-aware", c]) for c in CAPACITIES}
        rows.append(conditions | {"way": ON_HOST, "hit_rate_percent": rates})
        ways = [Way(), Way(is_late=False)]
        ways += [Way(is_late, parts) for parts in (2, 4, num_rows) for is_late in (True, False)]
        for way in ways:
            found = {
                c: replayed(sequences, way, c, num_experts=num_experts, warmup=warmup)
                for c in CAPACITIES
            }
            rates = {c: round(100 * d.hits / d.lookups, 2) for c, d in found.items()}
            through = {c: round(100 * d.num_through / d.lookups, 2) for c, d in found.items()}
            row = {"way": str(way), "hit_rate_percent": rates, "through_percent": through}
            rows.append(conditions | row)
        for row in rows[-len(ways) - 1 :]:
            print(f"{row['way']:30}", *(f"{r:7.2f}" for r in row["hit_rate_percent"].values()))
    return rows


if __name__ == "__main__":
    common.finish("device_steps", rows_of(common.parser(__doc__, requests=12).parse_args()))
