"""A plan loads what saves most waiting, no more than the link carries, and takes nothing better."""

from __future__ import annotations

from itertools import product
from math import ceil
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.cache.policies import POLICY_CLASSES, EvictionPolicy, make_policy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase, Step
from moe_infinity.predict.planner import LOADING_SHARE, MIN_CHANCE, Planner

DECODE = Phase.DECODE
NUM_LAYERS, NUM_EXPERTS = 4, 5


class Fixed(EvictionPolicy):
    """A policy whose scores and chances a test sets."""

    def __init__(self, chances: object, scores: object | None = None) -> None:
        self.chances_LE = np.array(chances, dtype=np.float32)
        self.scores_LE = np.array(chances if scores is None else scores, dtype=np.float32)

    def begin_step(self, step: Step) -> None: ...

    def touch(self, moe_layer_idx: int, experts: object, counts: object = 1) -> None: ...

    def scores(self) -> np.ndarray:
        return self.scores_LE

    def chances(self) -> np.ndarray:
        return self.chances_LE


def load(table: ResidencyTable, *keys: ExpertKey) -> None:
    for key in keys:
        table.begin_load(key, DECODE)
        table.finish_load(key)


def chances_of(likely: dict[tuple[int, int], float]) -> np.ndarray:
    chances_LE = np.zeros((NUM_LAYERS, NUM_EXPERTS))
    for cell, chance in likely.items():
        chances_LE[cell] = chance
    return chances_LE


def planned(
    likely: dict[tuple[int, int], float], layer: int = 0, *, load_s: float = 1.0,
    layer_s: float = 10.0, queued_s: float = 0.0,
) -> list[tuple[int, int]]:  # fmt: skip
    """A plan for an empty table with room for all."""
    policy = Fixed(chances_of(likely))
    planner = Planner(ResidencyTable(NUM_LAYERS * NUM_EXPERTS, policy), policy)
    return list(planner.plan(layer, load_s=load_s, layer_s=layer_s, queued_s=queued_s))


def test_an_expert_that_a_layer_does_not_have_is_never_planned():
    policy = Fixed(chances_of({(1, 0): 0.9, (1, 4): 0.9}))
    exists_LE = np.ones((NUM_LAYERS, NUM_EXPERTS), dtype=bool)
    exists_LE[1, 4] = False
    planner = Planner(ResidencyTable(NUM_LAYERS * NUM_EXPERTS, policy), policy, exists_LE)
    assert planner.plan(0, load_s=1.0, layer_s=10.0, queued_s=0.0) == [ExpertKey(1, 0)]


# Any plan


class Case(NamedTuple):
    policy: Fixed
    table: ResidencyTable
    layer: int  # whose experts are held, some of them
    held: list[ExpertKey]
    load_s: float
    layer_s: float
    queued_s: float

    def plan(self) -> list[ExpertKey]:
        times = {"load_s": self.load_s, "layer_s": self.layer_s, "queued_s": self.queued_s}
        return Planner(self.table, self.policy).plan(self.layer, **times)

    def value(self, key: ExpertKey) -> float:
        """Its chance, times the waiting that beginning it now saves."""
        layers_ahead = (key.moe_layer_idx - self.layer) % NUM_LAYERS or NUM_LAYERS
        saved_s = min(layers_ahead * self.layer_s - self.queued_s, self.load_s)
        return float(self.policy.chances_LE[key]) * max(saved_s, 0)


@st.composite
def cases(draw) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    chances_LE = rng.choice([0, 0.05, MIN_CHANCE, 0.3, 0.9], (NUM_LAYERS, NUM_EXPERTS))
    chances_LE *= rng.uniform(1, 1.1, chances_LE.shape)
    policy = Fixed(chances_LE, chances_LE + rng.uniform(-0.3, 0.3, chances_LE.shape))
    num_slots = draw(st.integers(4, NUM_LAYERS * NUM_EXPERTS))
    table = ResidencyTable(num_slots, policy)
    layer = draw(st.integers(0, NUM_LAYERS - 1))
    keys = [ExpertKey(*divmod(int(c), NUM_EXPERTS)) for c in rng.permutation(chances_LE.size)]
    present = keys[: draw(st.integers(0, num_slots))]
    for number, key in enumerate(present):
        table.begin_load(key, Phase.PREFILL if number % 4 == 1 else DECODE)
        if number % 5:
            table.finish_load(key)
    held = [key for key in present if key.moe_layer_idx == layer]
    layer_s = draw(st.sampled_from([0.25, 1.0, 3.0]))
    load_s = draw(st.sampled_from([0.5, 1.0, 4.0]))
    queued_s = draw(st.sampled_from([0.0, 0.5, 1.0, 2.5]))
    return Case(policy, table, layer, held, load_s, layer_s, queued_s)


@settings(max_examples=300)
@given(case=cases())
def test_a_plan_names_only_what_is_absent_and_likely_the_most_useful_first(case):
    plan = case.plan()
    assert len(set(plan)) == len(plan)
    for key in plan:
        assert case.table.lookup(key) is None
        assert case.policy.chances_LE[key] >= MIN_CHANCE * 0.9999
    values = [case.value(key) for key in plan]
    assert all(value > 0 for value in values)
    assert all(one >= other * 0.9999 for one, other in zip(values, values[1:], strict=False))


@settings(max_examples=300)
@given(case=cases())
def test_a_plan_is_no_longer_than_the_link_can_begin_in_the_time_of_a_layer(case):
    assert len(case.plan()) <= max(ceil((case.layer_s - case.queued_s) / case.load_s), 0)


@settings(max_examples=300)
@given(case=cases())
def test_a_plan_leaves_most_slots_to_what_is_asked_for(case):
    plan, table = case.plan(), case.table
    assert not plan or table.num_loading + len(plan) <= table.num_slots // LOADING_SHARE


@settings(max_examples=300)
@given(case=cases())
def test_a_plan_can_be_carried_out_and_takes_nothing_scored_higher_nor_held(case):
    table, scores_LE = case.table, case.policy.scores_LE
    with table.holding(case.held, DECODE):
        transient = {key for key in table.resident_keys() if table._entries[key].is_transient}
        for key in case.plan():
            before = set(table.resident_keys())
            table.begin_prefetch(key)
            table.check_invariants()
            for victim in before - set(table.resident_keys()):
                assert victim in transient or scores_LE[victim] < scores_LE[key]
        assert all(table.lookup(key) is not None for key in case.held)


@settings(max_examples=200)
@given(case=cases())
def test_a_plan_leaves_out_nothing_that_is_more_useful_and_has_free_room(case):
    """In a table with room for all, the best absent experts are planned, whatever their score."""
    table = ResidencyTable(NUM_LAYERS * NUM_EXPERTS, case.policy)
    load(table, *case.table.resident_keys())
    case = case._replace(table=table)
    absent = [ExpertKey(*cell) for cell in np.ndindex(NUM_LAYERS, NUM_EXPERTS)]
    absent = [key for key in absent if table.lookup(key) is None]
    worth = [case.value(k) for k in absent if case.policy.chances_LE[k] >= MIN_CHANCE]
    best = sorted((value for value in worth if value > 0), reverse=True)
    num = ceil((case.layer_s - case.queued_s) / case.load_s)
    num = max(min(num, table.num_slots // LOADING_SHARE), 0)
    assert [case.value(key) for key in case.plan()] == pytest.approx(best[:num], rel=1e-5)


# By hand


def test_the_next_layer_is_as_good_as_any_when_there_is_time_and_the_likelier_comes_first():
    assert planned({(1, 2): 0.5, (2, 0): 0.9, (3, 1): 0.2}) == [(2, 0), (1, 2), (3, 1)]


def test_what_cannot_arrive_in_time_is_worth_only_the_waiting_it_shortens():
    """A load takes 4, a layer 1: for the next layer it saves 1 of 4 seconds, 3 layers ahead 3."""
    likely = {(1, 0): 0.9, (3, 0): 0.5}
    assert planned(likely, load_s=0.9, layer_s=1.0)[0] == (1, 0)
    assert planned(likely, load_s=4.0, layer_s=1.0) == [(3, 0)]


@pytest.mark.parametrize(("layer_s", "num"), [(0.5, 1), (1.0, 1), (2.5, 3), (3.0, 3)])
def test_as_many_loads_are_planned_as_the_link_begins_before_the_next_layer(layer_s, num):
    likely = dict.fromkeys(product(range(NUM_LAYERS), range(NUM_EXPERTS)), 0.5)
    assert len(planned(likely, load_s=1.0, layer_s=layer_s)) == num


@pytest.mark.parametrize("queued_s", [10.0, 11.0])
def test_nothing_is_planned_while_the_link_is_busy_until_the_next_layer(queued_s):
    assert planned({(1, 0): 1.0}, queued_s=queued_s) == []
    assert planned({(1, 0): 1.0}, queued_s=9.5) == [(1, 0)]


def test_nothing_is_planned_below_the_least_chance():
    assert planned({(1, 0): MIN_CHANCE - 0.01, (1, 1): MIN_CHANCE + 0.01}) == [(1, 1)]


def test_after_the_last_layer_come_the_first_layers_of_the_next_step():
    likely = {(0, 1): 0.9, (3, 2): 0.4}
    assert planned(likely, layer=3, load_s=2.0, layer_s=1.0) == [(0, 1)]
    assert planned({(0, 1): 0.5, (1, 2): 0.5}, layer=3, load_s=2.0, layer_s=1.0) == [(1, 2)]


def test_the_layer_that_runs_is_planned_for_the_next_step_not_for_this():
    assert planned({(1, 0): 0.5, (2, 0): 0.5}, layer=1, load_s=4.0, layer_s=1.0) == [(1, 0)]


def test_an_expert_is_not_planned_over_residents_that_all_score_higher():
    residents = [ExpertKey(2, expert_idx) for expert_idx in range(4)]
    scores = chances_of({(1, 0): 0.5} | dict.fromkeys(residents, 0.6))
    policy = Fixed(chances_of({(1, 0): 0.9}), scores)
    table = ResidencyTable(4, policy)
    load(table, *residents)
    planner = Planner(table, policy)
    assert planner.plan(0, load_s=1.0, layer_s=10.0, queued_s=0.0) == []
    policy.scores_LE[2, 0] = 0.45
    assert planner.plan(0, load_s=1.0, layer_s=10.0, queued_s=0.0) == [ExpertKey(1, 0)]


def test_the_victim_of_an_expert_that_is_refused_is_left_to_the_next_one():
    """(1, 0) is the likeliest but scores lower than any resident; (1, 1) outranks one of them."""
    residents = [ExpertKey(layer, expert_idx) for layer in (2, 3) for expert_idx in range(4)]
    scores = chances_of(dict.fromkeys(residents, 0.6) | {(2, 0): 0.3, (1, 0): 0.2, (1, 1): 0.5})
    policy = Fixed(chances_of({(1, 0): 0.9, (1, 1): 0.8}), scores)
    table = ResidencyTable(8, policy)
    load(table, *residents)
    plan = Planner(table, policy).plan(0, load_s=1.0, layer_s=10.0, queued_s=0.0)
    assert plan == [ExpertKey(1, 1)]


def test_nothing_is_planned_when_every_slot_is_held_or_loading():
    policy = Fixed(chances_of({(1, 0): 0.9}))
    table = ResidencyTable(4 * LOADING_SHARE, policy)
    keys = [ExpertKey(layer, expert_idx) for layer in (0, 2, 3) for expert_idx in range(5)]
    load(table, *keys)
    table.begin_load(ExpertKey(1, 1), DECODE)
    with table.holding(keys, DECODE):
        assert Planner(table, policy).plan(0, load_s=1.0, layer_s=10.0, queued_s=0.0) == []


@pytest.mark.parametrize("name", POLICY_CLASSES)
def test_a_policy_that_predicts_nothing_cannot_prefetch(name):
    policy = make_policy(name, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_slots=2)
    with pytest.raises(ConfigError, match="predicts nothing"):
        Planner(ResidencyTable(2, policy), policy)
