"""Slots, each wide enough for an expert of any layer.

HostSlots      one allocation in DRAM, cut into equal parts
MappedSlots    experts stay where the page cache has them, for models of which all experts fit
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, ExpertLayout, MappedExpert, ParamSpec
from moe_infinity.layout import view_of
from moe_infinity.sizes import format_bytes, parse_size
from moe_infinity.system.machine import machine_memory_bytes
from moe_infinity.system.memory import give_back, huge_pages

Mapped = Callable[[ExpertKey], MappedExpert | None]


class Slots(ABC):
    """Buffers of `slot_bytes` bytes for experts, all in the memory of one device."""

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_bytes = num_slots * slot_bytes
        self.device = device
        self._views: dict[ExpertLayout, SlotViews] = {}
        self._tables: dict[tuple[ParamSpec, ...], AddressTables] = {}

    def views(self, layout: ExpertLayout) -> SlotViews:
        """The slots seen as experts of this layout. Layers of one layout share one object."""
        return self._views.setdefault(layout, SlotViews(self, layout))

    def tables(self, parts: tuple[ParamSpec, ...]) -> AddressTables:
        """Where these parts of the experts in slots lie, for kernels."""
        return self._tables.setdefault(parts, AddressTables(self, parts))

    @abstractmethod
    def memory_of(self, slot_id: int) -> object:
        """Whatever has the bytes of the slot: another object once they are in other memory."""

    @abstractmethod
    def part_of(self, slot_id: int, spec: ParamSpec) -> Tensor:
        """uint8 [bytes]: a part of the expert in a slot."""


class BufferSlots(Slots):
    """Slots cut from `buffer`, uint8 in any memory."""

    def __init__(self, buffer: Tensor, slot_bytes: int) -> None:
        super().__init__(len(buffer) // slot_bytes, slot_bytes, buffer.device)
        self._buffer = buffer

    def address_of(self, slot_id: int) -> int:
        """The memory address of the slot's first byte."""
        return self._buffer.data_ptr() + slot_id * self.slot_bytes

    def memory_of(self, slot_id: int) -> object:
        return self._buffer

    def tensor_of(self, slot_id: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] from the slot's first byte; it may reach into the slots that follow."""
        start = slot_id * self.slot_bytes
        return self._buffer[start : start + num_bytes]

    def part_of(self, slot_id: int, spec: ParamSpec) -> Tensor:
        """uint8 [bytes]: a part of the expert in a slot."""
        return self.tensor_of(slot_id, self.slot_bytes)[spec.offset :][: spec.num_bytes]


class HostSlots(BufferSlots):
    """Slots in DRAM. The operating system gives them memory as they are first filled.

    Raises ConfigError if the allocation fails.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        try:
            buffer = torch.frombuffer(huge_pages(num_slots * slot_bytes), dtype=torch.uint8)
        except (OSError, OverflowError, ValueError) as error:  # how an allocation fails
            raise ConfigError(
                f"{num_slots} slots of {format_bytes(slot_bytes)} could not be allocated\n"
                "hint: lower host_memory"
            ) from error
        super().__init__(buffer, slot_bytes)

    def bytes_of(self, slot_id: int) -> memoryview:
        """The bytes of the slot, which may be written now."""
        return self.tensor_of(slot_id, self.slot_bytes).numpy().data

    def give_back(self, slot_ids: Sequence[int]) -> None:
        """Let the system have the memory of these slots until they are filled again."""
        for slot_id in slot_ids:
            give_back(self.address_of(slot_id), self.slot_bytes)

    def bytes_for(self, slot_id: int, key: ExpertKey) -> memoryview:
        """The bytes to fill so that the slot has this expert: those of the slot."""
        return self.bytes_of(slot_id)


class MappedSlots(Slots):
    """Slots that are the bytes of an expert in its mapped files, as `mapped` gives them, or memory
    of their own where it gives none. The expert is chosen when the slot is filled.

    Nothing is copied: a model that is in the page cache computes at once, and its bytes are in
    memory once, not twice. The price: what is written to a file in place changes its experts at
    once. A forward pass in which that happens is an error.
    """

    def __init__(self, num_slots: int, slot_bytes: int, num_bytes: int, mapped: Mapped) -> None:
        """`num_bytes` are those of all experts together."""
        super().__init__(num_slots, slot_bytes, torch.device("cpu"))
        self.num_bytes = num_bytes
        self._mapped = mapped
        self._experts: dict[int, memoryview | MappedExpert] = {}

    def bytes_for(self, slot_id: int, key: ExpertKey) -> memoryview | MappedExpert:
        """The bytes to fill so that the slot has this expert."""
        expert = self._mapped(key) or huge_pages(self.slot_bytes)
        self._experts[slot_id] = expert
        return expert

    def memory_of(self, slot_id: int) -> object:
        return self._experts[slot_id]

    def part_of(self, slot_id: int, spec: ParamSpec) -> Tensor:
        """uint8 [bytes]: a part of the expert in a slot."""
        expert = self._experts[slot_id]
        if isinstance(expert, memoryview):
            return torch.frombuffer(expert, dtype=torch.uint8)[spec.offset :][: spec.num_bytes]
        return torch.frombuffer(expert[spec.name], dtype=torch.uint8)


class SlotViews:
    """views[slot_id] -> {parameter name: tensor}. Tensors share the slot's memory, and are made
    when first asked for.
    """

    def __init__(self, slots: Slots, layout: ExpertLayout) -> None:
        self._slots = slots
        self._layout = layout
        self._made: dict[int, tuple[object, dict[str, Tensor]]] = {}  # of which memory, by slot

    def __getitem__(self, slot_id: int) -> dict[str, Tensor]:
        memory, params = self._made.get(slot_id, (None, {}))
        if memory is not self._slots.memory_of(slot_id):
            params = {
                spec.name: view_of(replace(spec, offset=0), self._slots.part_of(slot_id, spec))
                for spec in self._layout.params
            }
            self._made[slot_id] = self._slots.memory_of(slot_id), params
        return params


class AddressTables:
    """tables[slot_id] -> the address of a table that has the addresses of the parts of the expert
    in this slot, int64 [parts]. It stays where it is.
    """

    def __init__(self, slots: Slots, parts: tuple[ParamSpec, ...]) -> None:
        self._slots = slots
        self._parts = parts
        self._tables = np.zeros((slots.num_slots, len(parts)), np.int64)
        self._written: dict[int, object] = {}  # for which memory, by slot
        self._first = self._tables.ctypes.data

    def __getitem__(self, slot_id: int) -> int:
        memory = self._slots.memory_of(slot_id)
        if self._written.get(slot_id) is not memory:
            parts = [self._slots.part_of(slot_id, spec) for spec in self._parts]
            self._tables[slot_id] = [part.data_ptr() for part in parts]
            self._written[slot_id] = memory
        return self._first + slot_id * self._tables.strides[0]


def num_host_slots(
    host_memory: int | str | None,
    *,
    slot_bytes: int,
    num_experts: int,
    free_bytes: int,
    mapped_bytes: int | None = None,
) -> int:
    """How many slots `host_memory` allows, or `free_bytes` if it is None; at most one per expert.
    With `mapped_bytes` all experts take no more than these, if all fit.

    Raises ConfigError if it holds no expert, or is more than the machine has.
    """
    everything = slot_bytes * num_experts if mapped_bytes is None else mapped_bytes
    budget = free_bytes if host_memory is None else parse_size(host_memory, whole_bytes=everything)
    machine = machine_memory_bytes()
    if host_memory is not None and budget > machine:
        raise ConfigError(
            f"host_memory of {format_bytes(budget)} is more than this machine has "
            f"({format_bytes(machine)})\n"
            f"hint: all experts together take {format_bytes(everything)}"
        )
    if budget < slot_bytes:
        what = "what memory has left for experts" if host_memory is None else "host_memory"
        raise ConfigError(
            f"{what}, {format_bytes(max(budget, 0))}, holds no expert: "
            f"one takes {format_bytes(slot_bytes)}\n"
            f"hint: raise {'memory' if host_memory is None else 'host_memory'}; all {num_experts} "
            f"experts together take {format_bytes(everything)}"
        )
    return num_experts if budget >= everything else min(budget // slot_bytes, num_experts)
