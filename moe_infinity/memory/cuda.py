"""A CUDA device: its memory, copies into it, and the events that order copies and kernels.

    copy stream     copy A ──> event A         copy B into A's slot, after the mark
                                  │                 ↑
    compute stream       kernels wait for it ── kernels of A ──> mark

Copies are asynchronous and happen in the order they were begun. The CPU waits in two places only:
where it reads a routing, and where a read thread needs a HOST slot again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import ExitStack
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from moe_infinity.errors import ConfigError

logger = logging.getLogger(__name__)

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices
# Held while a graph is captured, which waits for the whole device. No other thread may wait for it
# meanwhile.
CAPTURING = threading.RLock()
CAPTURE_SECONDS = 60.0  # longer than any capture takes


class Event(Protocol):
    """A point on a stream, like torch's events: over when all work before it has finished."""

    def query(self) -> bool:
        """Return True if all work before the event has finished, without waiting."""

    def synchronize(self) -> None:
        """Make the calling thread wait until it is over."""


class Copy(Event, Protocol):
    """A copy under way; over when the bytes are there."""

    @property
    def took_s(self) -> float:
        """Seconds the copy itself took, without waiting for its turn. Only once it is over."""


class CudaDevice(Protocol):
    """The calls that the package makes of a CUDA device. Tests use CPU memory (fake_cuda.py)."""

    device: torch.device

    def memory_bytes(self) -> tuple[int, int]:
        """Bytes that are free, and bytes in all."""

    def empty(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] on the device, not initialised. Raises torch.OutOfMemoryError."""

    def page_lock(self, memory: Tensor) -> bool:
        """Page-lock this host memory for every device; False if the machine refuses."""

    def page_unlock(self, memory: Tensor) -> None:
        """Undo `page_lock`; has to come before the memory is freed."""

    def page_locked(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of new page-locked host memory."""

    def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> Copy:
        """Begin a copy from page-locked memory, which starts once `after` is over."""

    def mark(self) -> Event:
        """An event that is over when the kernels launched so far have finished."""

    def let_kernels_wait(self, copy: Copy) -> None:
        """Make the kernels launched from now on wait until the copy is over."""

    def take_stall_s(self) -> float:
        """Seconds that kernels waited for copies since the last call, as far as is known."""

    def synchronize(self) -> None:
        """Make the calling thread wait for all copies and kernels."""


def device_memory_bytes(device: str) -> int | None:
    """Return the bytes of the CUDA device that "cuda:1", "cuda" or "auto" names; None if there is
    none.
    """
    if device in ("cpu", "mps") or not torch.cuda.is_available():
        return None
    return int(torch.cuda.mem_get_info(0 if device == "auto" else device)[1])


def open_cuda_device(device: str) -> CudaDevice | None:
    """The device that "cuda", "cuda:1" or "auto" names, or None if
    slots for experts are in host memory.

    Raises ConfigError if the named device is not there.
    """
    if device in ("cpu", "mps") or (device == "auto" and not torch.cuda.is_available()):
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = torch.device("cuda" if device == "auto" else device).index or 0
    if index >= count:
        devices = f"{count} CUDA devices" if count else "no CUDA device"
        raise ConfigError(
            f"device {device!r} asked for, torch {torch.__version__} finds {devices}\n"
            "hint: device='cpu', or a torch built for CUDA and a working driver"
        )
    return TorchCudaDevice(torch.device("cuda", index))


class CudaCopy:
    """A copy on the copy stream, between two events."""

    def __init__(self) -> None:
        self.begun = torch.cuda.Event(enable_timing=True)
        self.done = torch.cuda.Event(enable_timing=True)

    def query(self) -> bool:
        return bool(self.done.query())

    def synchronize(self) -> None:
        self.done.synchronize()

    @property
    def took_s(self) -> float:
        return float(self.begun.elapsed_time(self.done)) / 1e3


class TorchCudaDevice:
    """A CUDA device through torch. Copies have their own stream; kernels run on the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with CAPTURING:  # torch refuses to empty its cache during a capture
            torch.cuda.empty_cache()  # else memory that an earlier model freed counts as taken
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def memory_bytes(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def page_lock(self, memory: Tensor) -> bool:
        cudart: Any = torch.cuda.cudart()
        with self._lock, torch.cuda.device(self.device):
            result = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
            if result == cudart.cudaError.success:
                return True
            logger.warning("%d bytes cannot be page-locked: %s", memory.nbytes, result)
            try:  # CUDA keeps the error and would raise it at the next kernel launch
                torch.zeros(1, dtype=torch.uint8, device=self.device)
            except RuntimeError:
                logger.debug("cleared the error of cudaHostRegister")
            return False

    def page_unlock(self, memory: Tensor) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def page_locked(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> CudaCopy:
        copy = CudaCopy()
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(cast(torch.cuda.Event, after))
            copy.begun.record(self._stream)
            destination.copy_(source, non_blocking=True)
            copy.done.record(self._stream)
        return copy

    def mark(self) -> Event:
        return cast(Event, torch.cuda.current_stream(self.device).record_event())

    def let_kernels_wait(self, copy: Copy) -> None:
        assert isinstance(copy, CudaCopy), copy
        stream = torch.cuda.current_stream(self.device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(copy.done)
        after.record(stream)
        self._waits.append((before, after))

    def take_stall_s(self) -> float:
        stall_ms = 0.0
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            stall_ms += before.elapsed_time(after)
        return stall_ms / 1e3

    def synchronize(self) -> None:
        with ExitStack() as stack:
            # The wait is bounded: this may run in the garbage collector, in a thread that holds a
            # lock the capture waits for.
            if CAPTURING.acquire(timeout=CAPTURE_SECONDS):
                stack.callback(CAPTURING.release)
            torch.cuda.synchronize(self.device)
