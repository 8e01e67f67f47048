"""A prefetch in the mover never delays a demand load and never ends in a wrong state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.cache.policies import make_policy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey, Phase, Residency
from moe_infinity.memory import mover as mover_module
from moe_infinity.memory.mover import Mover

pytestmark = pytest.mark.timeout(20)
A, B, C, D = KEYS = [ExpertKey(0, expert_idx) for expert_idx in range(4)]


class Bench:
    """A table of four slots and its mover, on a disk that delivers when the test says so."""

    def __init__(self) -> None:
        self.begun = {key: threading.Event() for key in KEYS}
        self.arrived = {key: threading.Event() for key in KEYS}
        self.asked: list[ExpertKey] = []
        self.failing: set[ExpertKey] = set()
        self.table = ResidencyTable(4, make_policy("lru", num_layers=1, num_experts=4, num_slots=4))
        self.mover = Mover(self.table, self.read, num_threads=1)
        self.counters = PhaseCounters()

    def read(self, key: ExpertKey, slot_id: int) -> None:
        self.asked.append(key)
        self.begun[key].set()
        assert self.arrived[key].wait(10), key
        if key in self.failing:
            raise OSError(f"cannot read {key}")

    def deliver(self, *keys: ExpertKey) -> None:
        for key in keys:
            self.arrived[key].set()

    def load_ahead(self, *keys: ExpertKey) -> None:
        """Prefetch experts, and wait until the first of them is being read."""
        self.mover.load_ahead({key: self.table.begin_prefetch(key) for key in keys})
        assert self.begun[keys[0]].wait(10)

    def load(self, *keys: ExpertKey) -> list[ExpertKey]:
        with self.table.holding(list(keys), Phase.DECODE) as held:
            self.mover.load_now(held.absent, held.slot_ids)
            return [key for keys in self.mover.arrivals(keys, self.counters) for key in keys]

    def wait_until_settled(self) -> None:
        while self.mover.record_arrivals() or self.table.num_loading:
            pass


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.deliver(*KEYS)
    bench.mover.close()
    bench.table.check_invariants()


def test_a_prefetch_that_arrived_is_resident_once_settled(bench):
    bench.load_ahead(A)
    assert bench.table.lookup(A) is Residency.LOADING
    bench.deliver(A)
    bench.wait_until_settled()
    assert bench.table.lookup(A) is Residency.RESIDENT
    assert bench.load(A) == [A]
    assert (bench.table.prefetches.useful, bench.table.prefetches.late) == (1, 0)
    assert bench.asked == [A]


def test_a_demand_load_does_not_wait_for_prefetches(bench):
    bench.load_ahead(A, B)
    bench.deliver(C)
    assert bench.load(C) == [C]
    assert C in bench.asked
    assert B not in bench.asked


def test_a_queued_prefetch_that_is_asked_for_becomes_a_demand_load(bench):
    bench.load_ahead(A, B)
    bench.deliver(B)  # A, which is before B in the queue, does not arrive
    assert bench.load(B) == [B]
    assert bench.table.lookup(A) is Residency.LOADING
    bench.deliver(A)
    bench.wait_until_settled()
    assert sorted(bench.asked) == [A, B]


def test_a_prefetch_being_read_when_asked_for_is_not_read_again(bench):
    bench.load_ahead(A)
    threading.Timer(0.05, bench.deliver, [A]).start()
    assert bench.load(A) == [A]
    assert bench.asked == [A]
    assert (bench.table.prefetches.useful, bench.table.prefetches.late) == (0, 1)
    assert bench.counters.stall_s > 0


def test_a_failed_prefetch_frees_its_slot_and_harms_nobody(bench, caplog):
    bench.failing.add(A)
    bench.load_ahead(A)
    bench.deliver(A)
    with caplog.at_level(logging.WARNING):
        bench.wait_until_settled()
    assert "cannot read" in caplog.text
    assert bench.table.lookup(A) is None
    bench.failing.clear()
    assert bench.load(A) == [A]


def test_a_prefetch_that_fails_when_asked_for_raises(bench):
    bench.failing.add(A)
    bench.load_ahead(A)
    bench.deliver(A)
    with pytest.raises(OSError, match="cannot read"):
        bench.load(A)
    assert bench.table.lookup(A) is None


def test_recovering_settles_prefetches_too(bench):
    bench.load_ahead(A, B)
    threading.Timer(0.05, bench.deliver, [A, B]).start()
    bench.table.recover()
    bench.mover.recover()
    assert bench.table.num_loading == 0
    bench.deliver(C)
    assert bench.load(C) == [C]
    bench.load_ahead(D)  # the queue works again


def test_the_time_of_a_load_is_measured(bench):
    assert bench.mover.load_s == 0
    bench.load_ahead(A)
    assert bench.mover.record_arrivals() == 0  # nothing known yet
    bench.deliver(A)
    bench.wait_until_settled()
    assert bench.mover.load_s > 0


def test_a_prefetch_that_failed_is_remembered_until_a_demand_load_succeeds(bench):
    bench.failing.add(A)
    bench.load_ahead(A)
    bench.deliver(A)
    bench.wait_until_settled()
    assert bench.mover.failed == {A}
    bench.failing.clear()
    bench.load(A)
    assert bench.mover.failed == set()


def test_streamed_loads_come_after_demand_loads_and_nobody_begins_them_twice(bench):
    with bench.table.holding([A], Phase.PREFILL) as held:
        bench.mover.load_now(held.absent, held.slot_ids)
        assert bench.begun[A].wait(10)
        assert bench.mover.stream([B, C, D]) == [B, C], "one slot is left to others"
        bench.deliver(A, B, C)
        assert [*filter(None, bench.mover.arrivals([A], bench.counters))] == [[A]]
    assert sorted(bench.load(C, B)) == [B, C]
    assert bench.asked == [A, B, C]
    assert all(bench.table.lookup(key) is Residency.RESIDENT for key in (A, B, C))


def test_a_streamed_expert_that_its_layer_does_not_use_is_entered_all_the_same(bench):
    bench.deliver(A, B, C)
    assert bench.mover.stream([A, B]) == [A, B]
    assert bench.load(A) == [A]
    bench.wait_until_settled()
    assert bench.table.lookup(B) is Residency.RESIDENT


def test_streaming_keeps_what_the_next_layer_has_already(bench):
    bench.deliver(A, B, C)
    bench.load(A, B, C)
    for key in (A, B, C):
        bench.table._entries[key].is_transient = True
    bench.table.recover()  # as if prefill had brought them
    bench.mover.stream([C, D])
    assert bench.table.lookup(C) is Residency.RESIDENT
    bench.deliver(D)
    assert bench.load(D) == [D]


def test_demand_loads_begin_in_the_order_of_the_files(bench):
    bench.mover._in_file_order = lambda keys: sorted(keys, reverse=True)
    bench.deliver(*KEYS)
    bench.load(A, B, C, D)
    assert bench.asked == [D, C, B, A]


def test_a_preload_gives_way_until_a_layer_asks_for_it(bench):
    gives_way = threading.Event()

    def read_ahead(key: ExpertKey, slot_id: int, is_wanted: Callable[[], bool]) -> None:
        gives_way.set()
        while not is_wanted():
            time.sleep(0.001)

    bench.mover._read_ahead = read_ahead
    ended = threading.Event()
    bench.mover.preload({A: bench.table.begin_load(A, Phase.PREFILL)}, ended.set)
    assert gives_way.wait(10)
    assert (bench.mover.num_preloading, bench.mover.record_arrivals()) == (1, 0)
    assert bench.load(A) == [A]
    assert ended.wait(10)


def test_preloads_are_late_once_none_has_ended_for_long(bench, monkeypatch):
    monkeypatch.setattr(mover_module, "LOAD_TIMEOUT_S", 0.05)

    def arrive(key: ExpertKey) -> None:
        ended.clear()
        bench.deliver(key)
        assert ended.wait(10)
        bench.mover.record_arrivals()

    ended = threading.Event()
    slot_ids = {key: bench.table.begin_load(key, Phase.PREFILL) for key in (A, B)}
    assert not bench.mover.is_preload_late
    bench.mover.preload(slot_ids, ended.set)
    time.sleep(0.06)
    assert bench.mover.is_preload_late
    monkeypatch.setattr(mover_module, "LOAD_TIMEOUT_S", 60)
    arrive(A)
    assert not bench.mover.is_preload_late
    arrive(B)
    assert bench.mover.num_preloading == 0


def test_who_waits_long_is_given_nothing_now_and_then(bench, monkeypatch):
    monkeypatch.setattr(mover_module, "ARRIVAL_POLL_S", 0.01)
    with bench.table.holding([A], Phase.PREFILL) as held:
        bench.mover.load_now(held.absent, held.slot_ids)
        arrivals = bench.mover.arrivals([A], bench.counters)
        assert next(arrivals) == []
        bench.deliver(A)
        assert [key for keys in arrivals for key in keys] == [A]
