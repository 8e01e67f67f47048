"""Policies order experts as a naive implementation does that walks through the whole history.

The policy "activation-aware" has tests of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_infinity.cache.policies import (
    POLICY_CLASSES,
    EvictionPolicy,
    Lfu,
    Lru,
    RequestLfu,
    make_policy,
)
from moe_infinity.experts import Step
from tests.cache.histories import (
    DECODE,
    KEYS,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_SLOTS,
    PREFILL,
    Use,
    assert_chooses_a_victim_of,
    assert_loops_over_no_experts,
    assert_orders_every_pair_as,
    assert_shares_nothing,
    few_examples,
    histories,
    last_use,
    num_uses,
    order,
    replay,
    step,
    uses_in_request_then_recency,
)

NAIVE = {"lru": last_use, "lfu": num_uses, "request-lfu": uses_in_request_then_recency}


def make(name: str) -> EvictionPolicy:
    return make_policy(name, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_slots=NUM_SLOTS)


def test_every_policy_has_a_naive_twin():
    assert NAIVE.keys() == POLICY_CLASSES.keys()


@pytest.mark.parametrize("name", NAIVE)
@few_examples
@given(history=histories)
def test_scores_order_every_pair_of_experts_as_the_naive_policy_does(name, history):
    assert_orders_every_pair_as(NAIVE[name], make(name), history)


@pytest.mark.parametrize("name", NAIVE)
@few_examples
@given(history=histories, newcomer=st.sampled_from(KEYS))
def test_the_victim_is_one_the_naive_policy_would_choose(name, history, newcomer):
    assert_chooses_a_victim_of(NAIVE[name], make(name), history, newcomer)


@pytest.mark.parametrize("name", POLICY_CLASSES)
def test_each_model_gets_a_policy_of_its_own(name):
    assert_shares_nothing(make(name), make(name))


@pytest.mark.parametrize("name", POLICY_CLASSES)
def test_no_policy_loops_over_experts(name):
    assert_loops_over_no_experts(make(name))


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
