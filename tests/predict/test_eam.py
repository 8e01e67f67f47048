"""The Expert Activation Matrix counts what a naive loop over tokens counts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.experts import Phase, Step
from moe_infinity.predict.recorder import Recorder

NUM_SEQUENCES, NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 2, 6, 2

tokens = st.tuples(
    st.integers(0, NUM_SEQUENCES - 1),
    st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True),
)
calls = st.tuples(
    st.sampled_from(Phase), st.integers(0, NUM_LAYERS - 1), st.lists(tokens, min_size=0, max_size=8)
)


def add(
    recorder: Recorder, phase: Phase, moe_layer_idx: int, routed: list[tuple[int, list[int]]]
) -> None:
    """A step with one MoE layer, of sequences that go on."""
    sequence_T = np.array([sequence for sequence, _ in routed], dtype=np.int64)
    experts_TK = np.array([experts for _, experts in routed], dtype=np.int64).reshape(-1, TOP_K)
    begins_B = np.zeros(NUM_SEQUENCES, dtype=bool)
    recorder.begin_step(Step(phase, NUM_SEQUENCES, 0, begins_B, sequence_T=sequence_T))
    recorder.record(moe_layer_idx, experts_TK)


@settings(max_examples=50)
@given(history=st.lists(calls, min_size=1, max_size=8))
def test_a_matrix_counts_every_token_once_per_expert_that_served_it(history):
    recorder = Recorder(NUM_LAYERS, NUM_EXPERTS)
    shape = (NUM_SEQUENCES, NUM_LAYERS, NUM_EXPERTS)
    naive = {phase: np.zeros(shape, dtype=np.int64) for phase in Phase}
    for phase, moe_layer_idx, routed in history:
        add(recorder, phase, moe_layer_idx, routed)
        for sequence, experts in routed:
            for expert in experts:
                naive[phase][sequence, moe_layer_idx, expert] += 1
    requests = recorder.request_eams()
    assert len(requests) == NUM_SEQUENCES
    for phase in Phase:
        np.testing.assert_array_equal([r.of(phase) for r in requests], naive[phase])


def test_the_matrices_of_a_running_batch_go_on_counting():
    recorder = Recorder(NUM_LAYERS, NUM_EXPERTS)
    add(recorder, Phase.DECODE, 0, [])
    request, *_ = recorder.request_eams()
    add(recorder, Phase.DECODE, 0, [(0, [3, 4])])
    assert request.decode[0].tolist() == [0, 0, 0, 1, 1, 0]
    assert request.of(Phase.DECODE) is request.decode
    assert request.of(Phase.PREFILL) is request.prefill
