"""DEVICE slots, the HOST slots they are filled from, and the budget that both must fit.

    HOST slot, page-locked ────────────────────────copy──> DEVICE slot
    HOST slot, not page-locked ──> page-locked ring ─copy──> DEVICE slot

A slot is overwritten only after what reads it has finished: DEVICE slots are read by kernels, HOST
slots by copies.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_infinity.errors import ConfigError
from moe_infinity.memory.cuda import Copy, Event, Link
from moe_infinity.memory.host import HostSlots, Slots, format_bytes
from moe_infinity.sizes import parse_size

# Of what is free beside the dense weights, without a named budget. The rest is for the KV cache and
# activations; a convention, not a measurement.
AUTOMATIC_SHARE = 0.8
LEAST_ROOM_SHARE = 0.05  # of the device, that a named budget must leave for them
SLOT_ALIGNMENT = 256  # bytes; what CUDA aligns its own allocations to
PAGE_BYTES = 4096  # what is page-locked begins and ends at pages
LOCKED_CHUNK_BYTES = 256 << 20  # of HOST slots, page-locked together when the first is filled
RING_BUFFERS = 4


def round_up(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


class DeviceSlots(Slots):
    """One allocation on the device, cut into equal slots."""

    def __init__(self, link: Link, num_slots: int, slot_bytes: int) -> None:
        super().__init__(_slab(link, num_slots, slot_bytes), slot_bytes)
        self.link = link
        self._ring = Ring(link, slot_bytes)
        self._read_by: dict[int, Event] = {}  # the last kernels of each slot

    def fill(self, slot_id: int, source: Tensor, *, is_locked: bool) -> Copy:
        """Begin to copy an expert's bytes into a slot, once the kernels that read it have ended."""
        if not is_locked:
            return self._ring.copy(source, lambda staged: self._copy(slot_id, staged))
        return self._copy(slot_id, source)

    def _copy(self, slot_id: int, source: Tensor) -> Copy:
        destination = self.tensor_of(slot_id, source.numel())
        return self.link.copy(source, destination, self._read_by.get(slot_id))

    def mark_read(self, slot_ids: Sequence[int]) -> None:
        """Kernels that read these slots were launched."""
        self._read_by.update(dict.fromkeys(slot_ids, self.link.mark()))


def _slab(link: Link, num_slots: int, slot_bytes: int) -> Tensor:
    try:
        return link.empty(num_slots * slot_bytes)
    except torch.OutOfMemoryError as error:
        free, total = link.memory_bytes()
        raise ConfigError(
            f"{num_slots} slots of {format_bytes(slot_bytes)} could not be allocated on "
            f"{link.device}: {format_bytes(free)} of {format_bytes(total)} are free\n"
            "hint: lower device_memory"
        ) from error


class Ring:
    """A few page-locked buffers that take turns."""

    def __init__(self, link: Link, buffer_bytes: int) -> None:
        self._link = link
        self._buffer_bytes = buffer_bytes
        self._buffers: list[tuple[Tensor, Copy]] = []  # the longest in use first

    def copy(self, source: Tensor, begin: Callable[[Tensor], Copy]) -> Copy:
        """`begin` copies from a buffer that has the bytes of `source`."""
        if len(self._buffers) < RING_BUFFERS:
            with torch.inference_mode(False):  # or it could be written into only there
                buffer = self._link.page_locked(self._buffer_bytes)
        else:
            buffer, last = self._buffers.pop(0)
            last.synchronize()
        staged = buffer[: source.numel()].copy_(source)
        copy = begin(staged)
        self._buffers.append((buffer, copy))
        return copy


class SourceSlots(HostSlots):
    """HOST slots that devices copy from. Their pages are locked in chunks, as they are filled, by
    one link for all; if the machine will not lock more, rings take the others.
    """

    def __init__(self, link: Link, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        assert slot_bytes % PAGE_BYTES == 0, slot_bytes
        self._link = link
        self._chunk_slots = max(1, LOCKED_CHUNK_BYTES // slot_bytes)
        self._locked: dict[int, Tensor] = {}  # chunks
        self._is_refused = False  # the machine locks no more
        # Comes by itself, too: memory may not go while devices know it as locked.
        self.close = weakref.finalize(self, _unlock, link, self._locked)
        self.close.atexit = False
        self._lock = threading.Lock()
        self._copied_by: dict[int, Copy] = {}  # the last copy out of each slot

    def bytes_of(self, slot_id: int) -> memoryview:
        """As ever; waits until copies have left the slot. In any thread."""
        if (copy := self._copied_by.pop(slot_id, None)) is not None:
            copy.synchronize()
        self._lock_chunk(slot_id // self._chunk_slots)
        return super().bytes_of(slot_id)

    def note_copy(self, slot_id: int, copy: Copy) -> None:
        """The slot keeps its bytes until this is over."""
        self._copied_by[slot_id] = copy

    def is_locked(self, slot_id: int) -> bool:
        return slot_id // self._chunk_slots in self._locked

    def _lock_chunk(self, chunk: int) -> None:
        with self._lock:
            if chunk not in self._locked and not self._is_refused:
                first = chunk * self._chunk_slots
                num_slots = min(self._chunk_slots, self.num_slots - first)
                memory = self.tensor_of(first, num_slots * self.slot_bytes)
                self._is_refused = not self._link.page_lock(memory)
                if not self._is_refused:
                    self._locked[chunk] = memory


def _unlock(link: Link, locked: dict[int, Tensor]) -> None:
    try:
        link.synchronize()  # or something would still be read or written there
    finally:  # memory that CUDA knows as locked may not go, whatever the device says
        while locked:
            link.page_unlock(locked.popitem()[1])


def num_device_slots(
    device_memory: int | str | None,
    link: Link,
    *,
    slot_bytes: int,
    num_experts: int,
    dense_bytes: int,
) -> int:
    """How many slots the budget allows beside the dense weights that are still to come, at most one
    per expert. Raises ConfigError if it is too small, or leaves no room for anything else.
    """
    free, total = link.memory_bytes()
    everything = slot_bytes * num_experts
    here = (
        f"{link.device} has {format_bytes(free)} free of {format_bytes(total)}, dense weights take "
        f"{format_bytes(dense_bytes)}, all {num_experts} experts {format_bytes(everything)}"
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
