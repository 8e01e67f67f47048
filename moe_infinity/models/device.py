"""Where a model computes: the CPU, or a device with slots for experts beside its dense weights, and
further ones with slots alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError, OutOfMemory
from moe_infinity.kernels import has_packed_kernels
from moe_infinity.memory.device import (
    SLOT_ALIGNMENT,
    DeviceSlots,
    in_turns,
    num_device_slots,
    round_up,
)
from moe_infinity.memory.host import format_bytes
from moe_infinity.memory.link import Link, open_link
from moe_infinity.models.packed_on_load import packed_on_load
from moe_infinity.models.planning import Plan

if TYPE_CHECKING:
    from moe_infinity.kernels.lean import LeanSteps


class ComputeDevice:
    """Raises ConfigError if the configured device is not there."""

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        links = [open_link(name) for name, _ in config.devices]
        self._links = [link for link in links if link is not None]
        if not self._links and config.device_memory is not None:
            raise ConfigError(
                "device_memory needs a CUDA device, torch finds none\nhint: use host_memory"
            )
        self.device = self._links[0].device if self._links else torch.device("cpu")
        if config.experts_implementation == "fast" and not (self._links or has_packed_kernels()):
            raise ConfigError("'fast' on a CPU needs numba\nhint: pip install 'moe-infinity[cpu]'")
        self.slots: DeviceSlots | None = None  # of all devices, once the plan is known

    def prepare(self, plan: Plan, dense_bytes: int) -> Plan:
        """Before anything large is read: how experts lie in slots, and the slots of the devices.
        Raises ConfigError.
        """
        if self._config.expert_dtype is not None:
            plan = packed_on_load(plan, self._config.expert_dtype)
        if self._links:
            self.slots = self._make_slots(plan, dense_bytes)
        return plan

    def _make_slots(self, plan: Plan, dense_bytes: int) -> DeviceSlots:
        has_norm = any(vars(row.module).get("has_post_expert_norm") for row in plan.rows)
        if has_norm and len(self._links) > 1:
            raise ConfigError(
                "the norm after each expert of this model is on one device\n"
                f"hint: device='{self.device}'"
            )
        expert_bytes = max(recipes.layout.slot_bytes for recipes in plan.recipes)
        slot_bytes = round_up(expert_bytes, SLOT_ALIGNMENT)
        num_experts = sum(row.num_experts for row in plan.rows)
        room: dict[Link, int] = {}
        for link, (_, device_memory) in zip(self._links, self._config.devices, strict=True):
            room[link] = num_device_slots(
                device_memory,
                link,
                slot_bytes=slot_bytes,
                num_experts=num_experts,
                dense_bytes=0 if room else dense_bytes,
            )
        return DeviceSlots(in_turns(room, num_experts), slot_bytes)

    def lean_steps(self, model: Any, *, is_packed: bool) -> LeanSteps | None:
        """On a CPU, if the bits are not those of transformers anyway."""
        implementation = self._config.experts_implementation
        is_free = implementation == "fast" or (implementation == "auto" and is_packed)
        if not (is_free and self.device.type == "cpu" and has_packed_kernels()):
            return None
        from moe_infinity.kernels.lean import LeanSteps  # needs numba

        return LeanSteps(model)

    def move(self, value: Any) -> Any:
        """An argument of the model: a tensor goes where the model computes."""
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Torch's error, when a device has no more memory, becomes one with our numbers in it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self.slots is None:
                raise
            sizes = [(link.device, *map(format_bytes, link.memory_bytes())) for link in self._links]
            here = ", ".join(f"{free} of {total} are free on {at}" for at, free, total in sizes)
            raise OutOfMemory(
                f"out of memory: {here}, {self.slots.num_slots} expert slots take "
                f"{format_bytes(self.slots.num_bytes)}\n"
                "hint: lower device_memory, or give shorter prompts, fewer sequences, or "
                f"prefill_chunk_size ({error})"
            ) from error
