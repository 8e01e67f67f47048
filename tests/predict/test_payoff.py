"""Prefetch that measures whether it pays."""

from __future__ import annotations

import pytest

from moe_infinity.predict.planner import BLOCK, FIRST, KEPT, TRIAL, PayOff


def run(pay_off: PayOff, num_steps: int, *, with_s: float, without_s: float) -> list[bool]:
    """Whether each step prefetched."""
    modes = []
    for _ in range(num_steps):
        modes.append(pay_off.is_on)
        pay_off.end_step(with_s if pay_off.is_on else without_s)
    return modes


@pytest.mark.parametrize("pays", [True, False])
def test_the_faster_way_is_kept_and_tried_again(pays):
    pay_off = PayOff()
    times = {"with_s": 1.0 if pays else 2.0, "without_s": 1.5}
    trial = [block for block in TRIAL for _ in range(BLOCK)]
    assert run(pay_off, FIRST, **times) == [False] * FIRST
    for _ in range(3):
        assert run(pay_off, len(trial), **times) == trial
        assert run(pay_off, KEPT, **times) == [pays] * KEPT
    times = {"with_s": 1.5, "without_s": 1.0 if pays else 2.0}  # it is the other way round now
    assert run(pay_off, len(trial), **times) == trial
    assert run(pay_off, KEPT, **times) == [not pays] * KEPT


def test_prefetch_that_costs_a_third_costs_little_over_time():
    for num_steps in (40, 100, 1000, 5000):
        modes = run(PayOff(), num_steps, with_s=1.3, without_s=1.0)
        assert sum(1.3 if is_on else 1.0 for is_on in modes) <= 1.03 * num_steps


def test_a_cache_that_fills_up_meanwhile_favours_neither_side():
    pay_off = PayOff()
    for step in range(FIRST + BLOCK * len(TRIAL)):
        seconds = 10 - 0.1 * step
        pay_off.end_step(seconds * (1.01 if pay_off.is_on else 1))
    assert not pay_off.is_on


def test_a_first_step_of_a_block_does_not_count():
    pay_off = PayOff()
    before = False
    for _ in range(FIRST + BLOCK * len(TRIAL)):
        is_first = pay_off.is_on != before
        before = pay_off.is_on
        pay_off.end_step(100 if is_first else (1 if pay_off.is_on else 2))
    assert pay_off.is_on
