"""The mover of a DEVICE tier on a disk that delivers when the test says so."""

from __future__ import annotations

import logging
import threading

import pytest

from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.cache.policies import make_policy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey, Phase, Residency
from moe_infinity.memory.device import PAGE_BYTES, DeviceSlots, SourceSlots
from moe_infinity.memory.device_mover import DeviceMover
from moe_infinity.memory.mover import Mover
from tests.fake_cuda import FakeCudaDevice

A, B, C, D = KEYS = [ExpertKey(0, expert_idx) for expert_idx in range(4)]
NUM_BYTES = 512


def make_table(num_slots: int) -> ResidencyTable:
    policy = make_policy("lru", num_layers=1, num_experts=4, num_slots=num_slots)
    return ResidencyTable(num_slots, policy)


class Bench:
    """Four DEVICE slots above some HOST slots; the bytes of an expert are its number and one."""

    def __init__(self, num_host_slots: int) -> None:
        self.begun = {key: threading.Event() for key in KEYS}
        self.arrived = {key: threading.Event() for key in KEYS}
        self.failing: set[ExpertKey] = set()
        self.cuda_device = FakeCudaDevice()
        self.host_table, self.table = make_table(num_host_slots), make_table(4)
        self.host_slots = SourceSlots(self.cuda_device, num_host_slots, PAGE_BYTES)
        self.slots = DeviceSlots(self.cuda_device, 4, 1024)
        self.host_mover = Mover(self.host_table, self.read, num_threads=2)
        self.mover = DeviceMover(
            self.table, self.slots, self.host_table, self.host_slots, self.host_mover,
            copied_bytes=[NUM_BYTES],
        )  # fmt: skip
        self.counters = PhaseCounters()

    def read(self, key: ExpertKey, slot_id: int) -> None:
        slot = self.host_slots.bytes_of(slot_id)
        self.begun[key].set()
        assert self.arrived[key].wait(20), key
        if key in self.failing:
            raise OSError(f"cannot read {key}")
        slot[:NUM_BYTES] = bytes([key.expert_idx + 1]) * NUM_BYTES

    def deliver(self, *keys: ExpertKey) -> None:
        for key in keys:
            self.arrived[key].set()

    def load(self, *keys: ExpertKey) -> list[ExpertKey]:
        """As an MoE layer does; asserts that kernels would read the right bytes."""
        found = []
        with self.table.holding(list(keys), Phase.DECODE) as held:
            if held.absent:
                self.mover.load_now(held.absent, held.slot_ids)
            for arrived in self.mover.arrivals(keys, self.counters):
                for key in arrived:
                    there = self.slots.tensor_of(held.slot_ids[key], NUM_BYTES)
                    assert set(there.tolist()) == {key.expert_idx + 1}
                    found.append(key)
        return found

    def load_ahead(self, *keys: ExpertKey) -> None:
        self.mover.load_ahead({key: self.table.begin_prefetch(key) for key in keys})

    def wait_for_read(self, key: ExpertKey) -> None:
        """Wait until its HOST slot is filled; the tables still say LOADING."""
        self.host_mover._loading[key].result(20)

    def drop_from_device(self, key: ExpertKey) -> None:
        """Evict an expert from DEVICE; HOST keeps it."""
        entry = self.table._entries.pop(key)
        self.table._free_slots([entry.slot_id])


@pytest.fixture
def bench(request):
    bench = Bench(getattr(request, "param", 4))
    yield bench
    bench.deliver(*KEYS)
    bench.mover.close()
    for table in (bench.table, bench.host_table):
        table.check_invariants()


def test_residents_come_first_then_what_host_has_then_what_is_on_disk(bench):
    bench.deliver(A, B, C)
    bench.load(A)
    bench.load(B)
    bench.drop_from_device(B)
    assert bench.load(C, B, A) == [A, B, C]
    assert bench.cuda_device.num_copies == 4


def test_what_host_has_is_not_read_again(bench):
    bench.deliver(A)
    bench.load(A)
    bench.drop_from_device(A)
    bench.begun[A].clear()
    assert bench.load(A) == [A]
    assert not bench.begun[A].is_set()


@pytest.mark.parametrize("bench", [1, 2], indirect=True)
def test_more_experts_than_host_slots_come_through_them(bench):
    bench.deliver(*KEYS)
    assert sorted(bench.load(*KEYS)) == KEYS


def test_a_prefetch_goes_through_both_tiers(bench):
    bench.load_ahead(A)
    assert bench.mover.num_read([A]) == 1
    bench.deliver(A)
    bench.wait_for_read(A)
    bench.mover.record_arrivals()  # its copy begins
    assert bench.table.lookup(A) is Residency.LOADING
    bench.cuda_device.synchronize()
    bench.mover.record_arrivals()
    assert bench.table.lookup(A) is Residency.RESIDENT
    assert bench.mover.load_s > 0
    assert bench.load(A) == [A]
    assert bench.table.prefetches.useful == 1


def test_a_prefetch_that_is_asked_for_while_copied_is_waited_for_by_kernels(bench):
    bench.load_ahead(A)
    bench.deliver(A)
    bench.wait_for_read(A)
    bench.mover.record_arrivals()
    assert bench.load(A) == [A]
    assert bench.table.prefetches.late == 1
    assert bench.cuda_device.take_stall_s() > 0


def test_a_prefetch_whose_read_ended_unnoticed_waits_for_no_other_one(bench):
    """B is still being read when A is asked for, and does not arrive."""
    bench.load_ahead(A)
    assert bench.begun[A].wait(20)
    bench.load_ahead(B)
    bench.deliver(A)
    bench.wait_for_read(A)
    assert bench.load(A) == [A]
    assert bench.table.lookup(B) is Residency.LOADING


@pytest.mark.parametrize("bench", [1], indirect=True)
def test_a_prefetch_that_finds_no_host_slot_is_dropped(bench):
    bench.load_ahead(A, B)
    assert bench.table.lookup(A) is Residency.LOADING
    assert bench.table.lookup(B) is None


@pytest.mark.parametrize("bench", [1], indirect=True)
def test_demand_waits_for_a_prefetch_that_has_the_only_host_slot(bench):
    bench.load_ahead(A)
    threading.Timer(0.05, bench.deliver, [A, B]).start()
    assert bench.load(B) == [B]
    assert bench.load(A) == [A]


def test_a_prefetch_that_fails_frees_both_slots_and_harms_nobody(bench, caplog):
    bench.failing.add(A)
    bench.load_ahead(A)
    bench.deliver(A, B)
    assert bench.load(B) == [B]
    with caplog.at_level(logging.WARNING):
        while bench.host_table.num_loading:
            bench.mover.record_arrivals()
    assert "cannot read" in caplog.text
    assert (bench.table.lookup(A), bench.host_table.lookup(A)) == (None, None)
    assert A in bench.mover.failed
    bench.failing.clear()
    assert bench.load(A) == [A]
    assert A not in bench.mover.failed


def test_a_prefetch_that_failed_unnoticed_is_read_again_by_who_asks(bench):
    bench.failing.add(A)
    bench.load_ahead(A, B)
    bench.deliver(A)
    assert bench.host_mover._loading[A].exception(20)
    bench.failing.clear()
    assert bench.load(A) == [A]
    bench.failing.add(C)
    bench.deliver(C)
    with pytest.raises(OSError, match="cannot read"):
        bench.load(C)
    bench.deliver(B)
    bench.table.recover()
    bench.mover.recover()
    assert [bench.table.lookup(key) for key in (A, B, C)] == [Residency.RESIDENT, None, None]
    assert [bench.host_table.lookup(key) for key in (B, C)] == [Residency.RESIDENT, None]


def test_recovering_keeps_what_arrived_and_frees_the_rest(bench):
    bench.load_ahead(A, B)
    bench.deliver(A)
    bench.wait_for_read(A)
    bench.mover.record_arrivals()
    bench.failing.add(B)
    bench.deliver(B)
    bench.table.recover()
    bench.mover.recover()
    assert bench.table.lookup(A) is Residency.RESIDENT
    assert bench.table.lookup(B) is None
    assert bench.load(A) == [A]


def copy_ahead(bench: Bench, *keys: ExpertKey) -> None:
    """Prefetch experts, and wait until the copies of all have begun."""
    bench.deliver(*keys)
    bench.load_ahead(*keys)
    while bench.host_table.num_loading:
        bench.mover.record_arrivals()


def test_what_is_queued_is_the_time_of_all_copies_under_way(bench):
    copy_ahead(bench, A)
    bench.cuda_device.synchronize()
    bench.mover.record_arrivals()
    copy_ahead(bench, B, C)
    assert bench.mover.record_arrivals() == pytest.approx(2 * bench.mover.load_s)


def test_a_stall_is_counted_once(bench):
    copy_ahead(bench, A, B)
    assert sorted(bench.load(A, B)) == [A, B]
    assert bench.cuda_device.take_stall_s() > 0
    assert bench.cuda_device.take_stall_s() == 0
