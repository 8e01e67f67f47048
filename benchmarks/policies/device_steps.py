"""How many hits does it cost if the device decides within a step, and how closely behind does the
host have to apply its reports?

    python benchmarks/policies/device_steps.py ../shared/data --requests 12

For each half of the MoE layers the device has a score of every expert, as it will be after the last
layer of that half. A miss takes the slot of the resident with the lowest score. Experts of the
layers up to that last one stay, and so do experts of the current layer that are in use
(gpu/device_table.py). The host uploads the scores

    once a step         while the step before runs, whose reports it has not applied yet
    layers behind       of a layer's experts, once it has applied the report of that layer; so many
                        layers behind the device, and the rest when the next step begins
    by the clock        the same as fast as it can, for a device that takes so long for a layer, and
                        for each miss
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
from moe_infinity.gpu.device_table import NUM_PARTS
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder
from moe_infinity.tools.simulator.laboratory import num_slots_of
from moe_infinity.tools.simulator.replay import distinct
from moe_infinity.tools.simulator.schedule import RecordedStep, steps_of

CAPACITIES = ("10%", "20%", "30%")
ON_HOST = "the host decides in every layer"
ONCE_A_STEP = -1
LAYERS_BEHIND = (ONCE_A_STEP, 0, 1, 2, 4, 8, 16)
# Microseconds of a layer, half of them before it needs slots, and of a miss: an expert of 12 MB,
# 4 MB or 1 MB over 25 GB/s.
CLOCKS = ((60, 500), (60, 150), (60, 50), (30, 50))
# Of the host, to begin a step and to apply a report, with new scores and without; 48 layers of 128
# experts. experiments.md, "A device that decides alone".
BEGIN_US = 450
APPLY_US = 70
APPLY_REST_US = 25


class Learner:
    """The policy, and the recorder and predictor that it learns from."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._recorder = Recorder(num_layers, num_experts)
        self._predictor = Predictor(num_layers, num_experts)
        self._policy = ActivationAware(self._predictor, num_layers)

    def begin(self, recorded: RecordedStep) -> None:
        ended = self._recorder.begin_step(recorded.step)
        self._predictor.begin_step(recorded.step, ended)
        self._policy.begin_step(recorded.step)

    def learn_layer(self, recorded: RecordedStep, layer: int) -> None:
        experts_TK = recorded.experts_LTK[layer]
        self._recorder.record(layer, experts_TK)
        self._predictor.observe(layer, experts_TK)
        self._policy.touch(layer, *distinct(experts_TK))

    def learn_step(self, recorded: RecordedStep) -> None:
        self.begin(recorded)
        for layer in range(len(recorded.experts_LTK)):
            self.learn_layer(recorded, layer)

    def scores_after(self, layer: int) -> NDArray[np.float32]:
        """Of all experts, as cells of the matrix."""
        return self._policy.scores_after(layer).ravel()


class Device:
    """The slots of one run."""

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        self._num_free, self._num_experts = num_slots, num_experts
        self._resident = np.zeros(num_layers * num_experts, dtype=bool)
        self._layer_of = np.arange(num_layers * num_experts) // num_experts
        parts = range(1, NUM_PARTS + 1)
        self._last_layers = [num_layers * part // NUM_PARTS - 1 for part in parts]
        self._scores = [np.zeros(num_layers * num_experts, np.float32) for _ in parts]
        self.hits = self.lookups = 0

    def receive_scores(self, learner: Learner, layer: int | None = None) -> None:
        """Take the scores of all experts, or of one layer's."""
        cells = slice(None)
        if layer is not None:
            cells = slice(layer * self._num_experts, (layer + 1) * self._num_experts)
        for scores, last_layer in zip(self._scores, self._last_layers, strict=True):
            scores[cells] = learner.scores_after(last_layer)[cells]

    def run_layer(self, layer: int, experts_TK: NDArray[Any], *, is_counted: bool) -> int:
        """Run one MoE layer; returns how many experts it missed."""
        cells = layer * self._num_experts + distinct(experts_TK)[0]
        misses = cells[~self._resident[cells]]
        if len(misses) > self._num_free:
            self._evict(len(misses) - self._num_free, layer, cells)
        num_kept = min(len(misses), self._num_free)
        self._resident[misses[:num_kept]] = True
        self._num_free -= num_kept
        if is_counted:
            self.lookups += len(cells)
            self.hits += len(cells) - len(misses)
        return len(misses)

    def _evict(self, num: int, layer: int, used: NDArray[np.int64]) -> None:
        part = bisect_left(self._last_layers, layer)
        is_ahead = (self._layer_of > layer) & (self._layer_of <= self._last_layers[part])
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
    num_layers = sequences[0].experts_TLK.shape[1]
    device = Device(num_slots_of(capacity, num_layers * num_experts), num_layers, num_experts)
    learner, unapplied = Learner(num_layers, num_experts), list[RecordedStep]()
    for recorded in steps_of(sequences):
        if recorded.step.phase is not Phase.DECODE:  # the host decides
            for each in (*unapplied, recorded):
                learner.learn_step(each)
            unapplied.clear()
            continue
        is_polling = num_behind != ONCE_A_STEP
        if is_polling:
            learner.begin(recorded)
        device.receive_scores(learner)
        for layer, experts_TK in enumerate(recorded.experts_LTK):
            if is_polling and layer > num_behind:
                learner.learn_layer(recorded, layer - 1 - num_behind)
                device.receive_scores(learner, layer - 1 - num_behind)
            device.run_layer(layer, experts_TK, is_counted=recorded.num_begun > warmup)
        if is_polling:
            for layer in range(max(num_layers - 1 - num_behind, 0), num_layers):
                learner.learn_layer(recorded, layer)
        else:
            if unapplied:
                learner.learn_step(unapplied.pop())
            unapplied.append(recorded)
    return 100 * device.hits / device.lookups


class Host:
    """The host, which applies one report after the other, as time allows."""

    def __init__(self, device: Device, learner: Learner) -> None:
        self._device, self._learner = device, learner
        self._rest: list[tuple[RecordedStep, int]] = []  # reports of the step before
        # Summed up over layers that asked for slots.
        self.layers_behind = 0
        self.num_layers = 0

    def apply_rest(self) -> None:
        for recorded, layer in self._rest:
            self._learner.learn_layer(recorded, layer)
        self._rest = []

    def run(self, recorded: RecordedStep, layer_us: int, miss_us: int, *, is_counted: bool) -> None:
        """One step, launched when the device and the host are free."""
        now_us, host_us = 0.0, float(BEGIN_US + APPLY_REST_US * len(self._rest))
        self.apply_rest()
        self._learner.begin(recorded)
        reported_us: list[float] = []
        num_applied = -1  # not even the beginning of the step
        for layer, experts_TK in enumerate(recorded.experts_LTK):
            now_us += layer_us / 2
            if num_applied < 0 and host_us <= now_us:
                self._device.receive_scores(self._learner)
                num_applied = 0
            while 0 <= num_applied < layer and (
                (done_us := max(host_us, reported_us[num_applied]) + APPLY_US) <= now_us
            ):
                self._learner.learn_layer(recorded, num_applied)
                self._device.receive_scores(self._learner, num_applied)
                num_applied += 1
                host_us = done_us
            self.layers_behind += layer - num_applied
            self.num_layers += 1
            reported_us.append(now_us)
            num_missed = self._device.run_layer(layer, experts_TK, is_counted=is_counted)
            now_us += layer_us / 2 + num_missed * miss_us
        num_layers = len(recorded.experts_LTK)
        self._rest = [(recorded, layer) for layer in range(max(num_applied, 0), num_layers)]


def replayed_by_the_clock(
    sequences: Sequence[Any],
    clock: tuple[int, int],
    capacity: str,
    *,
    num_experts: int,
    warmup: int,
) -> tuple[float, float]:
    """Decode hit rate in percent, and how many layers the host was behind on average."""
    num_layers = sequences[0].experts_TLK.shape[1]
    device = Device(num_slots_of(capacity, num_layers * num_experts), num_layers, num_experts)
    learner = Learner(num_layers, num_experts)
    host = Host(device, learner)
    for recorded in steps_of(sequences):
        if recorded.step.phase is Phase.DECODE:
            host.run(recorded, *clock, is_counted=recorded.num_begun > warmup)
        else:
            host.apply_rest()
            learner.learn_step(recorded)
    return 100 * device.hits / device.lookups, host.layers_behind / host.num_layers


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
        for num_behind in LAYERS_BEHIND:
            rates = {c: round(replayed(sequences, num_behind, c, **how), 2) for c in CAPACITIES}
            is_once = num_behind == ONCE_A_STEP
            found.append(("once a step" if is_once else f"{num_behind} layers behind", rates))
        for way, rates in found:
            print(f"{way:30}", *(f"{rate:7.2f}" for rate in rates.values()))
            rows.append(conditions | {"way": way, "hit_rate_percent": rates})
        for clock in CLOCKS:
            timed = {c: replayed_by_the_clock(sequences, clock, c, **how) for c in CAPACITIES}
            rates = {c: round(rate, 2) for c, (rate, _) in timed.items()}
            behind = {c: round(layers_behind, 2) for c, (_, layers_behind) in timed.items()}
            way = f"{clock[0]} us a layer, {clock[1]} a miss"
            print(f"{way:30}", *(f"{rates[c]:7.2f}" for c in rates), "behind", *behind.values())
            row = {"way": way, "hit_rate_percent": rates, "layers_behind": behind}
            rows.append(conditions | row)
    return rows


if __name__ == "__main__":
    common.finish("device_steps", rows_of(common.parser(__doc__, requests=12).parse_args()))
