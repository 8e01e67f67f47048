"""The link: one expert at a time, demand first; a prefetch that waits loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.experts import ExpertKey
from moe_infinity.tools.simulator.replay import Hardware, Link

A, B, C = (ExpertKey(0, expert_idx) for expert_idx in range(3))


@pytest.fixture
def link() -> Link:
    """An expert takes 4 seconds."""
    return Link(4.0)


def test_a_load_takes_its_bytes_over_the_bandwidth():
    assert Hardware(bytes_per_s=2e9, expert_bytes=10**7, layer_s=1e-3).load_s == 0.005


def test_prefetches_arrive_in_order_one_after_the_other(link):
    link.begin([A, B])
    assert link.queued_s == 8.0
    assert link.run(3.5) == []
    assert link.run(0.5) == [A]
    assert link.run(3.0) == []
    assert link.run(5.0) == [B]
    assert link.queued_s == 0.0


def test_time_left_over_by_one_prefetch_is_spent_on_the_next(link):
    link.begin([A, B])
    link.begin([C])
    assert link.run(9.0) == [A, B]
    assert link.queued_s == 3.0


def test_demand_does_not_wait_for_prefetches_and_they_go_on_where_they_were(link):
    link.begin([A])
    link.run(3.0)
    assert link.demand(2, []) == 8.0
    assert link.queued_s == 1.0
    assert link.run(1.0) == [A]


def test_a_late_prefetch_costs_only_what_is_left_of_it(link):
    link.begin([A, B])
    link.run(3.0)
    assert link.demand(0, [A]) == 1.0
    assert link.run(4.0) == [B], "it is not delivered twice"


def test_a_late_prefetch_that_has_not_begun_costs_a_whole_load_and_overtakes(link):
    link.begin([A, B])
    link.run(3.0)
    assert link.demand(1, [B]) == 8.0
    assert link.queued_s == 1.0


def test_an_idle_link_delivers_nothing_and_demands_cost_nothing_but_themselves(link):
    assert link.run(100.0) == []
    assert link.demand(0, []) == 0.0
    assert link.demand(3, []) == 12.0


@settings(max_examples=100)
@given(passes=st.lists(st.integers(0, 9), max_size=20), num=st.integers(0, 6))
def test_the_link_never_carries_more_than_time_allows(passes, num):
    """Whole seconds: exact."""
    link = Link(4.0)
    keys = [ExpertKey(1, expert_idx) for expert_idx in range(num)]
    link.begin(keys)
    arrived, elapsed = [], 0
    for seconds in passes:
        arrived += link.run(seconds)
        elapsed += seconds
        assert arrived == keys[: elapsed // 4]
        assert link.queued_s == max(4.0 * num - elapsed, 0)
