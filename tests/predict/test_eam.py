"""The Expert Activation Matrix counts what a naive loop over tokens counts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.experts import Phase
from moe_infinity.predict.eam import BatchEam

NUM_SEQUENCES, NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 2, 6, 2

tokens = st.tuples(
    st.integers(0, NUM_SEQUENCES - 1),
    st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True),
)
calls = st.tuples(
    st.sampled_from(Phase), st.integers(0, NUM_LAYERS - 1), st.lists(tokens, min_size=0, max_size=8)
)


def add(
    eam: BatchEam, phase: Phase, moe_layer_idx: int, routed: list[tuple[int, list[int]]]
) -> None:
    sequence_of_token_T = np.array([sequence for sequence, _ in routed], dtype=np.int64)
    experts_TK = np.array([experts for _, experts in routed], dtype=np.int64).reshape(-1, TOP_K)
    eam.add(phase, moe_layer_idx, sequence_of_token_T, experts_TK)


@settings(max_examples=50)
@given(history=st.lists(calls, max_size=8))
def test_a_matrix_counts_every_token_once_per_expert_that_served_it(history):
    eam = BatchEam(NUM_SEQUENCES, NUM_LAYERS, NUM_EXPERTS)
    shape = (NUM_SEQUENCES, NUM_LAYERS, NUM_EXPERTS)
    naive = {phase: np.zeros(shape, dtype=np.int64) for phase in Phase}
    for phase, moe_layer_idx, routed in history:
        add(eam, phase, moe_layer_idx, routed)
        for sequence, experts in routed:
            for expert in experts:
                naive[phase][sequence, moe_layer_idx, expert] += 1
    requests = eam.requests()
    assert len(requests) == NUM_SEQUENCES
    for phase in Phase:
        np.testing.assert_array_equal([r.of(phase) for r in requests], naive[phase])


def test_every_layer_of_a_matrix_sums_to_tokens_times_top_k():
    eam = BatchEam(1, NUM_LAYERS, NUM_EXPERTS)
    rng = np.random.default_rng(0)
    num_tokens = 11
    for moe_layer_idx in range(NUM_LAYERS):
        routed = [(0, rng.permutation(NUM_EXPERTS)[:TOP_K].tolist()) for _ in range(num_tokens)]
        add(eam, Phase.PREFILL, moe_layer_idx, routed)
    (request,) = eam.requests()
    assert request.prefill.sum(axis=1).tolist() == [num_tokens * TOP_K] * NUM_LAYERS
    assert request.decode.sum() == 0


def test_prefill_does_not_count_in_the_decode_matrix():
    eam = BatchEam(1, 1, NUM_EXPERTS)
    add(eam, Phase.PREFILL, 0, [(0, [0, 1]), (0, [0, 2])])
    add(eam, Phase.DECODE, 0, [(0, [0, 5])])
    (request,) = eam.requests()
    assert request.prefill.tolist() == [[2, 1, 1, 0, 0, 0]]
    assert request.decode.tolist() == [[1, 0, 0, 0, 0, 1]]
    assert request.of(Phase.PREFILL) is request.prefill
    assert request.of(Phase.DECODE) is request.decode


def test_the_matrices_of_a_running_batch_go_on_counting():
    eam = BatchEam(1, 1, NUM_EXPERTS)
    (request,) = eam.requests()
    add(eam, Phase.DECODE, 0, [(0, [3, 4])])
    assert request.decode.tolist() == [[0, 0, 0, 1, 1, 0]]
