"""A device that is CPU memory, at the end of a link that takes its time: for tests of the logic on
machines without a GPU, and for `gpu_check.py --fake`.

A copy takes place as late as it may: when somebody waits for it, or when the clock says that it is
over. So whoever reads a slot without waiting reads stale bytes, and whoever overwrites a source too
early has them copied.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from moe_infinity.engine import device as device_module
from moe_infinity.memory.cuda import Copy, Event


class VirtualClock:
    """Stands still but for what is modelled."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance_to(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class RealClock:
    """The machine's."""

    @property
    def now_s(self) -> float:
        return time.perf_counter()

    def advance_to(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now_s))


class FakeMark:
    """CPU kernels have finished when they return."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class FakeCopy:
    """A copy that is still to be made."""

    def __init__(
        self, cuda_device: FakeCudaDevice, source: Tensor, destination: Tensor, end_s: float
    ) -> None:
        self._cuda_device = cuda_device
        self.source = source
        self.destination = destination
        self.end_s = end_s
        self.took_s = cuda_device.load_s(source.nbytes)
        self.is_made = False

    def query(self) -> bool:
        self._cuda_device.make_copies()
        return self.is_made

    def synchronize(self) -> None:
        self._cuda_device.make_copies(until=self)


class FakeCudaDevice:
    """Copies come one after the other, each after `latency_s` at `bytes_per_s`. Kernels are taken
    to need `kernel_s` from one mark to the next.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        *,
        bytes_per_s: float = 1e9,
        latency_s: float = 1e-5,
        kernel_s: float = 1e-5,
        total_bytes: int = 1 << 32,
        is_locking: bool = True,
        clock: VirtualClock | RealClock | None = None,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.bytes_per_s, self.latency_s, self.kernel_s = bytes_per_s, latency_s, kernel_s
        self.total_bytes, self.used_bytes = total_bytes, 0
        self.is_locking = is_locking
        self.locked: dict[int, int] = {}  # address -> bytes
        self.num_copies = 0
        self.copied_bytes = 0
        self._waiting: deque[FakeCopy] = deque()
        self._end_s = 0.0  # of the last copy begun
        self._stall_s = 0.0
        self._lock = threading.RLock()

    def load_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def memory_bytes(self) -> tuple[int, int]:
        return self.total_bytes - self.used_bytes, self.total_bytes

    def empty(self, num_bytes: int) -> Tensor:
        if num_bytes > self.total_bytes - self.used_bytes:
            raise torch.OutOfMemoryError(f"tried to allocate {num_bytes} bytes")
        self.used_bytes += num_bytes
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)  # what nobody copied is seen

    def page_lock(self, memory: Tensor) -> bool:
        if self.is_locking:
            self.locked[memory.data_ptr()] = memory.nbytes
        return self.is_locking

    def page_unlock(self, memory: Tensor) -> None:
        assert self.locked.pop(memory.data_ptr()) == memory.nbytes

    def page_locked(self, num_bytes: int) -> Tensor:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.locked[memory.data_ptr()] = num_bytes
        return memory

    def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> FakeCopy:
        assert any(at <= source.data_ptr() < at + n for at, n in self.locked.items()), "not locked"
        with self._lock:
            begin_s = max(self._end_s, self.clock.now_s)
            self._end_s = begin_s + self.load_s(source.nbytes)
            copy = FakeCopy(self, source, destination, self._end_s)
            self._waiting.append(copy)
            self.num_copies += 1
            self.copied_bytes += source.nbytes
            return copy

    def mark(self) -> FakeMark:
        self.clock.advance_to(self.clock.now_s + self.kernel_s)
        return FakeMark()

    def let_kernels_wait(self, copy: Copy) -> None:
        started_s = self.clock.now_s
        copy.synchronize()
        self._stall_s += self.clock.now_s - started_s

    def take_stall_s(self) -> float:
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def synchronize(self) -> None:
        if self._waiting:
            self.make_copies(until=self._waiting[-1])

    def make_copies(self, until: FakeCopy | None = None) -> None:
        """Those whose time has come; all up to `until`, for which time passes."""
        with self._lock:
            if until is not None and not until.is_made:
                self.clock.advance_to(until.end_s)
            while self._waiting and self._waiting[0].end_s <= self.clock.now_s:
                copy = self._waiting.popleft()
                copy.destination.copy_(copy.source)
                copy.is_made = True


@contextmanager
def fake_device(cuda_device: FakeCudaDevice) -> Iterator[FakeCudaDevice]:
    """Models opened inside have a device, and this is the way to it."""
    with mock.patch.object(device_module, "open_cuda_device", return_value=cuda_device):
        yield cuda_device
