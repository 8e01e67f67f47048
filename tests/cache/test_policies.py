"""Policies order experts as a naive implementation does that walks through the whole history."""

from __future__ import annotations

import ast
import inspect
import textwrap
from fractions import Fraction
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.cache.policies import (
    BASELINES,
    PROTECTED,
    EvictionPolicy,
    Lfu,
    Lru,
    Neighbor,
    PerLayerLru,
    RequestLfu,
    TokenCounts,
    make_policy,
)
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey, Phase
from moe_infinity.predict.recorder import Step

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
NUM_ROWS, NUM_EXPERTS, NUM_SLOTS = 5, 4, 7
SHARES = [2, 2, 1, 1, 1]  # of the slots, by row
KEYS = [ExpertKey(row, expert) for row in range(NUM_ROWS) for expert in range(NUM_EXPERTS)]


class Use(NamedTuple):
    """A step and one touch in it."""

    moe_layer_idx: int
    tokens: dict[int, int]  # by expert activated
    phase: Phase = DECODE
    begins_request: bool = False


History = list[Use]

histories = st.lists(
    st.builds(
        Use,
        st.integers(0, NUM_ROWS - 1),
        st.dictionaries(st.integers(0, NUM_EXPERTS - 1), st.integers(1, 3), min_size=1),
        st.sampled_from(Phase),
        st.booleans(),
    ),
    max_size=20,
)
few_examples = settings(max_examples=60)


def step(phase: Phase = DECODE, *, begins: bool = False) -> Step:
    return Step(phase, 1, 1, begins_B=np.array([begins]))


def replay(policy: EvictionPolicy, history: History) -> None:
    for moe_layer_idx, tokens, phase, begins_request in history:
        policy.begin_step(step(phase, begins=begins_request))
        policy.touch(moe_layer_idx, np.array(list(tokens)), np.array(list(tokens.values())))


def order(policy: EvictionPolicy, moe_layer_idx: int) -> list[int]:
    """The experts of a row, the first to leave first."""
    return policy.scores()[moe_layer_idx].argsort().tolist()


# What each policy means, in terms of the whole history


def last_use(history: History, key: ExpertKey) -> int:
    """Position in the history, -1 for never."""
    times = [time for time, use in enumerate(history) if is_use(use, key)]
    return max(times, default=-1)


def is_use(use: Use, key: ExpertKey) -> bool:
    return use.moe_layer_idx == key.moe_layer_idx and key.expert_idx in use.tokens


def num_uses(history: History, key: ExpertKey) -> int:
    return sum(is_use(use, key) for use in history)


def uses_in_request_then_recency(history: History, key: ExpertKey) -> tuple[int, int]:
    begins = [time for time, use in enumerate(history) if use.begins_request]
    running = history[max(begins, default=0) :]
    return num_uses([use for use in running if use.phase is DECODE], key), last_use(history, key)


def is_near_then_recency(history: History, key: ExpertKey) -> tuple[bool, int]:
    current = history[-1].moe_layer_idx if history else 0
    near = [(current + ahead) % NUM_ROWS for ahead in range(3)]
    return key.moe_layer_idx in near, last_use(history, key)


def is_in_share_then_recency(history: History, key: ExpertKey) -> tuple[bool, int]:
    """Of experts used at the same time the lower id counts as the more recent."""
    mine = last_use(history, key)
    row = [ExpertKey(key.moe_layer_idx, expert) for expert in range(NUM_EXPERTS)]
    rank = sorted(row, key=lambda other: -last_use(history, other)).index(key)
    return mine >= 0 and rank < SHARES[key.moe_layer_idx], mine


def share_of_tokens(history: History, key: ExpertKey) -> Fraction:
    of_row = [use.tokens for use in history if use.moe_layer_idx == key.moe_layer_idx]
    total = sum(sum(tokens.values()) for tokens in of_row)
    return Fraction(sum(tokens.get(key.expert_idx, 0) for tokens in of_row), max(total, 1))


NAIVE: dict[str, Any] = {
    "lru": last_use,
    "lfu": num_uses,
    "request-lfu": uses_in_request_then_recency,
    "neighbor": is_near_then_recency,
    "per-layer-lru": is_in_share_then_recency,
    "counts": share_of_tokens,
}
TESTED_ELSEWHERE = {"moe-infinity-v3"}


def make(name: str) -> EvictionPolicy:
    return make_policy(name, num_rows=NUM_ROWS, num_experts=NUM_EXPERTS, num_slots=NUM_SLOTS)


@pytest.mark.parametrize("name", NAIVE)
@few_examples
@given(history=histories)
def test_scores_order_every_pair_of_experts_as_the_naive_policy_does(name, history):
    policy = make(name)
    replay(policy, history)
    scores = policy.scores()
    assert scores.shape == (NUM_ROWS, NUM_EXPERTS)
    naive = {key: NAIVE[name](history, key) for key in KEYS}
    for a, b in combinations(KEYS, 2):
        wanted = (naive[a] > naive[b]) - (naive[a] < naive[b])
        assert np.sign(scores[a] - scores[b]) == wanted, (a, b)


@pytest.mark.parametrize("name", NAIVE)
@few_examples
@given(history=histories, newcomer=st.sampled_from(KEYS))
def test_the_victim_is_one_the_naive_policy_would_choose(name, history, newcomer):
    policy = make(name)
    residents = [key for key in KEYS if key != newcomer]
    table = ResidencyTable(len(residents), policy)
    for key in residents:
        table.begin_load(key, DECODE)
        table.finish_load(key)
    replay(policy, history)
    table.begin_load(newcomer, DECODE)
    (victim,) = set(residents) - set(table.resident_keys())
    assert NAIVE[name](history, victim) == min(NAIVE[name](history, key) for key in residents)


def test_lru_forgets_how_often_and_lfu_forgets_when():
    history = [Use(0, {1: 1}), Use(0, {1: 1}), Use(0, {2: 1})]
    lru, lfu = Lru(1, 3, num_slots=1), Lfu(1, 3, num_slots=1)
    replay(lru, history)
    replay(lfu, history)
    assert order(lru, 0) == [0, 1, 2]
    assert order(lfu, 0) == [0, 2, 1]


def test_a_new_request_starts_from_the_order_of_last_uses():
    policy = RequestLfu(1, 3, num_slots=1)
    replay(policy, [Use(0, {0: 1}), Use(0, {0: 1}), Use(0, {1: 1})])
    assert order(policy, 0) == [2, 1, 0]
    policy.begin_step(step(PREFILL, begins=True))
    assert order(policy, 0) == [2, 0, 1]


def test_prefill_counts_as_recency_but_not_as_use():
    policy = RequestLfu(1, 3, num_slots=1)
    replay(policy, [Use(0, {0: 9}, PREFILL), Use(0, {1: 1}), Use(0, {0: 9, 2: 9}, PREFILL)])
    assert policy.scores()[0].astype(int).tolist() == [0, 1, 0]


def test_one_new_sequence_of_a_batch_begins_a_request():
    policy = RequestLfu(1, 2, num_slots=1)
    replay(policy, [Use(0, {0: 1}), Use(0, {0: 1})])
    policy.begin_step(Step(DECODE, 2, 1, begins_B=np.array([False, True])))
    policy.touch(0, [1])
    assert order(policy, 0) == [0, 1]


# Neighbor: the rows that come next


@pytest.mark.parametrize(
    ("row", "kept"), [(0, {0, 1, 2}), (2, {2, 3, 4}), (3, {3, 4, 0}), (4, {4, 0, 1})]
)
def test_the_running_row_and_the_two_after_it_outrank_all_others(row, kept):
    policy = Neighbor(NUM_ROWS, NUM_EXPERTS, num_slots=NUM_SLOTS)
    replay(policy, [Use(other, {0: 1}) for other in range(NUM_ROWS) if other != row])
    policy.touch(row, [0])
    scores = policy.scores()
    others = set(range(NUM_ROWS)) - kept
    assert scores[list(kept)].min() > scores[list(others)].max()


def test_a_model_of_two_rows_is_all_neighbors():
    policy = Neighbor(2, 1, num_slots=1)
    replay(policy, [Use(1, {0: 1}), Use(0, {0: 1})])
    assert np.ptp(policy.scores()) == 1  # one tick of the clock: both rows are protected once


# Every row owns its share of the slots


def use_in(
    table: ResidencyTable, policy: EvictionPolicy, moe_layer_idx: int, *experts: int
) -> None:
    """What the runtime does with one row whose experts fit into the slots."""
    policy.touch(moe_layer_idx, experts)
    with table.holding([ExpertKey(moe_layer_idx, expert) for expert in experts], DECODE) as held:
        for key in held.absent:
            table.finish_load(key)
    table.check_invariants()


def test_a_row_evicts_its_own_oldest_not_the_oldest_of_all():
    policy = PerLayerLru(2, 4, num_slots=4)
    table = ResidencyTable(4, policy)
    for expert in (0, 1):
        use_in(table, policy, 1, expert)  # the oldest, but row 1 is within its share
    for expert in (0, 1, 2):
        use_in(table, policy, 0, expert)
    assert set(table.resident_keys()) == {(1, 0), (1, 1), (0, 1), (0, 2)}


def test_the_slots_that_rows_cannot_share_equally_go_to_the_first_rows():
    policy = PerLayerLru(3, 2, num_slots=4)
    for row in range(3):
        for expert in (0, 1):
            policy.touch(row, [expert])
    is_protected = policy.scores() >= PROTECTED
    assert is_protected.tolist() == [[True, True], [False, True], [False, True]]


def test_a_row_that_activates_more_than_its_share_borrows_the_oldest_slot():
    policy = PerLayerLru(2, 4, num_slots=4)
    table = ResidencyTable(4, policy)
    for row, expert in [(1, 0), (1, 1), (0, 0), (0, 1)]:
        use_in(table, policy, row, expert)
    use_in(table, policy, 0, 0, 1, 2)
    assert set(table.resident_keys()) == {(1, 1), (0, 0), (0, 1), (0, 2)}
    use_in(table, policy, 1, 0)  # and gives it back
    assert {(1, 0), (1, 1)} <= set(table.resident_keys())


# Counts of tokens over the whole run


def test_counts_are_of_tokens_in_both_phases_and_outlive_requests():
    policy = TokenCounts(2, 2, num_slots=1)
    replay(policy, [Use(0, {0: 6, 1: 1}, PREFILL, True), Use(0, {1: 1}, DECODE, True)])
    assert policy.scores().tolist() == [[6 / 8, 2 / 8], [0, 0]]


def test_counts_compare_shares_of_a_row_not_numbers():
    policy = TokenCounts(2, 2, num_slots=1)
    replay(policy, [Use(0, {0: 5, 1: 5}), Use(1, {0: 2, 1: 1})])
    assert policy.scores()[1, 0] > policy.scores()[0, 0]


# All of them; activation-aware has tests of its own


@pytest.mark.parametrize("name", BASELINES)
def test_every_policy_has_a_naive_twin(name):
    assert name in NAIVE or name in TESTED_ELSEWHERE


@pytest.mark.parametrize("name", BASELINES)
def test_each_model_gets_a_policy_of_its_own(name):
    first, second = make(name), make(name)
    untouched = second.scores().copy()
    replay(first, [Use(0, {0: 1}), Use(0, {1: 2}, PREFILL, True), Use(1, {2: 1})])
    assert (second.scores() == untouched).all()


@pytest.mark.parametrize("name", [n for n in BASELINES if n != "moe-infinity-v3"])  # it matches
@few_examples
@given(history=histories, row=st.integers(0, NUM_ROWS - 1))
def test_scores_after_a_row_are_those_of_a_step_that_has_come_there(name, history, row):
    """Only what is running counts: nobody knows yet what the row will activate. An order, as the
    clock of some goes on.
    """
    policy = make(name)
    replay(policy, history)
    told = policy.scores_after(row).ravel().copy()
    policy.touch(row, [])
    found = policy.scores().ravel()
    assert (np.subtract.outer(told, told) > 0).tolist() == (
        np.subtract.outer(found, found) > 0
    ).tolist()


@pytest.mark.parametrize("name", BASELINES)
def test_no_policy_loops_over_experts(name):
    """Touches and scores are on the way of every token; building may take its time."""
    policy = ast.parse(textwrap.dedent(inspect.getsource(type(make(name)))))
    methods = [node for node in ast.walk(policy) if isinstance(node, ast.FunctionDef)]
    for method in methods:
        if method.name != "__init__":
            loops = ast.For | ast.While | ast.comprehension
            assert not any(isinstance(node, loops) for node in ast.walk(method)), method.name
