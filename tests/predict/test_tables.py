"""The counts say what was seen, as a plain dictionary would, however they are stored."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from moe_infinity.predict import tables
from moe_infinity.predict.tables import FULL, PRIOR, TOKEN_FULL, FollowTable, TokenTable

LAYERS, EXPERTS, K = 3, 5, 2
BASE = np.random.default_rng(0).uniform(0.05, 0.9, (LAYERS, EXPERTS)).astype(np.float32)
FLOAT32 = 1e-5


@st.composite
def routings(draw, num_layers: int = LAYERS) -> np.ndarray:
    """[L, K], distinct experts in each layer."""
    layer = st.lists(st.integers(0, EXPERTS - 1), min_size=K, max_size=K, unique=True)
    return np.array(draw(st.lists(layer, min_size=num_layers, max_size=num_layers)))


def route(*experts: int) -> np.ndarray:
    """The same experts in every layer."""
    return np.array([experts] * LAYERS)


def follow(table: FollowTable, layer: int, *experts: int) -> np.ndarray:
    out_E = np.empty(EXPERTS, dtype=np.float32)
    table.probabilities(layer, np.array(experts), BASE[layer], out_E)
    return out_E


def evidence(table: TokenTable, token_id: int, *, after: bool = False) -> np.ndarray | None:
    return table.evidence(token_id, after=after, base_LE=BASE, log_base_LE=np.log(BASE))


# FollowTable


@settings(max_examples=60)
@given(
    pairs=st.lists(st.tuples(routings(), routings()), max_size=12),
    experts=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4, unique=True),
)
def test_follow_probabilities_are_the_mean_of_what_a_dictionary_counts(pairs, experts):
    table = FollowTable(LAYERS, EXPERTS)
    followed: Counter[tuple[int, int, int]] = Counter()
    uses: Counter[tuple[int, int]] = Counter()
    for before, after in pairs:
        table.learn(before, after)
        for layer in range(LAYERS):
            uses.update((layer, e) for e in before[layer].tolist())
            pairs = product(before[layer].tolist(), after[layer].tolist())
            followed.update((layer, e, f) for e, f in pairs)
    for layer in range(LAYERS):
        wanted = [
            np.mean(
                [
                    (followed[layer, e, f] + PRIOR * BASE[layer, f]) / (uses[layer, e] + PRIOR)
                    for e in experts
                ]
            )
            for f in range(EXPERTS)
        ]
        assert_allclose(follow(table, layer, *experts), wanted, rtol=FLOAT32)


def test_layers_before_the_first_one_named_learn_nothing():
    """Layer 0 follows no layer of its own token."""
    table = FollowTable(LAYERS, EXPERTS)
    table.learn(route(0, 1)[:-1], route(2, 3)[1:], first_layer=1)
    assert_allclose(follow(table, 0, 0, 1), BASE[0], rtol=FLOAT32)
    for layer in (1, 2):
        assert follow(table, layer, 0, 1)[2:4].min() > 1 / (1 + PRIOR)


def test_an_expert_never_seen_is_followed_by_the_base_rates():
    table = FollowTable(LAYERS, EXPERTS)
    table.learn(route(0, 1), route(2, 3))
    assert_allclose(follow(table, 1, 4), BASE[1], rtol=FLOAT32)


def test_asking_changes_nothing():
    table = FollowTable(LAYERS, EXPERTS)
    base = BASE.copy()
    assert_array_equal(follow(table, 0, 1, 2), follow(table, 0, 1, 2))
    assert_array_equal(base, BASE)


def test_a_full_follow_counter_is_halved_and_keeps_its_proportions():
    table = FollowTable(LAYERS, EXPERTS)
    for number in range(FULL + 1):
        table.learn(route(0), route(1 if number % 4 else 2))
    table.learn(route(3), route(4))
    before = follow(table, 0, 0)
    beside = follow(table, 0, 3)
    table.forget()
    assert_allclose(table.uses[:, 0], (FULL + 1) / 2)
    assert_allclose(follow(table, 0, 0), before, atol=0.01)
    assert_array_equal(follow(table, 0, 3), beside)
    assert not np.array_equal(follow(table, 0, 0), before)


def test_a_follow_counter_that_is_not_full_forgets_nothing():
    table = FollowTable(LAYERS, EXPERTS)
    for _ in range(FULL):
        table.learn(route(0), route(1))
    table.forget()
    assert table.uses[0, 0] == FULL


# TokenTable


@settings(max_examples=60)
@given(
    tokens=st.lists(st.tuples(st.integers(0, 3), routings(), st.booleans()), max_size=20),
    asked=st.integers(0, 4),
    after=st.booleans(),
)
def test_token_evidence_is_the_log_ratio_a_dictionary_counts(tokens, asked, after):
    table = TokenTable(LAYERS, EXPERTS)
    seen: Counter[tuple[int, bool, int, int]] = Counter()
    uses: Counter[tuple[int, bool]] = Counter()
    for token_id, experts_LK, is_after in tokens:
        table.learn(token_id, experts_LK, after=is_after)
        uses[token_id, is_after] += 1
        seen.update(
            (token_id, is_after, layer, e)
            for layer in range(LAYERS)
            for e in experts_LK[layer].tolist()
        )
    got = evidence(table, asked, after=after)
    if not uses[asked, after]:
        assert got is None
        return
    assert got is not None
    for layer, expert in np.ndindex(LAYERS, EXPERTS):
        base = BASE[layer, expert]
        share = (seen[asked, after, layer, expert] + PRIOR * base) / (uses[asked, after] + PRIOR)
        assert got[layer, expert] == pytest.approx(np.log(share / base), rel=1e-3, abs=1e-5)


def test_an_id_never_learned_gives_none():
    table = TokenTable(LAYERS, EXPERTS)
    assert evidence(table, 7) is None
    table.learn(7, route(0, 1), after=True)
    assert evidence(table, 7) is None
    assert evidence(table, 7, after=True) is not None


@pytest.mark.parametrize("after", [True, False])
def test_an_unknown_id_is_ignored(after):
    """-1 stands for a token nobody knows: as an id it would be one token that goes everywhere."""
    table = TokenTable(LAYERS, EXPERTS)
    table.learn(-1, route(0, 1), after=after)
    assert evidence(table, -1, after=after) is None
    assert not table.uses.any()


def test_full_token_counts_are_halved_and_keep_their_proportions():
    table = TokenTable(LAYERS, EXPERTS)
    for number in range(TOKEN_FULL):
        table.learn(5, route(0, 1 if number % 4 else 2), after=False)
    before = evidence(table, 5)
    assert before is not None
    before = before.copy()
    table.learn(5, route(0, 1), after=False)
    got = evidence(table, 5)
    assert got is not None
    assert table.uses.max() < TOKEN_FULL * 0.6
    assert_allclose(got[:, :3], before[:, :3], atol=0.03)


def test_token_counts_never_overflow_their_bytes():
    table = TokenTable(LAYERS, EXPERTS)
    for _ in range(1500):
        table.learn(5, route(0, 1), after=True)
        got = evidence(table, 5, after=True)
        assert got is not None
        assert (got[:, :2] >= 0).all(), "always used, so never less likely than its base rate"
    assert evidence(table, 5) is None, "the other table was halved with it"


@pytest.mark.parametrize("limit", ["MAX_TOKENS", "TOKEN_TABLE_BYTES"])
def test_the_least_recently_used_id_is_dropped_when_full(monkeypatch, limit):
    monkeypatch.setattr(tables, limit, 2 if limit == "MAX_TOKENS" else 2 * LAYERS * EXPERTS)
    table = TokenTable(LAYERS, EXPERTS)
    for token_id in (10, 11, 10, 12):
        table.learn(token_id, route(0, 1), after=False)
    assert evidence(table, 11) is None
    assert evidence(table, 10) is not None
    assert evidence(table, 12) is not None


def test_a_dropped_id_leaves_nothing_behind_for_the_one_in_its_place(monkeypatch):
    monkeypatch.setattr(tables, "MAX_TOKENS", 1)
    table, fresh = TokenTable(LAYERS, EXPERTS), TokenTable(LAYERS, EXPERTS)
    for after in (False, True):
        table.learn(10, route(3, 4), after=after)
    table.learn(11, route(0, 1), after=False)
    fresh.learn(11, route(0, 1), after=False)
    assert_array_equal(evidence(table, 11), evidence(fresh, 11))
    assert evidence(table, 11, after=True) is None


def test_a_table_smaller_than_one_token_still_keeps_one(monkeypatch):
    monkeypatch.setattr(tables, "TOKEN_TABLE_BYTES", 1)
    table = TokenTable(LAYERS, EXPERTS)
    table.learn(10, route(0, 1), after=False)
    assert evidence(table, 10) is not None
