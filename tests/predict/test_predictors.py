"""What the predictor learns from what it sees: planted rules are found, each by its own factor."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from moe_infinity.predict.tables import FACTORS, KNOWN, Feature
from tests.predict.feed import EXPERTS, LAYERS, UNKNOWN, Feed, Token, is_used, pair, random_experts

SEED = 0


def only(*factors: str) -> Feed:
    """All other factors are left out."""
    return Feed(without=[factor for factor in FACTORS if factor not in factors])


def assert_expects(feed: Feed, experts_LK: np.ndarray, layer: int | slice = slice(None)) -> None:
    """These are likelier than not, the others are not."""
    chances, used = feed.model.next_use_LE[layer], is_used(experts_LK)[layer]
    assert chances[used].min() > 0.5 > chances[~used].max()


# Factors


@pytest.mark.parametrize("factors", [FACTORS, ["token"]], ids=["all", "token"])
def test_a_token_id_that_always_goes_to_the_same_experts_is_expected_there_at_step_start(factors):
    rng, feed = np.random.default_rng(SEED), only(*factors)
    feed.prompt([(0, pair(0))])
    for number in rng.integers(0, 8, 400).tolist():
        feed.decode((number, pair(number)))
    for number in (3, 6):
        feed.begin([(number, pair(number))])
        assert_expects(feed, pair(number))
        feed.layers()


@pytest.mark.parametrize("factors", [FACTORS, ["next_token"]], ids=["all", "next_token"])
def test_a_token_id_that_is_always_followed_by_the_same_experts_is_learned(factors):
    """Ids are known one token ahead only: each is a name of the token that follows."""
    rng, feed = np.random.default_rng(SEED), only(*factors)
    numbers = rng.integers(0, 8, 500).tolist()
    feed.prompt([(numbers[1], pair(numbers[0]))])
    for now, following in zip(numbers[1:], numbers[2:], strict=False):
        feed.decode((following, pair(now)))
    feed.begin([(5, pair(numbers[-1]))])
    for layer in range(LAYERS):
        feed.layer(layer)
        assert_expects(feed, pair(5), layer)


@pytest.mark.parametrize("factors", [FACTORS, ["transition"]], ids=["all", "transition"])
def test_what_follows_the_experts_of_a_token_in_the_same_layer_is_learned(factors):
    """Pair 0 -> 5 -> 2 -> 7 -> ...: known for the next token as soon as a layer was routed."""
    feed = only(*factors)
    feed.prompt([(UNKNOWN, pair(0))])
    for number in range(1, 300):
        feed.decode((UNKNOWN, pair(5 * number)))
    feed.begin([(UNKNOWN, pair(5 * 300))])
    for layer in range(LAYERS):
        assert_expects(feed, pair(5 * 300), layer)
        feed.layer(layer)
        assert_expects(feed, pair(5 * 301), layer)


@pytest.mark.parametrize("factors", [FACTORS, ["layer"]], ids=["all", "layer"])
def test_what_follows_the_experts_of_the_layer_before_is_seen_after_looking_ahead_only(factors):
    rng, feed = np.random.default_rng(SEED), only(*factors)
    feed.prompt([(UNKNOWN, pair(0))])
    for number in rng.integers(0, 8, 400).tolist():
        feed.decode((UNKNOWN, pair(number)), look_ahead=True)
    feed.begin([(UNKNOWN, pair(6))])
    for layer in range(LAYERS - 1):
        before = feed.model.next_use_LE.copy()
        feed.layer(layer)
        assert_array_equal(feed.model.next_use_LE[layer + 1 :], before[layer + 1 :])
        feed.model.look_ahead(layer)
        assert_expects(feed, pair(6), layer + 1)
        assert_array_equal(feed.model.next_use_LE[layer + 2 :], before[layer + 2 :])
        feed.model.next_use_LE[layer + 1] = before[layer + 1]  # nothing is kept in what is shown
    feed.layer(LAYERS - 1)
    feed.model.look_ahead(LAYERS - 1)  # there is no layer after the last


@pytest.mark.parametrize("factors", [FACTORS, ["request"]], ids=["all", "request"])
def test_what_this_request_uses_is_expected_of_it_and_not_of_the_next(factors):
    rng, feed = np.random.default_rng(SEED), only(*factors)
    for request in range(30):
        feed.prompt([(UNKNOWN, pair(request))])
        for _ in range(20):
            used = pair(request) if rng.random() < 0.7 else random_experts(rng)
            feed.decode((UNKNOWN, used))
    mine = is_used(pair(29))
    feed.begin([(UNKNOWN, pair(29))])
    chances = feed.model.next_use_LE
    assert chances[mine].min() > 2 * chances[~mine].max()
    feed.layers()
    feed.begin([(UNKNOWN, pair(0))], begins=True)
    chances = feed.model.next_use_LE
    assert chances[mine].mean() < 2 * chances[~mine].mean()
    feed.layers()


# The EAM Collection

HALVES = (np.arange(0, EXPERTS // 2), np.arange(EXPERTS // 2, EXPERTS))


def tokens_in(half: int, rng: np.random.Generator, num: int) -> list[Token]:
    """Any experts of one half, in every layer."""
    return [
        (UNKNOWN, np.stack([rng.permutation(HALVES[half])[:2] for _ in range(LAYERS)]))
        for _ in range(num)
    ]


def having_served_requests_of_both_halves(feed: Feed, rng: np.random.Generator) -> None:
    for request in range(40):
        feed.prompt(tokens_in(request % 2, rng, 6))
        for token in tokens_in(request % 2, rng, 10):
            feed.decode(token)


@pytest.mark.parametrize("half", [0, 1])
def test_a_prompt_like_earlier_ones_foretells_what_decoding_used_then(half):
    rng, feed = np.random.default_rng(SEED), only("eamc")
    having_served_requests_of_both_halves(feed, rng)
    feed.prompt(tokens_in(half, rng, 6))
    assert feed.model.eamc.num_stored == 40
    feed.begin(tokens_in(half, rng, 1))
    chances = feed.model.next_use_LE
    assert chances[:, HALVES[half]].min() > 1.3 * chances[:, HALVES[1 - half]].max()


@pytest.mark.parametrize("half", [0, 1])
def test_the_first_tokens_of_a_request_foretell_the_rest_like_that_of_earlier_ones(half):
    rng, feed = np.random.default_rng(SEED), only("eamc")
    having_served_requests_of_both_halves(feed, rng)
    feed.begin(tokens_in(half, rng, 1), begins=True)
    feed.layers()
    for token in tokens_in(half, rng, 2):
        feed.decode(token)
    feed.begin(tokens_in(half, rng, 1))
    chances = feed.model.next_use_LE
    assert chances[:, HALVES[half]].min() > 1.3 * chances[:, HALVES[1 - half]].max()


def test_what_the_router_said_early_raises_the_chances_of_those_experts():
    feed = Feed()
    varied(feed)
    feed.begin([(3, pair(3))])
    feed.layer(0)
    feed.model.look_ahead(0)
    before = feed.model.next_use_LE[1].copy()
    feed.model.hint(1, np.array([[0, 1]]))
    feed.model.look_ahead(0)
    after = feed.model.next_use_LE[1]
    assert (after[:2] > before[:2]).all()
    assert_array_equal(after[2:], before[2:])


def test_without_the_collection_nothing_is_known_of_a_request_that_has_only_a_prompt():
    rng, feed = np.random.default_rng(SEED), only()
    having_served_requests_of_both_halves(feed, rng)
    feed.prompt(tokens_in(0, rng, 6))
    feed.begin(tokens_in(0, rng, 1))
    by_half = [feed.model.next_use_LE[:, half].mean() for half in HALVES]
    assert by_half[0] == pytest.approx(by_half[1], rel=0.2)


# Ablation


def varied(feed: Feed, num_tokens: int = 60) -> None:
    """Requests with every kind of evidence in them."""
    rng = np.random.default_rng(SEED)
    for number in range(num_tokens):
        token = (number % 7, pair(number % 7) if rng.random() < 0.5 else random_experts(rng))
        if number % 15 == 0:
            feed.prompt([token] * 3)
        feed.decode(token, look_ahead=True)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_left_out_weighs_nothing_and_the_others_do(factor):
    feed = Feed(without=[factor])
    varied(feed)
    feature = Feature[factor.upper()]
    assert not feed.model.weights[:, feature].any()
    others = [Feature[other.upper()] for other in FACTORS if other != factor]
    assert (feed.model.weights[:, others].any(axis=0)).all()


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_left_out_changes_what_is_predicted(factor):
    with_all, without = Feed(), Feed(without=[factor])
    for feed in (with_all, without):
        varied(feed)
        feed.begin([(3, pair(3))])
        feed.layer(0)
        feed.model.hint(1, np.array([[0, 1]]))
        feed.model.look_ahead(0)
    assert not np.allclose(with_all.model.next_use_LE, without.model.next_use_LE, rtol=1e-3)


def test_a_stage_gives_no_weight_to_what_it_cannot_know_yet():
    feed = Feed()
    varied(feed)
    assert not feed.model.weights[KNOWN == 0].any()


def test_with_neither_layer_nor_router_looking_ahead_changes_nothing():
    feed = Feed(without=["layer", "router"])
    varied(feed)
    feed.begin([(3, pair(3))])
    feed.layer(0)
    before = feed.model.next_use_LE.copy()
    feed.model.look_ahead(0)
    assert_array_equal(feed.model.next_use_LE, before)


def test_without_the_collection_no_request_is_stored():
    feed = Feed(without=["eamc"])
    varied(feed)
    assert feed.model.eamc.num_stored == 0
