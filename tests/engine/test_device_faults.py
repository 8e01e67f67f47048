"""A model with a DEVICE tier where the host decides: no slot is read or overwritten too early, and
what fails or is interrupted leaves it usable."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.engine.compute import LayerComputer
from moe_infinity.errors import CheckpointError, ConfigError, OutOfMemory
from moe_infinity.memory.cuda import Copy, Event
from moe_infinity.memory.device import DeviceSlots, SourceSlots
from moe_infinity.memory.device_mover import DeviceMover
from tests.fake_cuda import FakeCudaDevice, fake_device
from tests.on_device import LONG_PROMPT, assert_same_tokens, greedy

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(3)]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    """Tokens of a run on the CPU, of the short and the long prompt."""
    with MoE(tiny_checkpoint, exact=True, device="cpu") as moe:
        return greedy(moe), greedy(moe, LONG_PROMPT)


# Events. Each test shows that it fails when the wait it is about is removed.

SLOW = 1e5  # bytes per second
TIGHT: dict[str, Any] = {"device_memory": "30%", "host_memory": "10%"}


def wrong_tokens(
    checkpoint: Any, expected: tuple[Tensor, Tensor], cuda_device: FakeCudaDevice
) -> bool:
    with fake_device(cuda_device), MoE(checkpoint, exact=True, **TIGHT) as moe:
        return not torch.equal(greedy(moe), expected[0])


def test_kernels_wait_for_the_copy_of_what_they_read(tiny_checkpoint, expected, monkeypatch):
    assert not wrong_tokens(tiny_checkpoint, expected, FakeCudaDevice(bytes_per_s=SLOW))
    cuda_device = FakeCudaDevice(bytes_per_s=SLOW)
    monkeypatch.setattr(cuda_device, "let_kernels_wait", lambda copy: None)
    assert wrong_tokens(tiny_checkpoint, expected, cuda_device)


def test_a_read_from_disk_waits_for_the_copy_out_of_its_slot(
    tiny_checkpoint, expected, monkeypatch
):
    monkeypatch.setattr(SourceSlots, "note_copy", lambda self, slot_id, copy: None)
    # Kernels must not wait, either, for that would make the copy in time.
    with (
        fake_device(FakeCudaDevice(bytes_per_s=SLOW)) as cuda_device,
        MoE(tiny_checkpoint, exact=True, preload="off", **TIGHT) as moe,
    ):
        mover = moe.engine.tiers[0].mover
        assert isinstance(mover, DeviceMover)
        assert stale_host_bytes(moe, mover, cuda_device)
    monkeypatch.undo()
    with (
        fake_device(FakeCudaDevice(bytes_per_s=SLOW)) as cuda_device,
        MoE(tiny_checkpoint, exact=True, preload="off", **TIGHT) as moe,
    ):
        mover = moe.engine.tiers[0].mover
        assert isinstance(mover, DeviceMover)
        assert not stale_host_bytes(moe, mover, cuda_device)


def stale_host_bytes(moe: MoE, mover: DeviceMover, cuda_device: FakeCudaDevice) -> bool:
    """Whether an expert arrives with the bytes of another one that came through its HOST slot."""
    engine = moe.engine
    keys = engine.bookkeeping.keys[0][:4]
    slot_ids = {key: engine.tiers[0].table.begin_prefetch(key) for key in keys}
    mover.load_ahead({keys[0]: slot_ids[keys[0]]})
    while engine.tiers[-1].table.num_loading:
        mover.record_arrivals()
    for key in keys[1:]:  # two HOST slots for four experts, and no copy has been made
        mover.load_ahead({key: slot_ids[key]})
        while engine.tiers[-1].table.num_loading:
            mover.record_arrivals()
    cuda_device.synchronize()
    slots = engine.tiers[0].slots
    assert isinstance(slots, DeviceSlots)
    found = {key: slots.tensor_of(slot_ids[key], 3072).clone() for key in keys}
    for key in keys:
        slot = bytearray(3072)
        engine.loader.read(key, memoryview(slot))
        if not torch.equal(found[key], torch.frombuffer(slot, dtype=torch.uint8)):
            return True
    return False


class WatchedCudaDevice(FakeCudaDevice):
    """Asserts that no copy is begun into a slot whose last kernels were not marked."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.read_at: dict[int, int] = {}  # address of a DEVICE slot -> when kernels read it
        self.marked_at: dict[int, int] = {}  # id of a mark
        self.marks: list[Any] = []  # so that ids stay theirs
        self.num_checked = 0

    def mark(self) -> Any:
        mark = super().mark()
        self.marks.append(mark)
        self.marked_at[id(mark)] = self.time
        return mark

    def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> Any:
        read_at = self.read_at.get(destination.data_ptr())
        if read_at is not None:
            self.num_checked += 1
            assert after is not None
            assert self.marked_at[id(after)] >= read_at
        return super().copy(source, destination, after)


def watch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, find = LayerComputer.compute, LayerComputer.__init__
    found: dict[LayerComputer, DeviceSlots] = {}

    def finding(self: LayerComputer, layer: Any, recipes: Any, slots: Any, **more: Any) -> None:
        find(self, layer, recipes, slots, **more)
        found[self] = slots

    def watched(self: LayerComputer, work: Any, keys: Any, slot_ids: Any) -> None:
        compute(self, work, keys, slot_ids)
        for key in keys:
            slots = found[self]
            cuda_device = slots.cuda_device
            assert isinstance(cuda_device, WatchedCudaDevice)
            cuda_device.time += 1
            cuda_device.read_at[slots.address_of(slot_ids[key])] = cuda_device.time

    monkeypatch.setattr(LayerComputer, "__init__", finding)
    monkeypatch.setattr(LayerComputer, "compute", watched)


def test_a_slot_is_overwritten_only_after_the_kernels_that_read_it(
    tiny_checkpoint, expected, monkeypatch
):
    cuda_device = WatchedCudaDevice()
    watch_kernels(monkeypatch)
    with fake_device(cuda_device), MoE(tiny_checkpoint, exact=True, **TIGHT) as moe:
        assert_same_tokens(moe, expected)
    assert cuda_device.num_checked > 50
    monkeypatch.setattr(DeviceSlots, "mark_read", lambda self, slot_ids: None)
    cuda_device = WatchedCudaDevice()
    watch_kernels(monkeypatch)
    with (
        fake_device(cuda_device),
        MoE(tiny_checkpoint, exact=True, **TIGHT) as moe,
        pytest.raises(AssertionError),
    ):
        greedy(moe)


# What fails


class BrokenCudaDevice(FakeCudaDevice):
    """A cuda_device whose n-th copy from now on fails."""

    fails_in = 0

    def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> Any:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise RuntimeError("the link is broken")
        return super().copy(source, destination, after)


@pytest.mark.parametrize("fails_in", [1, 2, 9])
@pytest.mark.parametrize("host_memory", ["5%", "100%"])
def test_a_copy_that_fails_is_an_error_and_the_next_call_works(
    tiny_checkpoint, expected, host_memory, fails_in
):
    options = {"device_memory": "20%", "host_memory": host_memory}
    with (
        fake_device(BrokenCudaDevice()) as cuda_device,
        MoE(tiny_checkpoint, exact=True, **options) as moe,
    ):
        assert isinstance(cuda_device, BrokenCudaDevice)
        for _ in range(2):
            cuda_device.fails_in = fails_in
            with pytest.raises(RuntimeError, match="link is broken"):
                greedy(moe)
            assert_same_tokens(moe, expected, rounds=1)


@pytest.mark.parametrize("fails_in", [1, 3, 11])
def test_a_read_that_fails_is_an_error_and_the_next_call_works(
    tiny_checkpoint, expected, monkeypatch, fails_in
):
    with (
        fake_device(FakeCudaDevice()),
        MoE(tiny_checkpoint, exact=True, device_memory="20%", host_memory="10%") as moe,
    ):
        read, calls = Reader.read, []

        def failing(self: Reader, pieces: Any) -> None:
            calls.append(pieces)
            if len(calls) == fails_in:
                raise CheckpointError("the disk is gone")
            read(self, pieces)

        monkeypatch.setattr(Reader, "read", failing)
        with pytest.raises(CheckpointError, match="disk is gone"):
            greedy(moe)
        monkeypatch.undo()
        assert_same_tokens(moe, expected, rounds=1)


@pytest.mark.parametrize("at", [1, 2, 5, 8, 13, 20, 33])
def test_an_interrupt_anywhere_leaves_nothing_behind(tiny_checkpoint, expected, monkeypatch, at):
    """Ctrl-C before or after the n-th of the mover's own steps."""
    options = {"device_memory": "40%", "host_memory": "30%"}
    with (
        fake_device(FakeCudaDevice()),
        MoE(tiny_checkpoint, exact=True, prefetch=True, **options) as moe,
    ):
        greedy(moe)
        calls = 0

        def interrupted(name: str) -> Any:
            method = getattr(DeviceMover, name)

            def call(self: DeviceMover, *args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at:
                    if at % 2:
                        method(self, *args)
                    raise KeyboardInterrupt
                return method(self, *args)

            return call

        for name in ("_begin_copy", "_finish", "_begin_loads"):
            monkeypatch.setattr(DeviceMover, name, interrupted(name))
        with pytest.raises(KeyboardInterrupt):
            greedy(moe, num_tokens=100)
        monkeypatch.undo()
        assert_same_tokens(moe, expected, rounds=1)


def test_a_device_without_memory_left_is_answered_with_the_numbers(
    tiny_checkpoint, expected, monkeypatch
):
    with (
        fake_device(FakeCudaDevice()),
        MoE(tiny_checkpoint, exact=True, device_memory="50%") as moe,
    ):
        with monkeypatch.context() as patch:

            def run(*args: Any) -> None:
                raise torch.OutOfMemoryError("tried to allocate 20 MiB")

            patch.setattr(LayerComputer, "compute", run)
            with pytest.raises(OutOfMemory, match=r"12 expert slots.*\n.*lower device_memory"):
                greedy(moe)
        assert_same_tokens(moe, expected, rounds=1)


def test_a_budget_that_does_not_fit_is_refused_before_weights_are_read(
    hollow_checkpoint, bytes_read_by_kernel
):
    before = bytes_read_by_kernel()
    with (
        fake_device(FakeCudaDevice(total_bytes=190 << 20)),
        pytest.raises(ConfigError, match="leaves .* for the KV cache"),
    ):
        MoE(hollow_checkpoint, device_memory="180MiB")
    assert bytes_read_by_kernel() - before < 4 << 20


def test_device_memory_without_a_device_is_refused(tiny_checkpoint):
    with pytest.raises(ConfigError, match="with device='cpu' use host_memory"):
        MoE(tiny_checkpoint, device="cpu", device_memory="1GiB")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch finds none\nhint: use host_memory"):
            MoE(tiny_checkpoint, device_memory="1GiB")


def test_the_deciding_thread_never_waits_for_a_copy(tiny_checkpoint, monkeypatch):
    """But where it has to know the routing, which the fake device cannot show."""
    decider, waited = threading.get_ident(), []

    class Watched(FakeCudaDevice):
        def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> Any:
            copy = super().copy(source, destination, after)
            synchronize = copy.synchronize

            def noting() -> None:
                waited.append(threading.get_ident())
                synchronize()

            copy.synchronize = noting  # type: ignore[method-assign]
            return copy

        def let_kernels_wait(self, copy: Copy) -> None:
            before = len(waited)
            super().let_kernels_wait(copy)
            del waited[before:]  # kernels did

    with fake_device(Watched()), MoE(tiny_checkpoint, exact=True, **TIGHT) as moe:
        greedy(moe)
    assert waited
    assert decider not in waited
