"""DEVICE slots, the HOST slots they are filled from, and the budget that both must fit.

    HOST slot, page-locked ──────────────────────copy──> DEVICE slot
    HOST slot, not page-locked ──> staging buffer ─copy──> DEVICE slot

A slot is overwritten only after its readers have finished. Kernels read DEVICE slots, copies read
HOST slots.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_infinity.errors import ConfigError
from moe_infinity.memory.cuda import Copy, CudaDevice, Event
from moe_infinity.memory.slots import BufferSlots, HostSlots
from moe_infinity.sizes import format_bytes, parse_size

# The share that experts get of what is free beside the dense weights, unless device_memory is set.
# The rest is for the KV cache and activations; a convention, not a measurement.
AUTOMATIC_SHARE = 0.8
LEAST_ROOM_SHARE = 0.05  # of the device, that device_memory must leave for them
SLOT_ALIGNMENT = 256  # bytes; what CUDA aligns its own allocations to
PAGE_BYTES = 4096  # page-locked memory begins and ends at pages
LOCKED_CHUNK_BYTES = 256 << 20  # HOST slots page-locked together, when the first of them is filled
NUM_STAGING_BUFFERS = 4


def round_up(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


class DeviceSlots(BufferSlots):
    """One allocation on the device, cut into equal slots."""

    def __init__(self, cuda_device: CudaDevice, num_slots: int, slot_bytes: int) -> None:
        super().__init__(_slab(cuda_device, num_slots, slot_bytes), slot_bytes)
        self.cuda_device = cuda_device
        self._staging = StagingBuffers(cuda_device, slot_bytes)
        self._read_by: dict[int, Event] = {}  # by slot: over when its last kernels have finished

    def fill(self, slot_id: int, source: Tensor, *, is_locked: bool) -> Copy:
        """Begin to copy an expert's bytes from host memory into a slot.

        The copy waits for the kernels that read the slot. `is_locked` says whether `source` is
        page-locked; if not, its bytes go through a staging buffer.
        """
        if not is_locked:
            return self._staging.copy(source, lambda staged: self._copy(slot_id, staged))
        return self._copy(slot_id, source)

    def _copy(self, slot_id: int, source: Tensor) -> Copy:
        destination = self.tensor_of(slot_id, source.numel())
        return self.cuda_device.copy(source, destination, self._read_by.get(slot_id))

    def mark_read(self, slot_ids: Sequence[int]) -> None:
        """Note that kernels which read these slots were launched."""
        self._read_by.update(dict.fromkeys(slot_ids, self.cuda_device.mark()))


def _slab(cuda_device: CudaDevice, num_slots: int, slot_bytes: int) -> Tensor:
    try:
        return cuda_device.empty(num_slots * slot_bytes)
    except torch.OutOfMemoryError as error:
        free, total = cuda_device.memory_bytes()
        raise ConfigError(
            f"{num_slots} slots of {format_bytes(slot_bytes)} could not be allocated on "
            f"{cuda_device.device}: {format_bytes(free)} of {format_bytes(total)} are free\n"
            "hint: lower device_memory"
        ) from error


class StagingBuffers:
    """A few page-locked buffers, used in turn, for bytes that are not page-locked themselves."""

    def __init__(self, cuda_device: CudaDevice, buffer_bytes: int) -> None:
        self._cuda_device = cuda_device
        self._buffer_bytes = buffer_bytes
        self._buffers: list[tuple[Tensor, Copy]] = []  # the least recently used first

    def copy(self, source: Tensor, begin: Callable[[Tensor], Copy]) -> Copy:
        """Put `source` into a buffer and let `begin` start a copy from it.

        Waits for the last copy out of the buffer if all of them are in use.
        """
        if len(self._buffers) < NUM_STAGING_BUFFERS:
            with torch.inference_mode(False):  # else only inference mode may write into it
                buffer = self._cuda_device.page_locked(self._buffer_bytes)
        else:
            buffer, last = self._buffers.pop(0)
            last.synchronize()
        staged = buffer[: source.numel()].copy_(source)
        copy = begin(staged)
        self._buffers.append((buffer, copy))
        return copy


class SourceSlots(HostSlots):
    """HOST slots that devices copy from.

    Their memory is page-locked in chunks, as slots are first filled. Once the machine refuses to
    lock more, the other slots are copied through staging buffers.
    """

    def __init__(self, cuda_device: CudaDevice, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        assert slot_bytes % PAGE_BYTES == 0, slot_bytes
        self._cuda_device = cuda_device
        self._chunk_slots = max(1, LOCKED_CHUNK_BYTES // slot_bytes)
        self._locked: dict[int, Tensor] = {}  # by chunk
        self.is_refused = False  # the machine locks no more
        # Also runs when the slots are collected: CUDA must not keep freed memory as page-locked.
        self.close = weakref.finalize(self, _unlock, cuda_device, self._locked)
        self.close.atexit = False
        self._lock = threading.Lock()
        self._copied_by: dict[int, Copy] = {}  # the last copy out of each slot

    def bytes_of(self, slot_id: int) -> memoryview:
        """The slot as bytes that may be written now, for any thread.

        Waits for the last copy out of the slot.
        """
        if (copy := self._copied_by.pop(slot_id, None)) is not None:
            copy.synchronize()
        self._lock_chunk(slot_id // self._chunk_slots)
        return super().bytes_of(slot_id)

    def note_copy(self, slot_id: int, copy: Copy) -> None:
        """Keep the slot's bytes until this copy out of it is over."""
        self._copied_by[slot_id] = copy

    def is_locked(self, slot_id: int) -> bool:
        return slot_id // self._chunk_slots in self._locked

    def _lock_chunk(self, chunk: int) -> None:
        with self._lock:
            if chunk not in self._locked and not self.is_refused:
                first = chunk * self._chunk_slots
                num_slots = min(self._chunk_slots, self.num_slots - first)
                memory = self.tensor_of(first, num_slots * self.slot_bytes)
                self.is_refused = not self._cuda_device.page_lock(memory)
                if not self.is_refused:
                    self._locked[chunk] = memory


def _unlock(cuda_device: CudaDevice, locked: dict[int, Tensor]) -> None:
    try:
        cuda_device.synchronize()  # a copy may still read the memory
    finally:  # unlock even if the device failed: the memory is freed next
        while locked:
            cuda_device.page_unlock(locked.popitem()[1])


def num_device_slots(
    device_memory: int | str | None,
    cuda_device: CudaDevice,
    *,
    slot_bytes: int,
    num_experts: int,
    dense_bytes: int,
) -> int:
    """How many slots `device_memory` allows, at most one per expert.

    `dense_bytes` are the dense weights that are still to be loaded. Raises ConfigError if the
    budget holds no expert, or leaves no room for the KV cache and activations.
    """
    free, total = cuda_device.memory_bytes()
    everything = slot_bytes * num_experts
    here = (
        f"{cuda_device.device} has {format_bytes(free)} free of {format_bytes(total)}, "
        f"dense weights take {format_bytes(dense_bytes)}, "
        f"all {num_experts} experts {format_bytes(everything)}"
    )
    beside_dense = max(free - dense_bytes, 0)
    if device_memory is None:
        budget = int(beside_dense * AUTOMATIC_SHARE)
    else:
        budget = parse_size(device_memory, whole_bytes=everything)
    num_slots = min(budget // slot_bytes, num_experts)
    if num_slots < 1:
        raise ConfigError(
            f"device_memory of {format_bytes(budget)} holds no expert: one takes "
            f"{format_bytes(slot_bytes)}\n"
            f"hint: raise device_memory, or use device='cpu'; {here}"
        )
    room = beside_dense - num_slots * slot_bytes
    least = int(total * LEAST_ROOM_SHARE)
    if room < least:
        raise ConfigError(
            f"device_memory of {format_bytes(budget)} leaves {format_bytes(max(room, 0))} for the "
            f"KV cache and activations, less than {format_bytes(least)}\n"
            f"hint: lower device_memory; {here}"
        )
    return num_slots
