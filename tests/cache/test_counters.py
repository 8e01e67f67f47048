"""What is counted, and what follows from it."""

from __future__ import annotations

import json

import pytest

from moe_infinity.cache.counters import Counters, PhaseCounters, PrefetchCounters
from moe_infinity.experts import Phase


def test_prefill_and_decode_are_counted_apart():
    counters = Counters()
    counters.of(Phase.DECODE).hits += 1
    assert counters.decode.hits == 1
    assert counters.prefill.hits == 0
    assert counters.of(Phase.PREFILL) is counters.prefill


def test_two_models_do_not_share_counters():
    Counters().prefill.misses += 1
    assert Counters().prefill.misses == 0


def test_a_late_hit_is_a_lookup_but_not_a_hit():
    counters = PhaseCounters(hits=3, late_hits=2, misses=1)
    assert counters.lookups == 6
    assert counters.hit_rate == pytest.approx(3 / 6)


def test_there_is_no_hit_rate_before_the_first_lookup():
    assert PhaseCounters().hit_rate is None


def test_a_report_of_a_phase_can_be_written_as_json():
    counters = PhaseCounters(hits=1, misses=3, steps=2, tokens=8, bytes_read=640, stall_s=0.5)
    assert json.loads(json.dumps(counters.as_dict())) == {
        "hits": 1,
        "late_hits": 0,
        "misses": 3,
        "hit_rate": 0.25,
        "steps": 2,
        "tokens": 8,
        "bytes_read": 640,
        "stall_s": 0.5,
    }


def test_the_verdicts_on_prefetches_give_precision_and_coverage():
    counters = PrefetchCounters(begun=9, wasted=2)
    for is_late in (False, True, False):
        counters.add_use(is_late=is_late)
    assert (counters.useful, counters.late) == (2, 1)
    assert counters.precision == pytest.approx(3 / 5)  # the other 4 have no verdict yet
    assert counters.coverage(misses=5) == pytest.approx(2 / 8)
    assert json.loads(json.dumps(counters.as_dict()))["precision"] == counters.precision


def test_without_a_verdict_there_is_no_precision_and_without_lookups_no_coverage():
    assert PrefetchCounters(begun=3).precision is None
    assert PrefetchCounters().coverage(0) is None
