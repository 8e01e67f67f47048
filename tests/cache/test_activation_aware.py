"""The default policy's score is its formula, for whatever chances it is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

from moe_infinity.cache.activation_aware import LEAST_CHANCE, ActivationAware
from moe_infinity.cache.policies import ACTIVATION_AWARE, POLICIES, make_policy
from moe_infinity.experts import Phase, Step
from moe_infinity.predict.planner import PredictingPolicy

DECODE_STEP = Step(Phase.DECODE, 1, 1, begins_B=np.array([False]))


class Told:
    """Chances that a test sets; `ahead` is what look_ahead makes of the next layer."""

    def __init__(self, next_use: object, later_use: object, ahead: float | None = None) -> None:
        self.next_use_LE = np.array(next_use, dtype=np.float32)
        self.later_use_LE = np.array(later_use, dtype=np.float32)
        self.looked_ahead_from: list[int] = []
        self._ahead = ahead

    def look_ahead(self, moe_layer_idx: int) -> None:
        self.looked_ahead_from.append(moe_layer_idx)
        if self._ahead is not None:
            self.next_use_LE[moe_layer_idx + 1] = self._ahead


def score(p: float, q: float, layers_ahead: int, num_layers: int) -> float:
    """The docstring's formula for one expert."""
    wait = (1 - p) * num_layers / max(q, float(LEAST_CHANCE))
    return max(p / layers_ahead, 1 / (layers_ahead + wait))


def begun(told: Told) -> ActivationAware:
    policy = ActivationAware(told, len(told.next_use_LE))
    policy.begin_step(DECODE_STEP)
    return policy


@st.composite
def chances(draw) -> tuple[np.ndarray, np.ndarray]:
    """Two matrices of 64ths: exact in float32, zero and one among them."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 4)))
    of_64 = arrays(np.int64, shape, elements=st.integers(0, 64))
    return draw(of_64) / 64, draw(of_64) / 64


@settings(max_examples=30)
@given(case=chances())
def test_scores_after_a_layer_are_those_of_a_step_that_has_come_there(case):
    told = Told(*case)
    policy = begun(told)
    for layer in range(len(told.next_use_LE)):
        after = [policy.scores_after(later).copy() for later in range(layer, len(told.next_use_LE))]
        policy.touch(layer, [])
        assert_array_equal(policy.scores(), after[0])
    assert_array_equal(policy.scores_after(0), begun(told).scores_after(0))


@settings(max_examples=100)
@given(case=chances())
def test_scores_are_the_formula_for_every_current_layer(case):
    next_use, later_use = case
    num_layers = len(next_use)
    policy = begun(Told(next_use, later_use))
    for current in range(-1, num_layers):  # -1: the step has begun and no layer has run
        if current >= 0:
            policy.touch(current, np.array([0]))
        wanted = np.empty(next_use.shape)
        for layer, expert in np.ndindex(next_use.shape):
            ahead = (layer - current) % num_layers or num_layers
            wanted[layer, expert] = score(
                next_use[layer, expert], later_use[layer, expert], ahead, num_layers
            )
        assert_allclose(policy.scores(), wanted, rtol=1e-4)


def test_what_is_equally_likely_stays_the_longer_the_sooner_its_layer_comes():
    policy = begun(Told(np.full((4, 1), 0.5), np.full((4, 1), 0.5)))
    policy.touch(1, np.array([0]))
    assert np.argsort(-policy.scores()[:, 0]).tolist() == [2, 3, 0, 1]


def test_what_comes_now_or_never_outranks_what_surely_comes_much_later():
    """Layer 0: even odds at once, then hardly ever again. Layer 11: for sure, in twelve layers."""
    next_use, later_use = np.zeros((24, 1)), np.full((24, 1), 0.01)
    next_use[0], next_use[11], later_use[11] = 0.5, 1.0, 1.0
    scores = begun(Told(next_use, later_use)).scores()
    assert scores[0, 0] == pytest.approx(1 / 2)
    assert scores[11, 0] == pytest.approx(1 / 12)


def test_what_is_used_by_every_other_token_outranks_what_is_a_long_shot_next():
    """2 layers: 1 / (2 + 0.5 * 2 / 0.5) = 1/4 in two layers against 0.1 in one."""
    scores = begun(Told([[0.1, 0.1], [0.5, 0.1]], [[0.001, 0.1], [0.5, 0.1]])).scores()
    assert scores[1, 0] == pytest.approx(1 / 4)
    assert scores[0, 0] == pytest.approx(1 / 10)


def test_experts_without_any_chance_still_have_an_order():
    scores = begun(Told(np.zeros((3, 1)), [[0.1], [0.2], [0.0]])).scores()[:, 0]
    assert (scores > 0).all()
    assert scores[1] > scores[0]


def test_a_layer_that_was_touched_is_scored_by_its_new_chances_and_others_are_not():
    """In replays several policies share a predictor: what one made it look ahead for is none of
    the others' business before they are told.
    """
    told = Told(np.full((3, 2), 0.5), np.full((3, 2), 0.5))
    policy = begun(told)
    told.next_use_LE[:] = 0.25
    policy.touch(1, np.array([0]))
    wanted = [score(0.5, 0.5, 2, 3), score(0.25, 0.5, 3, 3), score(0.5, 0.5, 1, 3)]
    assert_allclose(policy.scores(), np.repeat(wanted, 2).reshape(3, 2), rtol=1e-6)


def test_a_step_that_begins_reads_all_chances_anew():
    told = Told(np.full((2, 2), 0.5), np.full((2, 2), 0.5))
    policy = begun(told)
    policy.touch(0, np.array([0]))
    told.next_use_LE = np.full((2, 2), 0.25, dtype=np.float32)
    policy.begin_step(DECODE_STEP)
    assert_allclose(policy.scores()[0], score(0.25, 0.5, 1, 2), rtol=1e-6)


def test_asking_for_chances_looks_ahead_and_the_next_layer_is_scored_by_what_was_found():
    told = Told(np.full((3, 1), 0.5), np.full((3, 1), 0.5), ahead=0.9)
    policy = begun(told)
    policy.touch(0, np.array([0]))
    before = policy.scores().copy()
    assert_allclose(policy.chances(), [[0.5], [0.9], [0.5]], rtol=1e-6)
    assert told.looked_ahead_from == [0]
    assert policy.scores()[1, 0] == pytest.approx(score(0.9, 0.5, 1, 3))
    assert_array_equal(policy.scores()[[0, 2]], before[[0, 2]])


def test_after_the_last_layer_there_is_none_to_refine():
    told = Told(np.full((2, 1), 0.5), np.full((2, 1), 0.5))
    policy = begun(told)
    for layer in range(2):
        policy.touch(layer, np.array([0]))
    assert_array_equal(policy.chances(), told.next_use_LE)


def test_it_is_the_first_policy_and_one_that_predicts():
    told = Told(np.full((2, 1), 0.5), np.full((2, 1), 0.5))
    policy = make_policy(ACTIVATION_AWARE, num_layers=2, num_experts=1, num_slots=1, chances=told)
    assert POLICIES[0] == ACTIVATION_AWARE
    assert isinstance(policy, ActivationAware)
    assert isinstance(policy, PredictingPolicy)
