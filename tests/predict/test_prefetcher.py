"""The prefetcher measures the time between layers and begins what the planner says."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_infinity.cache.counters import Counters
from moe_infinity.cache.policies import Lru
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase
from moe_infinity.predict.planner import LAYER_TIME_RATE, PayOff, Prefetcher

DECODE, PREFILL = Phase.DECODE, Phase.PREFILL
LAYERS, EXPERTS = 2, 4
LAYER_S = 0.002


class Likely(Lru):
    """All experts of layer 1 are likely; the higher the id, the more."""

    def chances(self) -> NDArray[np.float64]:
        chances = np.zeros((LAYERS, EXPERTS))
        chances[1] = np.linspace(0.6, 0.9, EXPERTS)
        return chances

    def scores(self) -> NDArray[np.float64]:
        return self.chances()


class FakeMover:
    """Loads take no time, and are remembered."""

    def __init__(self) -> None:
        self.failed: set[ExpertKey] = set()
        self.load_s = 0.0
        self.queued_s = 0.0
        self.begun: dict[ExpertKey, int] = {}

    def record_arrivals(self) -> float:
        return self.queued_s

    def load_ahead(self, slot_ids: Mapping[ExpertKey, int]) -> None:
        self.begun.update(slot_ids)


class Engine:
    """A prefetcher, what it acts on, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pay_off: PayOff | None = None) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        policy = Likely(LAYERS, EXPERTS, num_slots=8)
        self.table = ResidencyTable(8, policy)
        self.mover = FakeMover()
        self.counters = Counters()
        exists_LE = np.ones((LAYERS, EXPERTS), dtype=bool)
        self.prefetcher = Prefetcher(self.table, policy, self.mover, exists_LE, pay_off=pay_off)

    def layers(self, phase: Phase, seconds: float, num: int) -> None:
        for _ in range(num):
            self.now += seconds
            self.prefetcher.begin_layer(phase, self.counters)

    @property
    def layer_s(self) -> float:
        return self.prefetcher._times()["layer_s"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_a_policy_that_predicts_nothing_is_refused():
    policy = Lru(LAYERS, EXPERTS, num_slots=8)
    exists_LE = np.ones((LAYERS, EXPERTS), dtype=bool)
    with pytest.raises(ConfigError, match="predicts nothing"):
        Prefetcher(ResidencyTable(8, policy), policy, FakeMover(), exists_LE, pay_off=None)


def test_before_two_decoding_layers_were_timed_there_is_no_room(engine):
    assert not engine.prefetcher.has_room()
    engine.layers(DECODE, LAYER_S, 1)
    assert not engine.prefetcher.has_room()
    engine.layers(DECODE, LAYER_S, 1)
    assert engine.prefetcher.has_room()


def test_a_prompt_does_not_change_the_time_a_decoding_layer_is_taken_to_need(engine):
    engine.layers(DECODE, LAYER_S, 9)
    assert engine.layer_s == pytest.approx(LAYER_S)
    engine.layers(PREFILL, 0.5, 9)
    engine.layers(DECODE, LAYER_S, 2)
    assert engine.layer_s == pytest.approx(LAYER_S)


def test_the_time_of_a_layer_is_a_moving_average_without_waiting(engine):
    engine.layers(DECODE, LAYER_S, 2)
    engine.counters.decode.stall_s += 1.0
    engine.layers(DECODE, 1.0 + 2 * LAYER_S, 1)
    assert engine.layer_s == pytest.approx(LAYER_S * (1 + LAYER_TIME_RATE))


def test_the_likeliest_experts_get_slots_and_are_begun(engine):
    engine.layers(DECODE, LAYER_S, 2)
    engine.mover.load_s = LAYER_S / 2  # two loads fit into one layer
    keys = engine.prefetcher.begin_loads(0)
    assert keys == [(1, 3), (1, 2)]
    assert engine.mover.begun == {key: engine.table.slot_of(key) for key in keys}
    assert set(engine.table.loading_keys()) == set(keys)
    assert engine.table.prefetches.begun == 2


def test_a_busy_link_has_no_room(engine):
    engine.layers(DECODE, LAYER_S, 1)
    engine.mover.queued_s = 2 * LAYER_S
    engine.layers(DECODE, LAYER_S, 1)
    assert not engine.prefetcher.has_room()


def test_an_expert_whose_prefetch_failed_is_left_to_demand(engine):
    engine.layers(DECODE, LAYER_S, 2)
    engine.mover.load_s = LAYER_S / 2
    engine.mover.failed.add(ExpertKey(1, 3))
    assert engine.prefetcher.begin_loads(0) == [(1, 2)]


def test_how_long_decode_steps_take_is_told_and_prompts_are_left_out(monkeypatch):
    taken: list[float] = []

    class Noted(PayOff):
        def end_step(self, seconds: float) -> None:
            taken.append(round(seconds, 6))

    engine = Engine(monkeypatch, Noted())
    for phase in (Phase.DECODE, Phase.DECODE, Phase.PREFILL, Phase.DECODE, Phase.DECODE):
        if phase is Phase.DECODE:
            engine.prefetcher.begin_decode()
        for _ in range(4):
            engine.prefetcher.begin_layer(phase, engine.counters)
            engine.now += 1
        engine.now += 50  # of somebody who reads
    assert taken == [3, 3]
    assert not engine.prefetcher.has_room()
