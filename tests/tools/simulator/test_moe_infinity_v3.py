"""The paper's cache gives the scores its formulas give by hand.

The toy has 3 layers of 2 experts. From the paper's Figure 6: the request EAM
[[1, 2], [0, 3], [0, 3]], the two slots, and that E[2, 2] (here layer 1, expert 1) must stay.
Ours: the other request, which used only the first expert of each layer, and the order of events.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey, Phase, Step
from moe_infinity.tools.simulator.baselines import EPSILON, MoeInfinityV3, make_policy

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
L, E = 3, 2
FLOAT32 = 1e-7  # precision of what is stored; EPSILON is below it

Route = Sequence[int]  # the expert each layer activates in one step (top-1)
PAPERS = [(0, 1, 1), (1, 1, 1), (1, 1, 1)]  # EAM [[1, 2], [0, 3], [0, 3]]
OTHERS = [(0, 0, 0)] * 4  # EAM [[4, 0], [4, 0], [4, 0]]


def begin(policy: EvictionPolicy, phase: Phase = DECODE, *, request: bool = False) -> None:
    policy.begin_step(Step(phase, 1, 1, begins_B=np.array([request])))


def run_request(policy: EvictionPolicy, routes: Sequence[Route]) -> None:
    begin(policy, PREFILL, request=True)
    for layer in range(L):
        policy.touch(layer, [0, 1], np.array([5, 5]))
    for route in routes:
        begin(policy)
        for layer, expert in enumerate(route):
            policy.touch(layer, [expert])


@pytest.fixture
def policy() -> EvictionPolicy:
    """Has seen both requests."""
    return having_seen("moe-infinity-v3")


def having_seen(name: str) -> EvictionPolicy:
    policy = make_policy(name, num_layers=L, num_experts=E, num_slots=2)
    run_request(policy, PAPERS)
    run_request(policy, OTHERS)
    begin(policy, PREFILL, request=True)
    return policy


# PredictEAM and Algorithm 1


def test_the_likelihood_is_that_of_the_most_similar_request(policy):
    """Layer 0 routes to expert 1, which only the paper's EAM does: pEAM is [[1/3, 2/3], [0, 1], [0,
    1]], its row 1 times 1 - 1/3, its row 2 times 1 - 2/3. Divided by the row sums 1, 2/3, 1/3 and
    times the decay 1, 2/3, 1/3 of the cache.
    """
    begin(policy)
    policy.touch(0, [1])
    assert_allclose(policy.scores(), [[1 / 3, 2 / 3], [0, 2 / 3], [0, 1 / 3]], atol=FLOAT32)


def test_an_expert_predicted_unused_scores_epsilon_times_decay_over_layer_sum(policy):
    """Running layer 1: layer 1 keeps its sum 1, layer 2 is one layer ahead and sums to 2/3."""
    begin(policy)
    policy.touch(0, [1])
    policy.touch(1, [1])
    assert_allclose(policy.scores()[1, 0], EPSILON * (2 / 3) / 1, rtol=1e-6)
    assert_allclose(policy.scores()[2, 0], EPSILON * (1 / 3) / (2 / 3), rtol=1e-6)


def test_the_layers_observed_so_far_decide_the_match_together(policy):
    """Layer 0 to expert 0, layers 1 and 2 to expert 1. Layer 0 alone is like the other request
    (cosine 1 / sqrt(3) against 1/3 / sqrt(23/9)), all layers are like the paper's.
    """
    begin(policy)
    policy.touch(0, [0])
    assert policy.scores()[1].argmax() == 0
    policy.touch(1, [1])
    policy.touch(2, [1])
    assert policy.scores()[1].argmax() == 1


def test_every_step_starts_its_own_match(policy):
    begin(policy)
    for layer in range(L):
        policy.touch(layer, [1])
    begin(policy)
    policy.touch(0, [0])
    assert policy.scores()[1].argmax() == 0


def test_while_nothing_is_collected_only_the_layer_counts():
    policy = make_policy("moe-infinity-v3", num_layers=L, num_experts=E, num_slots=2)
    run_request(policy, PAPERS)
    likely = 1 / 2 + EPSILON
    last_layer = policy.scores()[2].tolist()
    assert_allclose(policy.scores(), np.outer([1, 2 / 3, 1 / 3], [likely, likely]))
    assert last_layer[0] == last_layer[1]


@pytest.mark.parametrize(("counts", "predicted"), [([1, 1], 1), ([3, 1], 0)])
def test_the_tokens_of_all_sequences_count_in_the_match(policy, counts, predicted):
    """Layer 0 of the query against [1/3, 2/3] of norm sqrt(23/9) and [1, 0] of norm sqrt(3): 0.63
    and 0.58 for one token each, 1.04 and 1.73 for three and one.
    """
    begin(policy)
    policy.touch(0, [0, 1], np.array(counts))
    assert policy.scores()[1].argmax() == predicted


# What enters the collection, and when


def test_the_tokens_of_all_sequences_enter_the_collection():
    policy = make_policy("moe-infinity-v3", num_layers=L, num_experts=E, num_slots=2)
    begin(policy, request=True)
    for layer in range(L):
        policy.touch(layer, [0, 1], np.array([3, 1]))
    begin(policy, request=True)
    policy.touch(0, [1])
    assert_allclose(policy.scores()[0], [3 / 4, 1 / 4], atol=FLOAT32)


def test_a_request_is_matched_from_the_next_one_on():
    policy = make_policy("moe-infinity-v3", num_layers=L, num_experts=E, num_slots=2)
    run_request(policy, OTHERS)
    assert policy.scores()[1].tolist() == policy.scores()[1, ::-1].tolist()
    begin(policy, request=True)
    policy.touch(0, [1])
    assert policy.scores()[1].argmax() == 0


def test_prefill_changes_no_score_and_is_not_collected(policy):
    begin(policy)
    policy.touch(0, [1])
    before = policy.scores().copy()
    for _ in range(2):
        begin(policy, PREFILL, request=True)
        for layer in range(L):
            policy.touch(layer, [0], np.array([100]))
        assert (policy.scores() == before).all()
    begin(policy)
    policy.touch(0, [0])
    assert_allclose(policy.scores()[1], [2 / 3, 0], atol=FLOAT32)


def test_scores_kept_through_prefill_are_those_before_the_collection_grew():
    asked, not_asked = having_seen("moe-infinity-v3"), having_seen("moe-infinity-v3")
    for policy in (asked, not_asked):
        begin(policy)
        policy.touch(0, [1])
    asked.scores()
    for policy in (asked, not_asked):
        begin(policy, PREFILL, request=True)
    assert (asked.scores() == not_asked.scores()).all()


def test_a_request_cut_short_in_its_first_step_leaves_scores_finite():
    policy = make_policy("moe-infinity-v3", num_layers=L, num_experts=E, num_slots=2)
    begin(policy, request=True)
    policy.touch(0, [1])
    begin(policy, request=True)
    policy.touch(0, [1])
    unused = EPSILON * np.array([[2 / 3, 2 / 3], [1 / 3, 1 / 3]])
    assert_allclose(policy.scores()[0], [0, 1], atol=FLOAT32)
    assert_allclose(policy.scores()[1:], unused)


def test_scores_are_computed_when_asked_and_kept_until_the_next_touch(policy, monkeypatch):
    begin(policy)
    policy.touch(0, [1])
    scores = policy.scores()
    assert policy.scores() is scores
    monkeypatch.delattr(MoeInfinityV3, "_predict")
    policy.touch(1, [1])
    with pytest.raises(AttributeError, match="_predict"):
        policy.scores()


# Against the formulas, written with loops

routes = st.lists(st.lists(st.integers(0, E - 1), min_size=L, max_size=L), min_size=1, max_size=4)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


def algorithm_1(matched: np.ndarray, current: int) -> np.ndarray:
    """Scores as v3 prints them: PredictEAM of one match, then p(e)."""
    scores = np.zeros((L, E))
    for layer in range(L):
        likelihood = [count / sum(matched[layer]) for count in matched[layer]]
        if layer > current:
            likelihood = [value * (1 - (layer - current) / L) for value in likelihood]
        for expert in range(E):
            p = (likelihood[expert] + EPSILON) * (1 - layer / L) / sum(likelihood)
            scores[layer, expert] = p
    return scores


@settings(max_examples=100)
@given(
    past=st.lists(routes, min_size=1, max_size=4),
    route=st.lists(st.integers(0, E - 1), min_size=1, max_size=L),
)
def test_scores_are_algorithm_1_on_the_nearest_past_request(past, route):
    policy = make_policy("moe-infinity-v3", num_layers=L, num_experts=E, num_slots=2)
    for request in past:
        run_request(policy, request)
    begin(policy, request=True)
    for layer, expert in enumerate(route):
        policy.touch(layer, [expert])
    query = np.zeros((L, E))
    query[np.arange(len(route)), route] = 1
    eams = [sum(np.eye(E)[np.array(step)] for step in request) for request in past]
    similarities = np.array([cosine(query, eam) for eam in eams])
    nearest = (similarities > similarities.max() - 1e-9).nonzero()[0]  # any of them will do
    wanted = [algorithm_1(eams[idx], current=len(route) - 1) for idx in nearest]
    assert any(np.allclose(policy.scores(), scores, rtol=1e-6, atol=0) for scores in wanted)


# Figure 6: two slots, and the expert needed next is in one of them


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [("moe-infinity-v3", True), ("lru", False), ("neighbor", False), ("counts", False)],
)
def test_only_the_match_keeps_the_expert_needed_next(name, is_kept):
    """Both experts of layer 1 are resident when layer 0 misses E[1, 2]. The last request used
    E[2, 1] more recently and more often; the present one follows the paper's EAM and needs E[2, 2]
    next.
    """
    policy = having_seen(name)
    table = ResidencyTable(2, policy)
    for expert in (0, 1):
        table.begin_load(ExpertKey(1, expert), DECODE)
        table.finish_load(ExpertKey(1, expert))
    begin(policy)
    policy.touch(0, [1])
    with table.holding([ExpertKey(0, 1)], DECODE):
        table.finish_load(ExpertKey(0, 1))
    assert (ExpertKey(1, 1) in table.resident_keys()) is is_kept
