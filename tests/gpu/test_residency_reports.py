"""What the residency table learns of steps that a device decided."""

from __future__ import annotations

import numpy as np
import pytest

from moe_infinity.cache.policies import Lru
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import Phase, Residency
from moe_infinity.gpu.reports import apply_load, evict_all, leaving_scores
from tests.cache.test_residency import A, B, C, load, use


@pytest.fixture
def policy() -> Lru:
    return Lru(num_layers=1, num_experts=5, num_slots=1)


@pytest.fixture
def table(policy: Lru) -> ResidencyTable:
    """Two slots."""
    return ResidencyTable(2, policy)


def test_a_device_takes_a_slot_from_nobody_or_from_who_had_it(table):
    load(table, A)
    free = 1 - table.slot_of(A)
    apply_load(table, B, free)
    table.check_invariants()
    assert table.resident_slots() == {A: table.slot_of(A), B: free}
    assert table.evictions == 0
    apply_load(table, C, free)
    table.check_invariants()
    assert table.resident_slots() == {A: table.slot_of(A), C: free}
    assert table.evictions == 1


def test_nothing_is_believed_of_slots_after_a_step_that_was_interrupted(table):
    load(table, A, B)
    evict_all(table)
    table.check_invariants()
    assert (len(table), table.evictions) == (0, 2)
    load(table, C)
    assert table.lookup(C) is Residency.RESIDENT


def test_a_prefetch_that_the_device_evicts_unused_was_wasted(table):
    slot = table.begin_prefetch(A)
    table.finish_load(A)
    apply_load(table, B, slot)
    assert table.prefetches.wasted == 1


def test_who_leaves_is_told_by_score_and_transient_ones_leave_first(table, policy):
    load(table, A)
    table.begin_load(B, Phase.PREFILL)
    table.finish_load(B)
    use(policy, A, B)
    told = policy.scores().copy()
    scores = leaving_scores(table, policy, 0)
    assert (policy.scores() == told).all()
    assert scores[A] == policy.scores()[A]
    assert scores[B] < scores.min(where=scores != scores[B], initial=0)
    assert np.isfinite(scores).all()
    table.note_use([B])
    assert (leaving_scores(table, policy, 0) == policy.scores()).all()
