"""Any run: chances stay chances, sequences stay apart, a cut step harms nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from moe_infinity.cache.activation_aware import ActivationAware
from moe_infinity.experts import Phase, Step
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.tables import Stage
from tests.predict.feed import LAYERS, UNKNOWN, Feed, Token, pair, random_experts

FLOAT32 = 1e-5


def some_tokens(rng: np.random.Generator, num: int) -> list[Token]:
    return [(int(rng.integers(-1, 6)), random_experts(rng)) for _ in range(num)]


def assert_chances(model: Predictor, *, is_running: bool = True) -> None:
    for chances in (model.next_use_LE, model.later_use_LE):
        assert np.isfinite(chances).all()
        assert (chances > 0).all() if is_running else (chances == 0).all()
        assert (chances <= 1).all()
    assert np.isfinite(model.weights).all()


@st.composite
def runs(draw) -> list[tuple[int, list[int], int]]:
    """Batches: how many lanes, the tokens of each one's prompt, tokens to decode."""
    batch = st.integers(1, 3).flatmap(
        lambda lanes: st.tuples(
            st.just(lanes),
            st.lists(st.integers(1, 80), min_size=lanes, max_size=lanes),
            st.integers(0, 12),
        )
    )
    return draw(st.lists(batch, min_size=1, max_size=4))


@settings(max_examples=40)
@given(batches=runs(), seed=st.integers(0, 99), look_ahead=st.booleans())
@np.errstate(divide="raise", over="raise", invalid="raise")
def test_chances_stay_chances_over_any_run(batches, seed, look_ahead):
    rng, feed = np.random.default_rng(seed), Feed()
    for num_lanes, prompts, num_tokens in batches:
        feed.prompt(*(some_tokens(rng, num) for num in prompts))
        assert_chances(feed.model)
        lasts = rng.integers(0, num_tokens + 1, num_lanes)
        for at in range(num_tokens):
            running = at < lasts
            if not running.any():
                break
            lanes = [some_tokens(rng, int(is_running)) for is_running in running]
            feed.begin(*lanes)
            assert_chances(feed.model)
            for layer in range(LAYERS):
                feed.layer(layer)
                if look_ahead:
                    feed.model.look_ahead(layer)
                assert_chances(feed.model)


@np.errstate(divide="raise", over="raise", invalid="raise")
def test_chances_stay_chances_when_one_token_is_all_there_is_for_long_and_then_is_not():
    feed = Feed()
    feed.prompt([(1, pair(1))])
    for _ in range(1500):
        feed.decode((1, pair(1)), look_ahead=True)
    for number in range(8):
        feed.decode((number, pair(number)), look_ahead=True)
        assert_chances(feed.model)


def test_layers_that_decoding_passes_by_are_not_expected_until_the_next_prompt():
    """An encoder's experts must not keep the decoder's out."""
    feed = trained()
    feed.prompt([(1, pair(1)), (2, pair(2))])
    for is_sure in (False, False, True):  # once may have been an interruption
        feed.begin([(3, pair(3))])
        for chances_LE in (feed.model.next_use_LE, feed.model.later_use_LE):
            assert (chances_LE[:2].max() < 0.001) == is_sure
            assert chances_LE[2:].max() > 0.1
        for layer in range(2, LAYERS):
            feed.layer(layer)
    feed.prompt([(1, pair(1)), (2, pair(2))])
    assert feed.model.next_use_LE[:2].max() > 0.1


# Several sequences


def trained() -> Feed:
    rng, feed = np.random.default_rng(1), Feed()
    for _ in range(6):
        feed.prompt(some_tokens(rng, 5))
        for token in some_tokens(rng, 12):
            feed.decode(token)
    return feed


def test_what_two_sequences_need_is_what_either_needs():
    rng, both = np.random.default_rng(2), trained()
    prompts = some_tokens(rng, 4), some_tokens(rng, 7)
    alone = copy.deepcopy(both), copy.deepcopy(both)
    for feed, prompt in zip(alone, prompts, strict=True):
        feed.prompt(prompt)
    both.prompt(*prompts)
    for name in ("next_use_LE", "later_use_LE"):
        p, q = (getattr(feed.model, name) for feed in alone)
        assert_allclose(getattr(both.model, name), 1 - (1 - p) * (1 - q), rtol=1e-4)


def test_a_sequence_is_predicted_alike_alone_and_beside_one_that_has_ended():
    rng = np.random.default_rng(3)
    alone = trained()
    beside = copy.deepcopy(alone)
    prompt = some_tokens(rng, 4)
    alone.prompt(prompt)
    beside.prompt([], prompt)
    for token in some_tokens(rng, 20):
        alone.begin([token])
        beside.begin([], [token])
        for layer in range(LAYERS):
            for feed in (alone, beside):
                feed.layer(layer)
                feed.model.look_ahead(layer)
            for name in ("next_use_LE", "later_use_LE"):
                one, other = (getattr(feed.model, name) for feed in (alone, beside))
                assert_allclose(other, one, rtol=1e-3, atol=1e-6)
    assert_allclose(beside.model.weights, alone.model.weights, rtol=FLOAT32)


def test_the_place_of_a_sequence_in_its_batch_makes_no_difference_to_a_step():
    rng, one = np.random.default_rng(4), trained()
    other = copy.deepcopy(one)
    a, b = some_tokens(rng, 3), some_tokens(rng, 5)
    one.prompt(a, b)
    other.prompt(b, a)
    assert_allclose(one.model.next_use_LE, other.model.next_use_LE, rtol=1e-4)


def test_when_all_sequences_of_a_batch_have_ended_nothing_is_needed():
    rng, feed = np.random.default_rng(5), trained()
    feed.prompt(some_tokens(rng, 3), some_tokens(rng, 3))
    feed.begin([], [])
    assert_chances(feed.model, is_running=False)


# Steps that are cut short


def learned(model: Predictor) -> list[NDArray[Any]]:
    follow = [t for table in (model.transitions, model.layers) for t in (table.counts, table.uses)]
    known: list[NDArray[Any]] = [
        model.tokens.counts,
        model.tokens.uses,
        model.base_LE,
        model.weights,
    ]
    return [array.copy() for array in (*follow, *known)]


@pytest.mark.parametrize("num_layers", range(LAYERS))
def test_nothing_is_learned_from_a_step_that_did_not_run_all_layers(num_layers):
    rng, feed = np.random.default_rng(6), trained()
    feed.begin(some_tokens(rng, 1))  # the last whole step is learned from here
    before = learned(feed.model)
    for layer in range(num_layers):
        feed.layer(layer)
    feed.begin(some_tokens(rng, 1))
    for was, now in zip(before, learned(feed.model), strict=True):
        assert_array_equal(now, was)
    feed.layers()
    assert_chances(feed.model)
    feed.begin(some_tokens(rng, 1))
    assert feed.model.transitions.uses.sum() > before[1].sum(), "learning goes on"


def test_after_a_cut_prompt_the_next_request_is_predicted_as_if_it_had_not_been():
    rng, feed = np.random.default_rng(7), trained()
    feed.begin(some_tokens(rng, 1))
    undisturbed = copy.deepcopy(feed)
    feed.begin(some_tokens(rng, 3), phase=Phase.PREFILL, begins=True)
    feed.layer(0)
    prompt = some_tokens(rng, 4)
    for one in (feed, undisturbed):
        one.prompt(prompt)
    assert_array_equal(feed.model.next_use_LE, undisturbed.model.next_use_LE)
    assert_array_equal(feed.model.later_use_LE, undisturbed.model.later_use_LE)


# What has no token of its own to say


def test_a_step_of_embeddings_is_learned_from_without_ids():
    rng, feed = np.random.default_rng(8), trained()
    feed.prompt(some_tokens(rng, 2))
    uses = feed.model.tokens.uses.copy()
    step = Step(Phase.DECODE, 1, 1, begins_B=np.array([False]))
    feed.begin([(UNKNOWN, pair(0))])
    uses = feed.model.tokens.uses.copy()
    feed.layers()
    feed.model.begin_step(step)
    assert_array_equal(feed.model.tokens.uses[0], uses[0])
    assert feed.model.num_tokens > 0


def test_full_counters_are_halved_whatever_the_size_of_the_batch():
    """An odd prompt before a batch of two keeps the number of tokens odd for ever: no step then
    was a multiple of 64 and nothing was forgotten.
    """
    feed = Feed()
    feed.prompt([(UNKNOWN, pair(0))])
    feed.prompt([(UNKNOWN, pair(0))], [(UNKNOWN, pair(0))])
    for _ in range(600):
        feed.decode((UNKNOWN, pair(0)), (UNKNOWN, pair(0)))
    assert feed.model.transitions.uses.max() < 800


def test_chances_can_be_asked_for_as_soon_as_a_step_has_begun():
    """That is when the token id is known, and with it something of all layers."""
    feed = trained()
    policy = ActivationAware(feed.model, LAYERS)
    rng = np.random.default_rng(9)
    feed.begin(some_tokens(rng, 1))
    policy.begin_step(Step(Phase.DECODE, 1, 1, begins_B=np.array([False])))
    assert_array_equal(policy.chances(), feed.model.next_use_LE)


def test_the_stage_ahead_learns_only_from_layers_that_were_looked_ahead_at():
    """Otherwise a run without prefetch would fit its weights to features that were never made."""
    blind, looking = Feed(), Feed()
    start = blind.model.weights.copy()
    for feed in (blind, looking):
        for token in range(12):
            feed.begin([(token % 3, pair(token % 3))])
            for layer in range(LAYERS):
                feed.layer(layer)
                if feed is looking:
                    feed.model.look_ahead(layer)
        feed.begin([(0, pair(0))])
    assert_array_equal(blind.model.weights[Stage.AHEAD], start[Stage.AHEAD])
    assert not np.array_equal(looking.model.weights[Stage.AHEAD], start[Stage.AHEAD])
    assert not np.array_equal(blind.model.weights[Stage.NOW], start[Stage.NOW])
