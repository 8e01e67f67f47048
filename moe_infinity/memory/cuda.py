"""What copies experts to a device, and the events that order copies and kernels.

    copy stream     copy A ──> event A         copy B into A's slot, after the mark
                                  │                 ↑
    compute stream       kernels wait for it ── kernels of A ──> mark

Copies are asynchronous and happen in the order they were begun. Nobody but the reader of a routing
and a read thread that needs a HOST slot again makes the CPU wait.
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
# Held while a graph is captured: that waits for a whole device, and others may not, in any thread.
CAPTURING = threading.RLock()
CAPTURE_SECONDS = 60.0  # more than one takes


class Event(Protocol):
    """Over when everything begun before it, on its stream, has happened. As torch's events are."""

    def query(self) -> bool:
        """Whether it is over."""

    def synchronize(self) -> None:
        """The calling thread waits until it is."""


class Copy(Event, Protocol):
    """The event after a copy."""

    @property
    def took_s(self) -> float:
        """Of a copy that is over: the time on the link, its turn not yet having come left out."""


class Link(Protocol):
    """A device and the way to its memory."""

    device: torch.device

    def memory_bytes(self) -> tuple[int, int]:
        """Free, and all there is."""

    def empty(self, num_bytes: int) -> Tensor:
        """Memory of the device. Raises torch.OutOfMemoryError."""

    def page_lock(self, memory: Tensor) -> bool:
        """Let every device read this host memory; False if the machine will not."""

    def page_unlock(self, memory: Tensor) -> None:
        """What was locked, before it is given back."""

    def page_locked(self, num_bytes: int) -> Tensor:
        """New host memory that the device can read."""

    def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> Copy:
        """Begin a copy from page-locked memory; it starts once `after` is over."""

    def mark(self) -> Event:
        """Over when the kernels launched so far have finished."""

    def let_kernels_wait(self, copy: Copy) -> None:
        """Kernels launched from now on start when the copy is over."""

    def take_stall_s(self) -> float:
        """Seconds kernels waited for copies, as far as known and not told before."""

    def synchronize(self) -> None:
        """Wait for all copies and kernels."""


def open_link(device: str) -> Link | None:
    """The link of "cuda", "cuda:1", or of whatever GPU "auto" finds; None: experts compute on the
    CPU. Raises ConfigError.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = torch.device("cuda" if device == "auto" else device).index or 0
    if index >= count:
        devices = f"{count} CUDA devices" if count else "no CUDA device"
        raise ConfigError(
            f"device {device!r} asked for, torch {torch.__version__} finds {devices}\n"
            "hint: device='cpu', or a torch built for CUDA and a working driver"
        )
    return CudaLink(torch.device("cuda", index))


class CudaCopy:
    """A copy between two events of the copy stream."""

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


class CudaLink:
    """One CUDA device. Copies have a stream of their own; kernels run on the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with CAPTURING:  # when torch refuses it
            torch.cuda.empty_cache()  # or what an earlier model left would count as taken
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
            try:  # or whoever launches a kernel next is told of it
                torch.zeros(1, dtype=torch.uint8, device=self.device)
            except RuntimeError:
                logger.debug("the error of cudaHostRegister was cleared")
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
            # Bounded: what is collected here may hold a lock that the capture waits for.
            if CAPTURING.acquire(timeout=CAPTURE_SECONDS):
                stack.callback(CAPTURING.release)
            torch.cuda.synchronize(self.device)
