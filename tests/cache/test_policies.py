"""Policies order experts as a naive implementation does that walks through the whole history."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.cache.policies import POLICIES, EvictionPolicy, Lfu, Lru, make_policy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey, Phase

NUM_ROWS, NUM_EXPERTS = 2, 4
KEYS = [ExpertKey(row, expert) for row in range(NUM_ROWS) for expert in range(NUM_EXPERTS)]

Use = tuple[int, list[int]]  # MoE row, distinct experts activated in it
uses = st.tuples(
    st.integers(0, NUM_ROWS - 1),
    st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, unique=True),
)
histories = st.lists(uses, max_size=20)
few_examples = settings(max_examples=60, deadline=None, derandomize=True)


def replay(policy: EvictionPolicy, history: list[Use]) -> None:
    for moe_row, experts in history:
        policy.touch(moe_row, np.array(experts))


def last_use(history: list[Use], key: ExpertKey) -> int:
    """Position in the history, -1 for never."""
    return max(
        (
            time
            for time, (row, experts) in enumerate(history)
            if row == key[0] and key[1] in experts
        ),
        default=-1,
    )


def num_uses(history: list[Use], key: ExpertKey) -> int:
    return Counter((row, expert) for row, experts in history for expert in experts)[key]


NAIVE = {"lru": last_use, "lfu": num_uses}


@pytest.mark.parametrize("name", NAIVE)
@few_examples
@given(history=histories)
def test_scores_order_every_pair_of_experts_as_the_naive_policy_does(name, history):
    policy = make_policy(name, num_rows=NUM_ROWS, num_experts=NUM_EXPERTS)
    replay(policy, history)
    scores = policy.scores()
    assert scores.shape == (NUM_ROWS, NUM_EXPERTS)
    naive = {key: NAIVE[name](history, key) for key in KEYS}
    for a, b in combinations(KEYS, 2):
        assert np.sign(scores[a] - scores[b]) == np.sign(naive[a] - naive[b]), (a, b)


@pytest.mark.parametrize("name", NAIVE)
@few_examples
@given(history=histories, newcomer=st.sampled_from(KEYS))
def test_the_victim_is_one_the_naive_policy_would_choose(name, history, newcomer):
    policy = make_policy(name, num_rows=NUM_ROWS, num_experts=NUM_EXPERTS)
    residents = [key for key in KEYS if key != newcomer]
    table = ResidencyTable(len(residents), policy)
    for key in residents:
        table.begin_load(key, Phase.DECODE)
        table.finish_load(key)
    replay(policy, history)
    table.begin_load(newcomer, Phase.DECODE)
    (victim,) = set(residents) - set(table.resident_keys())
    assert NAIVE[name](history, victim) == min(NAIVE[name](history, key) for key in residents)


def test_lru_forgets_how_often_and_lfu_forgets_when():
    history: list[Use] = [(0, [1]), (0, [1]), (0, [2])]
    lru, lfu = Lru(1, 3), Lfu(1, 3)
    replay(lru, history)
    replay(lfu, history)
    assert lru.scores()[0].argsort().tolist() == [0, 1, 2]
    assert lfu.scores()[0].argsort().tolist() == [0, 2, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_naive_twin_here(name):
    assert name in NAIVE


@pytest.mark.parametrize("name", POLICIES)
def test_each_model_gets_a_policy_of_its_own(name):
    first = make_policy(name, num_rows=1, num_experts=2)
    second = make_policy(name, num_rows=1, num_experts=2)
    first.touch(0, np.array([0]))
    assert np.ptp(second.scores()) == 0
