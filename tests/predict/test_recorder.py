"""What the recorder makes of the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moe_infinity.errors import ConfigError, TraceError
from moe_infinity.experts import Phase, Step
from moe_infinity.predict.recorder import Recorder
from moe_infinity.predict.tracefile import SequenceTrace

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(NUM_LAYERS, NUM_EXPERTS)


def prefill_of(*mask_BS: Sequence[int], token_ids_T: Sequence[int] | None = None) -> Step:
    """A prompt per sequence, 0 for padding."""
    counted_T = np.array(mask_BS, dtype=bool).ravel()
    ids = None if token_ids_T is None else np.array(token_ids_T)
    return Step(
        PREFILL,
        len(mask_BS),
        len(mask_BS[0]),
        begins_B=np.ones(len(mask_BS), dtype=bool),
        counted_T=None if counted_T.all() else counted_T,
        token_ids_T=ids,
    )


def decode_of(*runs: int, token_ids_T: Sequence[int] | None = None) -> Step:
    """One token per sequence, 0 for one that has finished."""
    counted_T = None if all(runs) else np.array(runs, dtype=bool)
    ids = None if token_ids_T is None else np.array(token_ids_T)
    return Step(
        DECODE,
        len(runs),
        1,
        begins_B=np.zeros(len(runs), dtype=bool),
        counted_T=counted_T,
        token_ids_T=ids,
    )


def routing(step: Step, *, seed: int = 0) -> np.ndarray:
    """[L, T, K]: different experts for every token and layer, padding included."""
    rng = np.random.default_rng(seed)
    shape = (NUM_LAYERS, step.num_tokens, NUM_EXPERTS)
    return rng.random(shape).argsort(axis=2)[:, :, :TOP_K].astype(np.int64)


def run(recorder: Recorder, step: Step, *, seed: int = 0) -> np.ndarray:
    """One step through all MoE layers; its routing as [T, L, K]."""
    experts_LTK = routing(step, seed=seed)
    recorder.begin_step(step)
    for moe_layer_idx, experts_TK in enumerate(experts_LTK):
        recorder.record(moe_layer_idx, experts_TK)
    return experts_LTK.transpose(1, 0, 2)


def naive_eam(experts_TLK: np.ndarray) -> np.ndarray:
    eam = np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=np.int64)
    for experts_LK in experts_TLK:
        for moe_layer_idx, experts in enumerate(experts_LK):
            eam[moe_layer_idx, experts] += 1
    return eam


def assert_trace(trace: SequenceTrace, experts_TLK: np.ndarray, ids: list[int], num_prefill: int):
    np.testing.assert_array_equal(trace.experts_TLK, experts_TLK)
    assert trace.token_ids_T.tolist() == ids
    assert trace.is_prefill_T.tolist() == [t < num_prefill for t in range(len(ids))]


# Request EAMs


def test_padding_is_not_counted(recorder):
    experts = run(recorder, prefill_of([0, 0, 1], [1, 1, 1]))
    first, second = recorder.request_eams()
    np.testing.assert_array_equal(first.prefill, naive_eam(experts[2:3]))
    np.testing.assert_array_equal(second.prefill, naive_eam(experts[3:6]))


def test_a_sequence_that_has_finished_is_not_counted(recorder):
    run(recorder, prefill_of([1], [1]))
    run(recorder, decode_of(1, 1), seed=1)
    run(recorder, decode_of(0, 1), seed=2)
    finished, running = recorder.request_eams()
    assert finished.decode.sum(axis=1).tolist() == [1 * TOP_K] * NUM_LAYERS
    assert running.decode.sum(axis=1).tolist() == [2 * TOP_K] * NUM_LAYERS


def test_tokens_may_be_told_apart_by_the_sequence_each_belongs_to(recorder):
    """As several prompts one after the other, without padding, are."""
    step = Step(PREFILL, 2, 0, begins_B=np.ones(2, dtype=bool), sequence_T=np.array([1, 1, 0, 1]))
    assert (step.num_tokens, step.num_counted) == (4, 4)
    experts = run(recorder, step)
    first, second = recorder.request_eams()
    np.testing.assert_array_equal(first.prefill, naive_eam(experts[[2]]))
    np.testing.assert_array_equal(second.prefill, naive_eam(experts[[0, 1, 3]]))


def test_the_routing_of_a_step_is_known_once_all_layers_ran(recorder):
    step = prefill_of([0, 1, 1])
    recorder.begin_step(step)
    assert recorder.routing() is None
    experts_TLK = run(recorder, step)
    found = recorder.routing()
    assert found is not None
    assert (found == experts_TLK[1:]).all(), "padding is left out"


def test_prefill_and_decode_are_counted_apart(recorder):
    prompt = run(recorder, prefill_of([1, 1, 1, 1]))
    steps = [run(recorder, decode_of(1), seed=seed) for seed in (1, 2, 3)]
    (request,) = recorder.request_eams()
    np.testing.assert_array_equal(request.prefill, naive_eam(prompt))
    np.testing.assert_array_equal(request.decode, naive_eam(np.concatenate(steps)))


def test_every_layer_sums_to_tokens_times_top_k(recorder):
    run(recorder, prefill_of([0, 1, 1, 1, 1], [1, 1, 1, 1, 1]))
    for request, num_tokens in zip(recorder.request_eams(), (4, 5), strict=True):
        assert request.prefill.sum(axis=1).tolist() == [num_tokens * TOP_K] * NUM_LAYERS


def test_a_request_begins_when_the_cache_is_empty(recorder):
    run(recorder, prefill_of([1, 1], [1, 1]))
    run(recorder, decode_of(1, 1), seed=1)
    last = run(recorder, prefill_of([1, 1, 1]), seed=2)
    (request,) = recorder.request_eams()
    np.testing.assert_array_equal(request.prefill, naive_eam(last))
    assert request.decode.sum() == 0


def test_a_prompt_in_several_steps_is_one_request(recorder):
    parts = [run(recorder, prefill_of([1, 1, 1]))]
    more = Step(PREFILL, 1, 2, begins_B=np.zeros(1, dtype=bool))
    parts.append(run(recorder, more, seed=1))
    (request,) = recorder.request_eams()
    np.testing.assert_array_equal(request.prefill, naive_eam(np.concatenate(parts)))


def test_the_eams_of_the_last_request_stay_until_the_next_begins(recorder):
    run(recorder, prefill_of([1, 1]))
    eams = recorder.request_eams()
    run(recorder, prefill_of([1, 1]), seed=1)
    assert eams[0].prefill.sum() == 2 * TOP_K * NUM_LAYERS


def test_another_number_of_sequences_is_another_request(recorder):
    """A cache that was filled elsewhere, or copied to a larger batch, is not empty."""
    run(recorder, Step(PREFILL, 1, 2, begins_B=np.zeros(1, dtype=bool)))
    assert len(recorder.request_eams()) == 1
    run(recorder, decode_of(1, 1, 1))
    assert [r.decode.sum() for r in recorder.request_eams()] == [TOP_K * NUM_LAYERS] * 3


def test_before_the_first_step_there_is_no_request(recorder):
    assert recorder.request_eams() == []


def test_a_layer_must_route_every_token_of_the_step(recorder):
    recorder.begin_step(prefill_of([1, 1, 1]))
    assert (recorder.step.phase, recorder.step.num_tokens) == (PREFILL, 3)
    with pytest.raises(AssertionError):
        recorder.record(0, np.zeros((2, TOP_K), dtype=np.int64))


# Token by token


def test_a_trace_has_every_token_of_prompt_and_output(recorder):
    recorder.begin_tokens()
    prompt = run(recorder, prefill_of([1, 1, 1], token_ids_T=[7, 8, 9]))
    steps = [run(recorder, decode_of(1, token_ids_T=[10 + i]), seed=i) for i in (1, 2)]
    (trace,) = recorder.finish_tokens()
    assert_trace(trace, np.concatenate([prompt, *steps]), [7, 8, 9, 11, 12], num_prefill=3)


def test_sequences_of_different_length_are_traces_of_different_length(recorder):
    recorder.begin_tokens()
    ids = [2, 2, 5, 6, 7, 8]  # the first sequence is padded on the left
    prompt = run(recorder, prefill_of([0, 0, 1], [1, 1, 1], token_ids_T=ids))
    both = run(recorder, decode_of(1, 1, token_ids_T=[20, 30]), seed=1)
    one = run(recorder, decode_of(0, 1, token_ids_T=[2, 31]), seed=2)
    short, long = recorder.finish_tokens()
    assert_trace(short, np.concatenate([prompt[2:3], both[:1]]), [5, 20], num_prefill=1)
    of_long = np.concatenate([prompt[3:], both[1:], one[1:]])
    assert_trace(long, of_long, [6, 7, 8, 30, 31], num_prefill=3)


def test_several_requests_are_several_traces_in_order(recorder):
    recorder.begin_tokens()
    first = run(recorder, prefill_of([1, 1], [1, 1], token_ids_T=[3, 4, 5, 6]))
    second = run(recorder, prefill_of([1, 1, 1], token_ids_T=[7, 8, 9]), seed=1)
    traces = recorder.finish_tokens()
    assert len(traces) == 3
    assert_trace(traces[0], first[:2], [3, 4], num_prefill=2)
    assert_trace(traces[1], first[2:], [5, 6], num_prefill=2)
    assert_trace(traces[2], second, [7, 8, 9], num_prefill=3)


def test_traces_and_eams_count_the_same_tokens(recorder):
    recorder.begin_tokens()
    run(recorder, prefill_of([0, 1, 1], [1, 1, 1]))
    run(recorder, decode_of(1, 0), seed=1)
    eams = recorder.request_eams()
    for trace, eam in zip(recorder.finish_tokens(), eams, strict=True):
        prefill = trace.is_prefill_T
        np.testing.assert_array_equal(naive_eam(trace.experts_TLK[prefill]), eam.prefill)
        np.testing.assert_array_equal(naive_eam(trace.experts_TLK[~prefill]), eam.decode)


def test_a_token_whose_id_was_not_given_is_minus_one(recorder):
    recorder.begin_tokens()
    prompt = run(recorder, prefill_of([0, 1, 1]))
    (trace,) = recorder.finish_tokens()
    assert_trace(trace, prompt[1:], [-1, -1], num_prefill=2)


def test_what_is_recorded_does_not_change_with_the_callers_array(recorder):
    recorder.begin_tokens()
    experts_TK = np.array([[1, 2]])
    recorder.begin_step(prefill_of([1]))
    for moe_layer_idx in range(NUM_LAYERS):
        recorder.record(moe_layer_idx, experts_TK)
    experts_TK[:] = 0
    (trace,) = recorder.finish_tokens()
    assert trace.experts_TLK.tolist() == [[[1, 2]] * NUM_LAYERS]


def test_tokens_are_kept_from_begin_tokens_on_in_the_middle_of_a_request_too(recorder):
    """A chat goes on from a filled cache: its next turn does not begin with an empty one."""
    run(recorder, prefill_of([1, 1, 1]))
    recorder.begin_tokens()
    kept = [run(recorder, decode_of(1, token_ids_T=[9 + i]), seed=i) for i in (1, 2)]
    (trace,) = recorder.finish_tokens()
    assert_trace(trace, np.concatenate(kept), [10, 11], num_prefill=0)


def test_tokens_are_kept_for_one_at_a_time(recorder):
    recorder.begin_tokens()
    with pytest.raises(ConfigError, match="already"):
        recorder.begin_tokens()
    assert recorder.finish_tokens() == []


def test_no_tokens_are_kept_without_begin_tokens(recorder):
    run(recorder, prefill_of([1]))
    with pytest.raises(AssertionError, match="begin_tokens"):
        recorder.finish_tokens()


def test_tokens_that_were_dropped_are_gone(recorder):
    recorder.begin_tokens()
    run(recorder, prefill_of([1, 1]))
    recorder.drop_tokens()
    recorder.begin_tokens()
    assert recorder.finish_tokens() == []
    recorder.drop_tokens()  # again is harmless


@pytest.mark.parametrize("is_keeping", [True, False])
def test_a_step_that_was_dropped_and_its_request_leave_nothing(recorder, is_keeping):
    if is_keeping:
        recorder.begin_tokens()
    first = run(recorder, prefill_of([1, 1], token_ids_T=[3, 4]))
    (before,) = recorder.request_eams()
    cut = prefill_of([1, 1, 1], token_ids_T=[5, 6, 7])
    (ended,) = recorder.begin_step(cut)
    np.testing.assert_array_equal(ended.prefill, before.prefill)
    recorder.record(0, routing(cut)[0])
    recorder.drop_step()
    assert recorder.request_eams() == []
    last = prefill_of([1, 1], token_ids_T=[8, 9])
    assert recorder.begin_step(last) == []
    second = run(recorder, last, seed=1)
    np.testing.assert_array_equal(recorder.request_eams()[0].prefill, naive_eam(second))
    if is_keeping:
        traces = recorder.finish_tokens()
        assert_trace(traces[0], first, [3, 4], num_prefill=2)
        assert_trace(traces[1], second, [8, 9], num_prefill=2)
        assert len(traces) == 2


def test_a_step_without_a_moe_layer_leaves_no_tokens(recorder):
    """The forward pass failed before its first MoE layer."""
    recorder.begin_tokens()
    recorder.begin_step(prefill_of([1, 1]))
    prompt = run(recorder, prefill_of([1], token_ids_T=[4]))
    (trace,) = recorder.finish_tokens()
    assert_trace(trace, prompt, [4], num_prefill=1)


def end_by_next_step(recorder: Recorder) -> None:
    recorder.begin_step(decode_of(1))


@pytest.mark.parametrize("end_step", [end_by_next_step, Recorder.finish_tokens])
def test_a_step_that_misses_a_layer_is_no_trace(recorder, end_step):
    recorder.begin_tokens()
    step = prefill_of([1, 1])
    recorder.begin_step(step)
    recorder.record(0, routing(step)[0])
    recorder.record(2, routing(step)[2])
    with pytest.raises(TraceError, match="2 of 3 MoE layers"):
        end_step(recorder)


def test_layers_with_another_top_k_are_no_trace(recorder):
    recorder.begin_tokens()
    recorder.begin_step(prefill_of([1]))
    for moe_layer_idx, top_k in enumerate((2, 2, 1)):
        recorder.record(moe_layer_idx, np.zeros((1, top_k), dtype=np.int64))
    with pytest.raises(TraceError, match="unequal top-k"):
        recorder.finish_tokens()
