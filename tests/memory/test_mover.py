"""The mover: residents at once, others as they arrive, and whatever fails leaves nothing behind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest

from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.cache.policies import make_policy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import LoadTimeout
from moe_infinity.experts import ExpertKey, Phase, Residency
from moe_infinity.memory import mover as mover_module
from moe_infinity.memory.mover import Mover

pytestmark = pytest.mark.timeout(20)
A, B, C, D = (ExpertKey(0, expert_idx) for expert_idx in range(4))


class Disk:
    """Experts that arrive when the test says so."""

    def __init__(self) -> None:
        self.arrived = {key: threading.Event() for key in (A, B, C, D)}
        self.begun = {key: threading.Event() for key in (A, B, C, D)}
        self.asked: list[ExpertKey] = []
        self.failing: set[ExpertKey] = set()

    def read(self, key: ExpertKey, slot_id: int) -> None:
        self.asked.append(key)
        self.begun[key].set()
        assert self.arrived[key].wait(10), key
        if key in self.failing:
            raise OSError(f"cannot read {key}")

    def deliver(self, *keys: ExpertKey) -> None:
        for key in keys:
            self.arrived[key].set()


class Bench:
    """A table of four slots, its mover and its disk."""

    def __init__(self, num_threads: int = 4) -> None:
        self.disk = Disk()
        self.table = ResidencyTable(4, make_policy("lru", num_layers=1, num_experts=4, num_slots=4))
        self.mover = Mover(self.table, self.disk.read, num_threads=num_threads)
        self.counters = PhaseCounters()

    def load(self, *keys: ExpertKey) -> list[ExpertKey]:
        """As an MoE layer does: hold the slots, start the loads, take experts as they arrive."""
        with self.table.holding(list(keys), Phase.DECODE) as held:
            self.mover.load_now(held.absent, held.slot_ids)
            return [key for keys in self.mover.arrivals(keys, self.counters) for key in keys]


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.disk.deliver(A, B, C, D)
    bench.mover.close()
    bench.table.check_invariants()


def test_every_expert_asked_for_arrives_once_and_is_resident(bench):
    bench.disk.deliver(A, B, C)
    assert sorted(bench.load(A, B, C)) == [A, B, C]
    assert sorted(bench.table.resident_keys()) == [A, B, C]
    assert sorted(bench.disk.asked) == [A, B, C]


def test_residents_come_before_what_is_still_loading(bench):
    bench.disk.deliver(B)
    bench.load(B)
    with bench.table.holding([A, B], Phase.DECODE) as held:
        bench.mover.load_now(held.absent, held.slot_ids)
        arrivals = filter(None, bench.mover.arrivals([A, B], bench.counters))  # none for 0.2 s: []
        assert next(arrivals) == [B]
        bench.disk.deliver(A)
        assert list(arrivals) == [[A]]


def test_experts_come_in_the_order_they_arrive_not_the_order_asked(bench):
    with bench.table.holding([A, B], Phase.DECODE) as held:
        bench.mover.load_now(held.absent, held.slot_ids)
        arrivals = filter(None, bench.mover.arrivals([A, B], bench.counters))  # none for 0.2 s: []
        bench.disk.deliver(B)
        assert next(arrivals) == [B]
        bench.disk.deliver(A)
        assert next(arrivals) == [A]


def test_time_spent_waiting_is_counted_and_residents_cost_none(bench, monkeypatch):
    def slow_wait(*args, **kwargs):
        time.sleep(0.05)
        return wait(*args, **kwargs)

    monkeypatch.setattr(mover_module, "wait", slow_wait)
    bench.disk.deliver(A)
    bench.load(A)
    waited = bench.counters.stall_s
    assert waited >= 0.05
    bench.load(A)
    assert bench.counters.stall_s == waited


def test_a_failed_read_is_raised_to_who_asked_and_its_slot_is_free_again(bench):
    bench.disk.failing = {A}
    bench.disk.deliver(A)
    with pytest.raises(OSError, match="cannot read"):
        bench.load(A)
    assert bench.table.lookup(A) is None
    bench.table.check_invariants()
    bench.disk.failing = set()
    assert bench.load(A) == [A]


def test_what_a_failed_layer_left_loading_is_settled_before_the_next_step(bench):
    bench.disk.failing = {A, C}
    bench.disk.deliver(A)
    with pytest.raises(OSError, match="cannot read"):
        bench.load(A, B, C)
    assert bench.disk.begun[B].wait(10)  # one that has not begun is cancelled
    assert bench.disk.begun[C].wait(10)
    bench.disk.deliver(B, C)
    bench.mover.recover()
    assert [bench.table.lookup(key) for key in (A, B, C)] == [None, Residency.RESIDENT, None]


def test_a_load_that_hangs_ends_in_a_timeout_and_is_taken_up_when_it_ends(bench, monkeypatch):
    monkeypatch.setattr(mover_module, "LOAD_TIMEOUT_S", 0.05)
    with pytest.raises(LoadTimeout):
        bench.load(A)
    assert bench.disk.begun[A].wait(10)  # one that has not begun is cancelled
    with pytest.raises(LoadTimeout):
        bench.mover.recover()
    bench.disk.deliver(A)
    monkeypatch.setattr(mover_module, "LOAD_TIMEOUT_S", 5.0)
    bench.mover.recover()
    assert bench.load(A) == [A]
    assert bench.disk.asked == [A]


def test_an_expert_still_loading_from_an_earlier_layer_is_waited_for(bench):
    slot_id = bench.table.begin_load(A, Phase.DECODE)
    bench.mover.load_now([A], {A: slot_id})
    threading.Timer(0.1, lambda: bench.disk.deliver(A)).start()
    assert bench.load(A) == [A]
    assert bench.table.lookup(A) is Residency.RESIDENT
    assert bench.disk.asked == [A]


def test_an_expert_whose_load_was_never_started_does_not_count_as_arrived(bench, monkeypatch):
    """If no thread can be started, or Ctrl-C comes between reserving and loading, no thread fills
    the reserved slot. Computing from it would give wrong tokens and no error."""

    def no_thread(*args):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(bench.mover._threads, "submit", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            bench.load(A)
    bench.disk.deliver(A)
    bench.mover.recover()
    assert bench.load(A) == [A]
    assert bench.disk.asked == [A], "A was given out though nobody had read it"


def test_ctrl_c_while_a_thread_starts_leaves_no_read_that_nobody_waits_for(bench, monkeypatch):
    """The list of threads lacks the one that was just started. An earlier version freed the slot
    while that thread still wrote to it."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.load(A)
    monkeypatch.setattr(mover_module, "LOAD_TIMEOUT_S", 0.05)
    assert bench.disk.begun[A].wait(10)
    with pytest.raises(LoadTimeout):
        bench.mover.recover()
    bench.disk.deliver(A)
    monkeypatch.setattr(mover_module, "LOAD_TIMEOUT_S", 5.0)
    bench.mover.recover()
    assert bench.table.lookup(A) is Residency.RESIDENT


def test_close_waits_for_running_reads_and_drops_those_not_begun():
    bench = Bench(num_threads=1)
    slot_ids = {key: bench.table.begin_load(key, Phase.DECODE) for key in (A, B)}
    bench.mover.load_now([A, B], slot_ids)
    assert bench.disk.begun[A].wait(10)
    threading.Timer(0.1, lambda: bench.disk.deliver(A, B)).start()
    bench.mover.close()
    assert bench.disk.arrived[A].is_set()
    assert bench.disk.asked == [A]
    bench.mover.close()
