"""The tiers of slots of one model; the tier whose slots kernels read comes first.

    without a GPU   HOST                 filled from disk
    with one        DEVICE, then HOST    DEVICE filled from HOST, HOST from disk

Each tier has its own slots, policy and residency table. The mover of the first tier loads experts
through all tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.config import OffloadConfig
from moe_infinity.experts import ExpertKey, Tier
from moe_infinity.memory.device import PAGE_BYTES, DeviceSlots, SourceSlots, round_up
from moe_infinity.memory.device_mover import DeviceMover
from moe_infinity.memory.mover import Mover, Share, SharedLoads
from moe_infinity.memory.slots import HostSlots, Mapped, MappedSlots, num_host_slots
from moe_infinity.report import TierOccupancy

Fill = Callable[..., None]  # (expert, slot, ...): read an expert's bytes from disk
InOrder = Callable[[Iterable[ExpertKey]], Sequence[ExpertKey]]


@dataclass(slots=True)
class SlotTier:
    """One tier of slots."""

    tier: Tier
    slots: HostSlots | MappedSlots | DeviceSlots
    policy: EvictionPolicy
    table: ResidencyTable
    mover: Mover | DeviceMover

    @property
    def bytes_to_come(self) -> int:
        """Memory that counts as free, and that experts will take or need."""
        if isinstance(self.slots, MappedSlots):
            return self.slots.num_bytes  # of the page cache
        return self.table.num_unfilled * self.slots.slot_bytes

    def occupancy(self) -> TierOccupancy:
        """Return how full the tier is now."""
        table = self.table
        num_given_back = self.slots.num_slots - table.num_slots
        num_bytes = self.slots.num_bytes - num_given_back * self.slots.slot_bytes
        return TierOccupancy(self.tier.value, table.num_resident, table.num_slots, num_bytes)


def make_tiers(
    config: OffloadConfig,
    device_slots: DeviceSlots | None,
    *,
    layer_slot_bytes: Sequence[int],  # by MoE layer: the slot size its experts need
    num_experts: int,
    free_bytes: int,  # for experts, unless the config says how many
    bytes_in_place: Callable[[], int],  # of all experts, where those that can be are mapped
    make_policy: Callable[..., EvictionPolicy],
    fills: tuple[Fill, Fill],  # for demand loads, for those that give way
    shared: Callable[..., SharedLoads | None],  # reads several experts at once, into slots
    in_file_order: InOrder,
    mapped: Mapped,  # an expert where its files have it as a slot would
    can_map: Callable[[], bool],  # True to use them there
) -> list[SlotTier]:
    """The tiers of a model; without `device_slots` HOST alone.

    Raises ConfigError for a host_memory that is too small or too large.
    """
    slot_bytes = max(layer_slot_bytes)
    if device_slots is not None:
        slot_bytes = round_up(slot_bytes, PAGE_BYTES)
    mapped_bytes = bytes_in_place() if device_slots is None and can_map() else None
    num_slots = num_host_slots(
        config.host_memory,
        slot_bytes=slot_bytes,
        num_experts=num_experts,
        free_bytes=free_bytes,
        mapped_bytes=mapped_bytes,
    )
    slots: HostSlots | MappedSlots
    if device_slots is not None:
        slots = SourceSlots(device_slots.cuda_device, num_slots, slot_bytes)
    elif mapped_bytes is not None and num_slots == num_experts:
        slots = MappedSlots(num_slots, slot_bytes, mapped_bytes, mapped)
    else:
        slots = HostSlots(num_slots, slot_bytes)
    policy = make_policy(num_slots=num_slots)
    table = ResidencyTable(num_slots, policy)
    read, read_ahead = (_into_slots(fill, slots) for fill in fills)
    mover = Mover(
        table,
        read,
        num_threads=config.num_read_threads,
        read_ahead=read_ahead,
        shared=_shared_into(shared, slots) if isinstance(slots, HostSlots) else None,
        in_file_order=in_file_order,
    )
    tiers = [SlotTier(Tier.HOST, slots, policy, table, mover)]
    if device_slots is not None:
        assert isinstance(slots, SourceSlots), slots
        policy = make_policy(num_slots=device_slots.num_slots)
        device_table = ResidencyTable(device_slots.num_slots, policy)
        device_mover = DeviceMover(
            device_table, device_slots, table, slots, mover, copied_bytes=layer_slot_bytes
        )
        tiers.insert(0, SlotTier(Tier.DEVICE, device_slots, policy, device_table, device_mover))
    return tiers


def _into_slots(fill: Fill, slots: HostSlots | MappedSlots) -> Callable[..., None]:
    return lambda key, slot_id, *more: fill(key, slots.bytes_for(slot_id, key), *more)


def _shared_into(shared: Callable[..., SharedLoads | None], slots: HostSlots) -> Share:
    shared([])  # machine code is compiled now, not while a token waits
    return lambda loads: shared(
        [(key, partial(slots.bytes_for, slot_id, key)) for key, slot_id in loads]
    )
