"""Steps are what ran together: every token once, in order, at the place of its sequence."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.experts import Phase
from moe_infinity.predict.recorder import Recorder
from moe_infinity.predict.tracefile import SequenceTrace
from moe_infinity.tools.simulator.schedule import RecordedStep, interleave, steps_of
from tests.tools.simulator.traces import lengths, one_after_the_other, sequence


def tokens_of(step: RecordedStep) -> list[tuple[int, int, list]]:
    """(place, token id, experts [L][K]) of each token."""
    experts = step.experts_LTK.transpose(1, 0, 2).tolist()
    places, ids = step.step.sequence_of_token_T, step.step.counted_token_ids_T
    return list(zip(places.tolist(), ids.tolist(), experts, strict=True))


def as_lists(sequence: SequenceTrace) -> list[tuple[int, list]]:
    ids, experts = sequence.token_ids_T.tolist(), sequence.experts_TLK.tolist()
    return list(zip(ids, experts, strict=True))


def put_together(steps: list[RecordedStep]) -> list[list[tuple[int, list]]]:
    """The sequences that the steps are made of, cut where one begins at its place."""
    running: dict[int, list] = {}
    num_places, found = 0, []
    for recorded in steps:
        step = recorded.step
        if step.num_sequences != num_places:
            num_places, running = step.num_sequences, {}
        for place in np.flatnonzero(step.begins_B).tolist():
            running[place] = []
            found.append(running[place])
        for place, token_id, experts in tokens_of(recorded):
            running[place].append((token_id, experts))
    return found


def phases_of(sequences: list[SequenceTrace]) -> dict[int, Phase]:
    return {
        token_id: Phase.PREFILL if is_prefill else Phase.DECODE
        for s in sequences
        for token_id, is_prefill in zip(s.token_ids_T.tolist(), s.is_prefill_T, strict=True)
    }


# Any run


@settings(max_examples=150)
@given(requests=lengths(), num_users=st.integers(1, 4))
def test_every_token_of_every_request_is_in_one_step_in_order(requests, num_users):
    sequences = one_after_the_other(requests)
    steps = list(steps_of(interleave(sequences, num_users)))
    assert sorted(put_together(steps)) == sorted(map(as_lists, sequences))


@settings(max_examples=150)
@given(requests=lengths(), num_users=st.integers(1, 4))
def test_at_most_as_many_sequences_run_at_once_as_there_are_users(requests, num_users):
    for recorded in steps_of(interleave(one_after_the_other(requests), num_users)):
        assert recorded.step.num_sequences <= num_users
        assert len({place for place, *_ in tokens_of(recorded)}) <= num_users


@settings(max_examples=150)
@given(requests=lengths(), num_users=st.integers(1, 4))
def test_a_step_is_of_the_phase_of_its_tokens_and_a_prompt_is_one_of_its_own(requests, num_users):
    """A sequence that waits while another's prompt runs is there without a token: what it does
    next says nothing about this step.
    """
    sequences = one_after_the_other(requests)
    phase_of = phases_of(sequences)
    for recorded in steps_of(interleave(sequences, num_users)):
        tokens = tokens_of(recorded)
        assert {phase_of[token_id] for _, token_id, _ in tokens} == {recorded.step.phase}
        places = [place for place, *_ in tokens]
        if recorded.step.phase is Phase.PREFILL:
            assert len(set(places)) == 1
        else:
            assert len(set(places)) == len(places), "one token of each"


@settings(max_examples=100)
@given(requests=lengths(), num_users=st.integers(1, 4))
def test_the_number_of_requests_begun_counts_every_request_when_its_first_token_comes(
    requests, num_users
):
    first_ids = {s.token_ids_T[0] for s in one_after_the_other(requests)}
    begun = 0
    for recorded in steps_of(interleave(one_after_the_other(requests), num_users)):
        begun += sum(token_id in first_ids for _, token_id, _ in tokens_of(recorded))
        assert recorded.num_begun == begun
    assert begun == len(requests)


@settings(max_examples=100)
@given(requests=lengths(), num_users=st.integers(1, 4))
def test_the_recorder_of_the_engine_takes_the_steps_and_counts_every_token(requests, num_users):
    """EAMs included: each sums to tokens x k, prefill and decode apart."""
    sequences = one_after_the_other(requests)
    recorder, eams = Recorder(3, 6), []
    for recorded in steps_of(interleave(sequences, num_users)):
        eams += recorder.begin_step(recorded.step)
        for layer, experts_TK in enumerate(recorded.experts_LTK):
            recorder.record(layer, experts_TK)
    eams += recorder.request_eams()
    found = sorted((int(e.prefill.sum()), int(e.decode.sum())) for e in eams if e.decode.any())
    wanted = sorted((3 * 2 * p, 3 * 2 * d) for p, d in requests if d)
    assert found == wanted


# By hand


def test_one_request_is_a_prompt_and_then_token_by_token():
    [request] = one_after_the_other([(3, 2)])
    steps = list(steps_of([request]))
    assert [s.step.phase for s in steps] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    assert [s.step.num_tokens for s in steps] == [3, 1, 1]
    assert [s.step.begins_B.tolist() for s in steps] == [[True], [False], [False]]


def test_two_users_decode_together_after_each_ones_prompt():
    requests = interleave(one_after_the_other([(2, 3), (1, 1), (0, 2)]), 2)
    assert [r.steps_T.tolist() for r in requests] == [[0, 0, 2, 3, 4], [1, 2], [3, 4]]


def test_with_one_user_requests_follow_each_other():
    requests = interleave(one_after_the_other([(2, 2), (0, 2), (3, 0), (0, 1)]), 1)
    steps = [r.steps_T.tolist() for r in requests]
    assert steps[0] == [0, 0, 1, 2]
    assert steps[1] == [3, 4]
    assert steps[2] == [5, 5, 5]
    assert steps[3][0] > 5


def test_interleaving_leaves_the_requests_as_they_were():
    requests = one_after_the_other([(2, 2), (1, 2)])
    before = [r.steps_T.tolist() for r in requests]
    interleave(requests, 2)
    assert [r.steps_T.tolist() for r in requests] == before


def test_a_step_has_the_tokens_of_all_places_and_no_padding():
    """Prompts of 3 and 1 tokens in one step, then one token of each, then the first alone."""
    long, short = one_after_the_other([(3, 2), (1, 1)])
    short = SequenceTrace(
        short.experts_TLK, short.token_ids_T, short.is_prefill_T, np.array([0, 1])
    )
    first, second, third = steps_of([long, short])
    assert [s.step.num_tokens for s in (first, second, third)] == [4, 2, 1]
    assert [[place for place, *_ in tokens_of(s)] for s in (first, second, third)] == [
        [0, 0, 0, 1],
        [0, 1],
        [0],
    ]
    assert [s.step.begins_B.tolist() for s in (first, second)] == [[True, True], [False, False]]


def test_a_request_takes_the_lowest_free_place():
    experts = [[[0]]] * 9
    longest = sequence(experts)
    early, late = sequence(experts[:2], first_step=0), sequence(experts[:3], first_step=4)
    steps = list(steps_of([longest, early, late]))
    assert len(steps) == 9
    assert {s.step.num_sequences for s in steps} == {2}
    assert steps[4].step.begins_B.tolist() == [False, True]


def test_requests_without_a_token_are_passed_over():
    requests = [
        sequence(np.zeros((num, 1, 1)), first_step=first) for num, first in ((0, 0), (2, 0))
    ]
    assert [s.num_begun for s in steps_of(requests)] == [1, 1]
    assert list(steps_of(requests[:1])) == []


@pytest.mark.parametrize("num_users", [1, 3])
def test_requests_begin_in_the_order_they_were_sent(num_users):
    requests = one_after_the_other([(1, 3), (1, 2), (2, 1), (3, 4)])
    begins = defaultdict(list)
    for number, recorded in enumerate(steps_of(interleave(requests, num_users))):
        for _, token_id, _ in tokens_of(recorded):
            begins[token_id].append(number)
    firsts = [begins[int(r.token_ids_T[0])][0] for r in requests]
    assert firsts == sorted(firsts)
