"""The tiers of slots of one model, the one that computes first.

    without a GPU   HOST                 filled from disk
    with one        DEVICE, then HOST    DEVICE filled from HOST, HOST from disk

Each has its own slots, its own policy and its own table; the mover of the first brings experts
through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.config import OffloadConfig
from moe_infinity.experts import ExpertKey, Tier
from moe_infinity.memory.device import PAGE_BYTES, DeviceSlots, SourceSlots, round_up
from moe_infinity.memory.device_mover import DeviceMover
from moe_infinity.memory.host import HostSlots, num_host_slots
from moe_infinity.memory.mover import Mover

Fill = Callable[[ExpertKey, memoryview], None]  # bring an expert's bytes from disk


@dataclass(slots=True)
class HostTier:
    """Slots in DRAM."""

    slots: HostSlots
    policy: EvictionPolicy
    table: ResidencyTable
    mover: Mover
    tier: Tier = Tier.HOST


@dataclass(slots=True)
class DeviceTier:
    """Slots on a device."""

    slots: DeviceSlots
    policy: EvictionPolicy
    table: ResidencyTable
    mover: DeviceMover
    tier: Tier = Tier.DEVICE


def make_tiers(
    config: OffloadConfig,
    device_slots: DeviceSlots | None,
    *,
    row_bytes: Sequence[int],  # of a slot that holds an expert of each row
    num_experts: int,
    make_policy: Callable[..., EvictionPolicy],
    fills: tuple[Fill, Fill],  # for the second nobody waits yet
) -> tuple[HostTier] | tuple[DeviceTier, HostTier]:
    """Raises ConfigError for a host_memory that is too small or too large."""
    slot_bytes = max(row_bytes)
    if device_slots is not None:
        slot_bytes = round_up(slot_bytes, PAGE_BYTES)
    num_slots = num_host_slots(config.host_memory, slot_bytes=slot_bytes, num_experts=num_experts)
    policy = make_policy(num_slots=num_slots)
    table = ResidencyTable(num_slots, policy)
    if device_slots is None:
        slots = HostSlots(num_slots, slot_bytes)
        mover = _mover(table, slots, fills, config.num_read_threads)
        return (HostTier(slots, policy, table, mover),)
    sources = SourceSlots(device_slots.link, num_slots, slot_bytes)
    mover = _mover(table, sources, fills, config.num_read_threads)
    host = HostTier(sources, policy, table, mover)
    policy = make_policy(num_slots=device_slots.num_slots)
    table = ResidencyTable(device_slots.num_slots, policy)
    above = DeviceMover(
        table, device_slots, host.table, sources, host.mover, copied_bytes=row_bytes
    )
    return DeviceTier(device_slots, policy, table, above), host


def _mover(
    table: ResidencyTable, slots: HostSlots, fills: tuple[Fill, Fill], num_threads: int
) -> Mover:
    fill, fill_ahead = fills

    def read(key: ExpertKey, slot_id: int) -> None:
        fill(key, slots.bytes_of(slot_id))

    def read_ahead(key: ExpertKey, slot_id: int) -> None:
        fill_ahead(key, slots.bytes_of(slot_id))

    return Mover(table, read, num_threads=num_threads, read_ahead=read_ahead)
