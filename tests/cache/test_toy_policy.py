"""The recipe "Add a policy" of CONTRIBUTING.md, followed: one class and one entry."""

from __future__ import annotations

import numpy as np
import pytest

from moe_infinity.cache.policies import POLICY_CLASSES, EvictionPolicy, Experts, Scores, make_policy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey, Ints, Phase, Step
from moe_infinity.tools.simulator.replay import Hardware, Setup, replay
from moe_infinity.tools.simulator.schedule import steps_of
from tests.tools.simulator.traces import one_after_the_other

LAYERS, EXPERTS = 3, 6


class MostRecent(EvictionPolicy):
    """Evicts the most recently used expert first."""

    def __init__(self, num_layers: int, num_experts: int, *, num_slots: int) -> None:
        self._scores = np.zeros((num_layers, num_experts))
        self._clock = 0

    def begin_step(self, step: Step) -> None:
        """Steps make no difference here."""

    def touch(self, moe_layer_idx: int, experts: Experts, counts: Ints | int = 1) -> None:
        self._clock += 1
        self._scores[moe_layer_idx, experts] = -self._clock

    def scores(self) -> Scores:
        return self._scores


@pytest.fixture(autouse=True)
def entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY_CLASSES, "most-recent", MostRecent)


def test_a_residency_table_evicts_as_the_new_policy_says():
    policy = make_policy("most-recent", num_layers=1, num_experts=3, num_slots=2)
    table = ResidencyTable(2, policy)
    for expert in (0, 1):
        policy.touch(0, [expert])
        table.begin_load(ExpertKey(0, expert), Phase.DECODE)
        table.finish_load(ExpertKey(0, expert))
    table.begin_load(ExpertKey(0, 2), Phase.DECODE)
    assert table.resident_keys() == [(0, 0)]
    table.check_invariants()


def test_the_simulator_replays_the_new_policy():
    sequences = one_after_the_other([(3, 20), (2, 20)], num_layers=LAYERS, num_experts=EXPERTS)
    hardware = Hardware(bytes_per_s=1e9, expert_bytes=1000, layer_s=1e-3)
    setups = [
        Setup(policy=policy, num_slots=10, prefetch=False, hardware=hardware)
        for policy in ("most-recent", "lru")
    ]
    cells = replay(steps_of(sequences), setups, num_layers=LAYERS, num_experts=EXPERTS)
    toy, lru = (cell.counters.decode for cell in cells)
    assert toy.lookups == lru.lookups > 0
    assert toy.hits != lru.hits
    cells[0].table.check_invariants()
