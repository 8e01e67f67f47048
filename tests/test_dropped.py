"""A model that nobody closes and nobody has any more, as in a notebook whose cell runs again."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.memory.device import PAGE_BYTES, SourceSlots
from tests.fake_cuda import FakeCudaDevice, fake_device
from tests.gpu.fast_device import STATIC
from tests.on_device import greedy


def open_files() -> set[str]:
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.islink(link)}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_its_files_are_closed(tiny_checkpoint):
    moe = MoE(tiny_checkpoint, device="cpu", host_memory="50%")
    greedy(moe)
    assert any(name.startswith(str(tiny_checkpoint)) for name in open_files())
    del moe
    gc.collect()
    assert not any(name.startswith(str(tiny_checkpoint)) for name in open_files())


class WatchedCudaDevice(FakeCudaDevice):
    """Whose memory is still there when it is unlocked, and nothing runs that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def synchronize(self) -> None:
        self.asked.append("waits")
        super().synchronize()

    def page_unlock(self, memory: torch.Tensor) -> None:
        self.asked.append("unlocks")
        memory.zero_()
        super().page_unlock(memory)


@pytest.mark.parametrize("options", [{"exact": True}, {}])
def test_its_pages_are_unlocked_before_the_memory_goes(tiny_checkpoint, options):
    cuda_device = WatchedCudaDevice()
    with fake_device(cuda_device):
        moe = MoE(tiny_checkpoint, device_memory="30%", host_memory="50%", **options)
        static: dict[str, Any] = {} if options else STATIC
        greedy(moe, **static)
    slots: Any = moe.engine.tiers[1].slots
    chunk = next(iter(slots._locked.values())).data_ptr()
    assert chunk in cuda_device.locked
    cuda_device.asked.clear()
    after = weakref.ref(slots)
    del moe, slots
    gc.collect()
    assert after() is None
    assert chunk not in cuda_device.locked
    assert cuda_device.asked == ["waits", "unlocks"]


def test_pages_are_unlocked_though_the_device_failed():
    class Failed(FakeCudaDevice):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    cuda_device = Failed()
    slots = SourceSlots(cuda_device, 2, PAGE_BYTES)
    slots.bytes_of(0)
    assert cuda_device.locked
    with pytest.raises(RuntimeError, match="illegal memory access"):
        slots.close()
    assert not cuda_device.locked
