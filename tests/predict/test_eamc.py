"""The EAMC keeps diverse requests, finds the one a running request is like from the layers seen so
far, and survives on disk or is refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.errors import ConfigError
from moe_infinity.experts import Phase
from moe_infinity.predict.eamc import Eamc, EamcMatch, RequestEam

NUM_ROWS, NUM_EXPERTS = 3, 4
A, B, C = [[9, 1, 0, 0]] * NUM_ROWS, [[0, 9, 1, 0]] * NUM_ROWS, [[0, 0, 9, 1]] * NUM_ROWS


def request(decode: object, prefill: object | None = None) -> RequestEam:
    counts = np.asarray(decode)
    return RequestEam(np.zeros_like(counts) if prefill is None else np.asarray(prefill), counts)


def collection(*decodes: object, capacity: int = 8) -> Eamc:
    eamc = Eamc(capacity, NUM_ROWS, NUM_EXPERTS)
    for decode in decodes:
        eamc.add(request(decode))
    return eamc


def random_request(rng: np.random.Generator) -> RequestEam:
    prefill, decode = rng.poisson(1.0, (2, NUM_ROWS, NUM_EXPERTS))
    decode[rng.integers(NUM_ROWS), 0] += 1
    return RequestEam(prefill, decode)


def normalised(counts: np.ndarray) -> np.ndarray:
    return np.array([row / row.sum() if row.any() else row * 0.0 for row in counts])


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, dtype=np.int64)


# Collecting


def test_a_full_collection_replaces_the_most_similar_request():
    """v3 B.1, Fig 10: capacity 3, EAM4 is closest to EAM3."""
    eamc = collection(A, B, C, capacity=3)
    eam4 = [[0, 0, 7, 3]] * NUM_ROWS
    assert eamc.add(request(eam4)) == 2
    assert eamc.num_stored == 3
    for idx, expected in enumerate([A, B, eam4]):
        np.testing.assert_allclose(eamc.decode_matrix(idx), normalised(np.array(expected)))


def test_likeness_when_replacing_is_a_cosine_not_a_dot_product():
    """The sharp matrix has the larger dot product with the newcomer, the flat one its direction."""
    sharp, flat = [[9, 0, 0, 0]] * NUM_ROWS, [[3, 2, 2, 2]] * NUM_ROWS
    assert collection(sharp, flat, capacity=2).add(request([[9, 5, 5, 5]] * NUM_ROWS)) == 1


def test_a_request_without_a_decode_token_is_not_stored():
    eamc = collection()
    assert eamc.add(request(np.zeros((NUM_ROWS, NUM_EXPERTS), int), prefill=A)) is None
    assert (eamc.num_stored, eamc.version) == (0, 0)


def test_a_collection_fills_up_in_order_and_each_request_is_a_new_version():
    eamc = Eamc(2, NUM_ROWS, NUM_EXPERTS)
    assert [eamc.add(request(decode)) for decode in (A, B, A)] == [0, 1, 0]
    assert (eamc.num_stored, eamc.version) == (2, 3)


def test_rows_are_stored_with_sum_1_and_empty_rows_stay_zero():
    eamc = collection([[8, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 2]])
    expected = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [0.25, 0.25, 0, 0.5]])
    np.testing.assert_array_equal(eamc.decode_matrix(0), expected)
    assert eamc.decode_matrix(0).dtype == np.float32
    np.testing.assert_allclose(eamc.norms, [np.linalg.norm(expected)])


def test_an_index_that_is_not_stored_has_no_matrix():
    with pytest.raises(AssertionError):
        collection(A).decode_matrix(1)


def test_a_collection_of_no_requests_cannot_be_configured():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        Eamc(0, NUM_ROWS, NUM_EXPERTS)


# Matching


def test_a_pattern_is_found_from_its_first_rows_whatever_the_rows_still_to_come():
    """Divided by whole norms, the flat later layers of the other one would make it the winner."""
    planted = [[9, 1, 0, 0], [0, 0, 0, 9], [0, 0, 0, 9]]
    misleading = [[6, 4, 0, 0], [3, 3, 3, 3], [3, 3, 3, 3]]
    eamc = collection(misleading, planted)
    match = EamcMatch(eamc)
    match.observe(0, ids(0), 4)
    assert (match.dots / eamc.norms).argmax() == 0
    assert match.nearest(1).tolist() == [1]
    np.testing.assert_allclose(match.predict(1), normalised(np.array(planted)), rtol=1e-6)


def test_a_request_equal_to_a_stored_one_has_similarity_1():
    match = EamcMatch(collection(A, B))
    for layer, counts in enumerate(A):
        match.observe(layer, ids(0, 1), np.array(counts[:2]))
    assert match.similarities()[0] == pytest.approx(1)


def test_equals_are_ordered_by_index():
    match = EamcMatch(collection(*[C, A, B, A, A] * 3, capacity=15))
    match.observe(0, ids(0))
    in_order = [1, 3, 4, 6, 8, 9, 11, 13, 14, 0, 2, 5, 7, 10, 12]
    for num in range(16):
        assert match.nearest(num).tolist() == in_order[:num]


def test_more_nearest_than_stored_are_all():
    match = EamcMatch(collection(A, B))
    match.observe(0, ids(1))
    assert match.nearest(5).tolist() == match.nearest(50).tolist() == [1, 0]


def test_the_nearest_are_added_up_with_equal_weight():
    match = EamcMatch(collection(A, B, C))
    match.observe(0, ids(0, 1), np.array([5, 1]))
    np.testing.assert_allclose(match.predict(2), [[0.45, 0.5, 0.05, 0]] * NUM_ROWS, rtol=1e-6)
    assert match.predict(2).dtype == np.float64


def test_an_empty_collection_predicts_zeros():
    match = EamcMatch(collection())
    match.observe(1, ids(0, 2))
    assert match.dots.shape == match.similarities().shape == match.nearest(3).shape == (0,)
    np.testing.assert_array_equal(match.predict(3), np.zeros((NUM_ROWS, NUM_EXPERTS)))


def test_before_anything_is_observed_the_mean_of_all_is_predicted():
    eamc = collection(A, C, [[0, 0, 0, 0], *C[1:]])
    match = EamcMatch(eamc)
    match.observe(0, ids())
    mean = [[0.45, 0.05, 0.45, 0.05], *[[0.3, 0.1 / 3, 0.6, 0.2 / 3]] * 2]
    np.testing.assert_array_equal(match.similarities(), [0, 0, 0])
    np.testing.assert_allclose(match.predict(1), mean, rtol=1e-6)
    match.predict(1).fill(7)
    np.testing.assert_allclose(match.predict(1), mean, rtol=1e-6, err_msg="the caller owns it")
    eamc.add(request(B))
    assert match.predict(1)[0, 1] > 0.3, "one more in the mean"


def test_a_query_unlike_all_is_as_good_as_none():
    match = EamcMatch(collection(A, B))
    match.observe(0, ids(3))
    np.testing.assert_allclose(match.predict(1), [[0.45, 0.5, 0.05, 0]] * NUM_ROWS, rtol=1e-6)


def test_a_query_begun_again_has_forgotten_the_last():
    match = EamcMatch(collection(A, B, C))
    match.observe(0, ids(0), 100)
    match.begin()
    assert not match.dots.any()
    assert not match.similarities().any()
    match.observe(2, ids(2))
    assert match.nearest(1).tolist() == [2]


def test_a_prompt_like_a_stored_prompt_predicts_how_that_one_decoded():
    eamc = Eamc(4, NUM_ROWS, NUM_EXPERTS)
    eamc.add(request(decode=C, prefill=A))
    eamc.add(request(decode=A, prefill=B))
    match = EamcMatch(eamc, Phase.PREFILL)
    match.observe(0, ids(0, 1), np.array([30, 4]))
    np.testing.assert_allclose(match.predict(1), normalised(np.array(C)))


observations = st.tuples(
    st.integers(0, NUM_ROWS - 1),
    st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, max_size=NUM_EXPERTS),
    st.one_of(st.integers(1, 5), st.none()),  # None: another count for each expert
)
actions = st.one_of(observations, st.sampled_from(["add", "begin", "look"]))


@settings(max_examples=150)
@given(
    history=st.lists(actions, max_size=25), phase=st.sampled_from(Phase), seed=st.integers(0, 99)
)
def test_a_match_updated_row_by_row_equals_a_comparison_from_scratch(history, phase, seed):
    rng = np.random.default_rng(seed)
    eamc = Eamc(4, NUM_ROWS, NUM_EXPERTS)
    match, query = EamcMatch(eamc, phase), np.zeros((NUM_ROWS, NUM_EXPERTS))
    stored: dict[int, np.ndarray] = {}
    for action in history:
        if action == "add":
            eam = random_request(rng)
            idx = eamc.add(eam)
            assert idx is not None
            stored[idx] = normalised(eam.of(phase))
        elif action == "begin":
            match.begin()
            query[:] = 0
        elif action == "look":
            assert_equals_comparison(match, query, stored)
        else:
            layer, experts, count = action
            counts = rng.integers(1, 9, len(experts)) if count is None else count
            match.observe(layer, np.array(experts, dtype=np.int64), counts)
            query[layer, experts] += counts
    assert_equals_comparison(match, query, stored)


def assert_equals_comparison(
    match: EamcMatch, query: np.ndarray, stored: dict[int, np.ndarray]
) -> None:
    observed = query.any(axis=1)
    expected = []
    for idx in range(len(stored)):
        norms = np.linalg.norm(query) * np.linalg.norm(stored[idx][observed])
        dot = (query * stored[idx]).sum()
        assert match.dots[idx] == pytest.approx(dot, rel=1e-5, abs=1e-6)
        expected.append(dot / norms if norms > 0 else 0.0)
    np.testing.assert_allclose(match.similarities(), expected, rtol=1e-5, atol=1e-6)
    best = match.similarities()[match.nearest(2)]
    np.testing.assert_allclose(best, sorted(expected, reverse=True)[:2], rtol=1e-5, atol=1e-6)


# On disk


@pytest.fixture
def full() -> Eamc:
    """Three places, of which the last was taken twice or more."""
    eamc, rng = Eamc(3, NUM_ROWS, NUM_EXPERTS), np.random.default_rng(1)
    for _ in range(7):
        eamc.add(random_request(rng))
    return eamc


def assert_same(got: Eamc, expected: Eamc) -> None:
    assert (got.capacity, got.num_stored) == (expected.capacity, expected.num_stored)
    np.testing.assert_array_equal(got.decode, expected.decode)
    np.testing.assert_array_equal(got.norms, expected.norms)
    for phase in Phase:
        np.testing.assert_array_equal(got.cells[phase], expected.cells[phase])
        np.testing.assert_array_equal(got.squares[phase], expected.squares[phase])


def test_a_collection_made_of_the_arrays_of_another_is_equal(full):
    restored = Eamc(full.capacity, NUM_ROWS, NUM_EXPERTS)
    restored.restore(full.arrays() | {"statistics": np.zeros(3)})
    assert_same(restored, full)
