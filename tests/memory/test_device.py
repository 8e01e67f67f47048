"""DEVICE slots, the HOST slots and staging buffers they are filled from, and their budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_infinity.errors import ConfigError
from moe_infinity.memory.cuda import Copy, Event, open_cuda_device
from moe_infinity.memory.device import (
    NUM_STAGING_BUFFERS,
    PAGE_BYTES,
    DeviceSlots,
    SourceSlots,
    num_device_slots,
)
from tests.fake_cuda import FakeCudaDevice, FakeMark

MIB, GIB = 1 << 20, 1 << 30
NUM_BYTES = 1000  # of an expert, less than a slot


class Bench:
    """Four HOST slots and two DEVICE slots."""

    def __init__(self, cuda_device: FakeCudaDevice) -> None:
        self.cuda_device = cuda_device
        self.host = SourceSlots(cuda_device, 4, PAGE_BYTES)
        self.device = DeviceSlots(cuda_device, 2, 1024)

    def write(self, host_slot: int, value: int) -> None:
        """Fill a HOST slot with one value, as a read from disk would."""
        self.host.bytes_of(host_slot)[:NUM_BYTES] = bytes([value]) * NUM_BYTES

    def copy(self, host_slot: int, device_slot: int) -> Copy:
        source = self.host.tensor_of(host_slot, NUM_BYTES)
        is_locked = self.host.is_locked(host_slot)
        copy = self.device.fill(device_slot, source, is_locked=is_locked)
        self.host.note_copy(host_slot, copy)
        return copy

    def values(self, device_slot: int) -> set[int]:
        return set(self.device.tensor_of(device_slot, NUM_BYTES).tolist())


@pytest.fixture(params=[True, False], ids=["page-locked", "staged"])
def bench(request):
    bench = Bench(FakeCudaDevice(is_locking=request.param))
    yield bench
    bench.cuda_device.synchronize()
    bench.host.close()


def test_a_copy_brings_the_bytes_of_its_expert_and_touches_no_other_slot(bench):
    before = bench.values(1)
    bench.write(3, 7)
    bench.copy(3, 0).synchronize()
    assert bench.values(0) == {7}
    assert bench.values(1) == before


def test_a_copy_is_not_over_before_its_time(bench):
    bench.write(0, 7)
    copy = bench.copy(0, 0)
    assert not copy.query()
    assert bench.values(0) != {7}
    bench.cuda_device.let_kernels_wait(copy)
    assert copy.query()
    assert bench.values(0) == {7}
    assert bench.cuda_device.take_stall_s() == pytest.approx(copy.took_s)
    assert bench.cuda_device.take_stall_s() == 0


def test_a_host_slot_keeps_its_bytes_until_they_are_copied(bench):
    bench.write(0, 7)
    bench.copy(0, 0)
    bench.write(0, 9)  # waits
    bench.copy(0, 1)
    bench.cuda_device.synchronize()
    assert (bench.values(0), bench.values(1)) == ({7}, {9})


def test_more_copies_than_there_are_staging_buffers_lose_nothing(bench):
    for value in range(3 * NUM_STAGING_BUFFERS):
        bench.write(value % 4, value)
        copy = bench.copy(value % 4, value % 2)
        if value % 2:
            copy.synchronize()
            assert (bench.values(0), bench.values(1)) == ({value - 1}, {value})


def test_a_copy_starts_after_the_last_kernels_that_read_its_slot(monkeypatch):
    cuda_device, afters = FakeCudaDevice(), []
    copy = cuda_device.copy

    def noting(source: Tensor, destination: Tensor, after: Event | None) -> Copy:
        afters.append(after)
        return copy(source, destination, after)

    monkeypatch.setattr(cuda_device, "copy", noting)
    marks = [FakeMark(), FakeMark()]
    coming = iter(marks)
    monkeypatch.setattr(cuda_device, "mark", lambda: next(coming))
    bench = Bench(cuda_device)
    bench.write(0, 1)
    bench.copy(0, 0)
    bench.device.mark_read([0, 1])
    bench.device.mark_read([1])
    bench.copy(0, 0)
    bench.copy(0, 1)
    assert afters == [None, marks[0], marks[1]]


def test_pages_are_locked_in_chunks_when_a_slot_of_them_is_first_filled(monkeypatch):
    monkeypatch.setattr("moe_infinity.memory.device.LOCKED_CHUNK_BYTES", 2 * PAGE_BYTES)
    bench = Bench(FakeCudaDevice())
    bench.write(2, 1)
    assert sum(bench.cuda_device.locked.values()) == 2 * PAGE_BYTES
    assert [bench.host.is_locked(slot) for slot in range(4)] == [False, False, True, True]
    bench.write(1, 1)
    bench.write(3, 1)
    assert sum(bench.cuda_device.locked.values()) == 4 * PAGE_BYTES
    bench.host.close()
    assert not bench.cuda_device.locked


def test_once_pages_could_not_be_locked_no_more_are_tried(monkeypatch):
    monkeypatch.setattr("moe_infinity.memory.device.LOCKED_CHUNK_BYTES", PAGE_BYTES)
    cuda_device, asked = FakeCudaDevice(is_locking=False), []
    monkeypatch.setattr(cuda_device, "page_lock", lambda memory: asked.append(memory))
    bench = Bench(cuda_device)
    for slot in range(4):
        bench.write(slot, slot)
    assert len(asked) == 1


@pytest.mark.parametrize("is_locking", [True, False])
def test_a_slot_is_filled_after_the_kernels_that_read_it(is_locking, monkeypatch):
    bench, mark = Bench(FakeCudaDevice(is_locking=is_locking)), FakeMark()
    afters: list[Event | None] = []
    copy = bench.cuda_device.copy

    def noting(source: Tensor, destination: Tensor, after: Event | None) -> Copy:
        afters.append(after)
        return copy(source, destination, after)

    monkeypatch.setattr(bench.cuda_device, "mark", lambda: mark)
    monkeypatch.setattr(bench.cuda_device, "copy", noting)
    bench.device.mark_read([1])
    for slot_id in range(2):
        bench.write(slot_id, slot_id + 1)
        bench.copy(slot_id, slot_id)
    bench.cuda_device.synchronize()
    assert afters == [None, mark]
    assert [bench.values(slot_id) for slot_id in range(2)] == [{1}, {2}]


# The budget


def slots_for(device_memory: int | str | None, *, free: int, dense: int = 0) -> int:
    cuda_device = FakeCudaDevice(total_bytes=100 * MIB)
    cuda_device.used_bytes = 100 * MIB - free
    return num_device_slots(
        device_memory, cuda_device, slot_bytes=MIB, num_experts=200, dense_bytes=dense
    )


@pytest.mark.parametrize(
    ("device_memory", "slots"),
    [(MIB, 1), ("40MiB", 40), ("25%", 50), (None, 80), ("95MiB", 95)],
)
def test_a_budget_is_the_number_of_whole_experts_it_holds(device_memory, slots):
    assert slots_for(device_memory, free=100 * MIB) == slots


def test_without_a_budget_dense_weights_and_others_on_the_device_are_thought_of():
    assert slots_for(None, free=70 * MIB, dense=20 * MIB) == 40


def test_no_more_slots_than_experts_are_made():
    cuda_device = FakeCudaDevice(total_bytes=GIB)
    sizes = {"slot_bytes": MIB, "num_experts": 8, "dense_bytes": 0}
    assert num_device_slots(None, cuda_device, **sizes) == 8
    assert num_device_slots("150%", cuda_device, **sizes) == 8


@pytest.mark.parametrize("device_memory", [0, MIB - 1, "0.4%"])
def test_a_budget_below_one_expert_is_refused_with_what_one_takes(device_memory):
    with pytest.raises(ConfigError, match=r"one takes 1\.0 MiB.*\n.*device='cpu'"):
        slots_for(device_memory, free=100 * MIB)


@pytest.mark.parametrize(
    ("device_memory", "free", "dense"),
    [("96MiB", 100, 0), ("80MiB", 100, 16), ("40MiB", 44, 0), ("150%", 100, 0), (None, 5, 0)],
)
def test_a_budget_that_leaves_no_room_for_anything_else_is_refused_with_the_numbers(
    device_memory, free, dense
):
    with pytest.raises(ConfigError, match=r"KV cache.*less than 5\.0 MiB\n.*100\.0 MiB"):
        slots_for(device_memory, free=free * MIB, dense=dense * MIB)


def test_an_allocation_the_device_cannot_make_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"16\.0 MiB could not be.*4\.0 GiB are free\n.*lower"):
        DeviceSlots(FakeCudaDevice(), 1000, 16 * MIB)


# Which device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_a_device_that_is_not_there_is_refused_with_what_there_is(device):
    with pytest.raises(ConfigError, match=rf"'{device}'.*no CUDA device\n.*device='cpu'"):
        open_cuda_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_device_experts_compute_on_the_cpu(device):
    assert open_cuda_device(device) is None
