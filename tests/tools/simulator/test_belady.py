"""Belady's policy is the bound: no order of victims has more hits."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.cache.policies import ACTIVATION_AWARE, EvictionPolicy, Lru
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey, Phase, Step
from moe_infinity.tools.simulator.baselines import (
    NEVER,
    SIMULATED_POLICIES,
    Belady,
    Touch,
    make_policy,
    next_uses,
)

Decoding = list[list[list[int]]]  # by step and layer: the experts activated


def touches_of(decoding: Decoding) -> list[Touch]:
    return [(layer, experts) for step in decoding for layer, experts in enumerate(step)]


def belady(decoding: Decoding, num_experts: int) -> Belady:
    num_layers = len(decoding[0])
    future = next_uses(touches_of(decoding), num_layers=num_layers, num_experts=num_experts)
    return Belady(future, num_layers=num_layers, num_experts=num_experts)


def num_hits(policy: EvictionPolicy, decoding: Decoding, num_slots: int, begins: set[int]) -> int:
    """Decode through the residency table, as the runtime does; requests begin with these steps."""
    table = ResidencyTable(num_slots, policy)
    hits = 0
    for step_idx, step in enumerate(decoding):
        policy.begin_step(Step(Phase.DECODE, 1, 1, begins_B=np.array([step_idx in begins])))
        for moe_layer_idx, experts in enumerate(step):
            policy.touch(moe_layer_idx, np.array(experts))
            keys = [ExpertKey(moe_layer_idx, expert) for expert in experts]
            hits += table.census(keys)[0]
            assert set(table.next_wave(keys, Phase.DECODE)) == set(keys)
            with table.holding(keys, Phase.DECODE) as held:
                for key in held.absent:
                    table.finish_load(key)
            table.check_invariants()
    return hits


def most_hits(decoding: Decoding, num_slots: int) -> int:
    """Tries every choice of victims: what may be resident after a touch, and the hits so far."""
    best: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}
    for moe_layer_idx, experts in touches_of(decoding):
        needed = frozenset((moe_layer_idx, expert) for expert in experts)
        after: dict[frozenset[tuple[int, int]], int] = {}
        for resident, hits in best.items():
            others = resident - needed
            room = min(num_slots - len(needed), len(others))
            for kept in combinations(sorted(others), room):
                state = needed.union(kept)
                after[state] = max(after.get(state, 0), hits + len(needed & resident))
        best = after
    return max(best.values())


@st.composite
def decodings(draw, max_layers: int, max_experts: int, max_steps: int) -> tuple[Decoding, int, int]:
    """Steps of k experts per layer, the number of experts per layer, and at least k slots."""
    num_layers, num_experts = draw(st.integers(1, max_layers)), draw(st.integers(1, max_experts))
    k = draw(st.integers(1, num_experts))
    experts = st.lists(st.integers(0, num_experts - 1), min_size=k, max_size=k, unique=True)
    step = st.lists(experts, min_size=num_layers, max_size=num_layers)
    num_slots = draw(st.integers(k, max(num_layers * num_experts - 1, k)))
    return draw(st.lists(step, min_size=1, max_size=max_steps)), num_experts, num_slots


def test_next_uses_are_the_numbers_of_later_touches_of_the_same_layer():
    touches: list[Touch] = [(0, [0, 2]), (1, np.array([2])), (0, [2, 1]), (1, [0]), (0, [2])]
    wanted = [[NEVER, 2], [NEVER], [4, NEVER], [NEVER], [NEVER]]
    got = next_uses(touches, num_layers=2, num_experts=3)
    assert [times.tolist() for times in got] == wanted


def test_nothing_touched_has_no_next_uses():
    assert next_uses([], num_layers=2, num_experts=3) == []


def test_the_expert_needed_last_leaves():
    """a b c a b with two slots: c must take the place of b, so that a is a hit. LRU has none."""
    decoding = [[[expert]] for expert in (0, 1, 2, 0, 1)]
    assert num_hits(belady(decoding, 3), decoding, 2, begins={0}) == 1
    assert num_hits(Lru(1, 3, num_slots=2), decoding, 2, begins={0}) == 0


def test_an_expert_never_needed_again_leaves_before_all_others():
    decoding = [[[expert]] for expert in (0, 1, 2, 0, 2, 0)]
    assert num_hits(belady(decoding, 3), decoding, 2, begins={0}) == 3


@settings(max_examples=150)
@given(case=decodings(max_layers=2, max_experts=3, max_steps=5))
def test_belady_has_the_most_hits_any_choice_of_victims_can_have(case):
    decoding, num_experts, num_slots = case
    hits = num_hits(belady(decoding, num_experts), decoding, num_slots, begins={0})
    assert hits == most_hits(decoding, num_slots)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [n for n in SIMULATED_POLICIES if n != ACTIVATION_AWARE])
@settings(max_examples=100)
@given(decodings(max_layers=4, max_experts=6, max_steps=12), st.sets(st.integers(0, 11)))
def test_no_baseline_has_more_hits_than_belady(name, case, begins):
    decoding, num_experts, num_slots = case
    num_layers = len(decoding[0])
    policy = make_policy(name, num_layers=num_layers, num_experts=num_experts, num_slots=num_slots)
    bound = num_hits(belady(decoding, num_experts), decoding, num_slots, begins)
    assert num_hits(policy, decoding, num_slots, begins) <= bound
