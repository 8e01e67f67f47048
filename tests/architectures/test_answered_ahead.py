"""Answers that wait for their modules: each is taken once, for the very tensor it was made for."""

from __future__ import annotations

import weakref

import torch

from moe_infinity.architectures.answered_ahead import AnsweredAhead, TensorVersion


def test_answer_is_taken_once():
    answers: AnsweredAhead[str, int] = AnsweredAhead()
    x = torch.ones(2)
    answers.put("k_proj", x, 7)
    assert answers.take("q_proj", x) is None
    assert answers.take("k_proj", x) == 7
    assert answers.take("k_proj", x) is None


def test_answer_is_dropped_for_another_tensor_or_other_contents():
    answers: AnsweredAhead[int, int] = AnsweredAhead()
    x = torch.ones(2)
    for other in (x.clone(), x.view(2)):
        answers.put(0, x, 7)
        assert answers.take(0, other) is None
        assert answers.take(0, x) is None
    answers.put(0, x, 7)
    x.add_(1)
    assert answers.take(0, x) is None


def test_answer_is_not_kept_for_tensors_that_count_no_versions():
    answers: AnsweredAhead[int, int] = AnsweredAhead()
    with torch.inference_mode():
        x = torch.ones(2)
        answers.put(0, x, 7)
    assert TensorVersion.of(x) is None
    assert answers.take(0, x) is None


def test_a_tensor_is_not_kept_for_the_next_call():
    answers: AnsweredAhead[int, int] = AnsweredAhead()
    x = torch.ones(2)
    answers.put(0, x, 7)
    kept = weakref.ref(x)
    del x
    assert kept() is None
    assert answers.take(0, torch.ones(2)) is None


def test_clear_drops_all_answers():
    answers: AnsweredAhead[int, int] = AnsweredAhead()
    x = torch.ones(2)
    answers.put(0, x, 7)
    answers.clear()
    assert answers.take(0, x) is None
