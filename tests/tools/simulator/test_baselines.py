"""The simulator's baselines order experts as a naive implementation does that walks through the
whole history. The policy "moe-infinity-v3" has tests of its own.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_infinity.cache import policies
from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey
from moe_infinity.tools.simulator.baselines import (
    BASELINES,
    PROTECTED,
    SIMULATED_POLICIES,
    Neighbor,
    PerLayerLru,
    TokenCounts,
    make_policy,
)
from tests.cache.histories import (
    DECODE,
    KEYS,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_SLOTS,
    PREFILL,
    History,
    Use,
    assert_chooses_a_victim_of,
    assert_loops_over_no_experts,
    assert_orders_every_pair_as,
    assert_shares_nothing,
    few_examples,
    histories,
    last_use,
    replay,
)

SHARES = [2, 2, 1, 1, 1]  # of the slots, by layer


def is_near_then_recency(history: History, key: ExpertKey) -> tuple[bool, int]:
    current = history[-1].moe_layer_idx if history else 0
    near = [(current + ahead) % NUM_LAYERS for ahead in range(3)]
    return key.moe_layer_idx in near, last_use(history, key)


def is_in_share_then_recency(history: History, key: ExpertKey) -> tuple[bool, int]:
    """Of experts used at the same time the lower id counts as the more recent."""
    mine = last_use(history, key)
    layer = [ExpertKey(key.moe_layer_idx, expert) for expert in range(NUM_EXPERTS)]
    rank = sorted(layer, key=lambda other: -last_use(history, other)).index(key)
    return mine >= 0 and rank < SHARES[key.moe_layer_idx], mine


def share_of_tokens(history: History, key: ExpertKey) -> Fraction:
    of_layer = [use.tokens for use in history if use.moe_layer_idx == key.moe_layer_idx]
    total = sum(sum(tokens.values()) for tokens in of_layer)
    return Fraction(sum(tokens.get(key.expert_idx, 0) for tokens in of_layer), max(total, 1))


NAIVE = {
    "neighbor": is_near_then_recency,
    "per-layer-lru": is_in_share_then_recency,
    "counts": share_of_tokens,
}


def make(name: str) -> EvictionPolicy:
    return make_policy(name, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_slots=NUM_SLOTS)


def test_every_baseline_has_a_naive_twin():
    assert {*NAIVE, "moe-infinity-v3"} == BASELINES.keys()


def test_the_simulator_has_the_policies_of_the_engine_and_more():
    assert {*policies.POLICIES} < {*SIMULATED_POLICIES}
    assert type(make("lru")) is policies.Lru


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


@pytest.mark.parametrize("name", BASELINES)
def test_each_model_gets_a_policy_of_its_own(name):
    assert_shares_nothing(make(name), make(name))


@pytest.mark.parametrize("name", BASELINES)
def test_no_policy_loops_over_experts(name):
    assert_loops_over_no_experts(make(name))


# Neighbor: the layers that come next


@pytest.mark.parametrize(
    ("layer", "kept"), [(0, {0, 1, 2}), (2, {2, 3, 4}), (3, {3, 4, 0}), (4, {4, 0, 1})]
)
def test_the_running_layer_and_the_two_after_it_outrank_all_others(layer, kept):
    policy = Neighbor(NUM_LAYERS, NUM_EXPERTS, num_slots=NUM_SLOTS)
    replay(policy, [Use(other, {0: 1}) for other in range(NUM_LAYERS) if other != layer])
    policy.touch(layer, [0])
    scores = policy.scores()
    others = set(range(NUM_LAYERS)) - kept
    assert scores[list(kept)].min() > scores[list(others)].max()


def test_a_model_of_two_layers_is_all_neighbors():
    policy = Neighbor(2, 1, num_slots=1)
    replay(policy, [Use(1, {0: 1}), Use(0, {0: 1})])
    assert np.ptp(policy.scores()) == 1  # one tick of the clock: both layers are protected once


# Every layer owns its share of the slots


def use_in(
    table: ResidencyTable, policy: EvictionPolicy, moe_layer_idx: int, *experts: int
) -> None:
    """What the runtime does with one layer whose experts fit into the slots."""
    policy.touch(moe_layer_idx, experts)
    with table.holding([ExpertKey(moe_layer_idx, expert) for expert in experts], DECODE) as held:
        for key in held.absent:
            table.finish_load(key)
    table.check_invariants()


def test_a_layer_evicts_its_own_oldest_not_the_oldest_of_all():
    policy = PerLayerLru(2, 4, num_slots=4)
    table = ResidencyTable(4, policy)
    for expert in (0, 1):
        use_in(table, policy, 1, expert)  # the oldest, but layer 1 is within its share
    for expert in (0, 1, 2):
        use_in(table, policy, 0, expert)
    assert set(table.resident_keys()) == {(1, 0), (1, 1), (0, 1), (0, 2)}


def test_the_slots_that_layers_cannot_share_equally_go_to_the_first_layers():
    policy = PerLayerLru(3, 2, num_slots=4)
    for layer in range(3):
        for expert in (0, 1):
            policy.touch(layer, [expert])
    is_protected = policy.scores() >= PROTECTED
    assert is_protected.tolist() == [[True, True], [False, True], [False, True]]


def test_a_layer_that_activates_more_than_its_share_borrows_the_oldest_slot():
    policy = PerLayerLru(2, 4, num_slots=4)
    table = ResidencyTable(4, policy)
    for layer, expert in [(1, 0), (1, 1), (0, 0), (0, 1)]:
        use_in(table, policy, layer, expert)
    use_in(table, policy, 0, 0, 1, 2)
    assert set(table.resident_keys()) == {(1, 1), (0, 0), (0, 1), (0, 2)}
    use_in(table, policy, 1, 0)  # and gives it back
    assert {(1, 0), (1, 1)} <= set(table.resident_keys())


# Counts of tokens over the whole run


def test_counts_are_of_tokens_in_both_phases_and_outlive_requests():
    policy = TokenCounts(2, 2, num_slots=1)
    replay(policy, [Use(0, {0: 6, 1: 1}, PREFILL, True), Use(0, {1: 1}, DECODE, True)])
    assert policy.scores().tolist() == [[6 / 8, 2 / 8], [0, 0]]


def test_counts_compare_shares_of_a_layer_not_numbers():
    policy = TokenCounts(2, 2, num_slots=1)
    replay(policy, [Use(0, {0: 5, 1: 5}), Use(1, {0: 2, 1: 1})])
    assert policy.scores()[1, 0] > policy.scores()[0, 0]
