"""Which tier holds how much of a model: the budgets that the engine would choose by itself, unless
one is given or the KV cache would not fit beside it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moe_infinity.memory.device import AUTOMATIC_SHARE as GPU_SHARE
from moe_infinity.memory.device import LEAST_ROOM_SHARE
from moe_infinity.memory.slots import AUTOMATIC_SHARE as HOST_SHARE
from moe_infinity.sizes import format_bytes, parse_size
from moe_infinity.tools.planning.machine import PlanMachine
from moe_infinity.tools.planning.sizes import ModelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """What one kind of memory holds, in bytes."""

    name: str  # "gpu", "host" or "disk"
    available: float  # of a new process; of the disk what it holds
    runtime: int = 0
    dense: int = 0
    kv: int = 0
    num_slots: int = 0  # experts
    slot_bytes: int = 0

    @property
    def experts(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def left(self) -> float:
        """For activations and other programs."""
        return self.available - self.runtime - self.dense - self.kv - self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The tiers, the one that computes first; the disk, which has all, comes last."""

    tiers: tuple[TierBytes, ...]
    host_memory: int | None  # to be given as --host-memory; None: the default
    refusal: str | None  # why the model does not run; None: it runs
    all_in_memory: bool  # no step reads from the disk once all is loaded

    @property
    def host(self) -> TierBytes:
        return next(tier for tier in self.tiers if tier.name == "host")

    @property
    def gpu(self) -> TierBytes | None:
        return next((tier for tier in self.tiers if tier.name == "gpu"), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tiers = [asdict(t) | {"experts": t.experts, "left": t.left} for t in self.tiers]
        return {
            "fits": self.refusal is None,
            "refusal": self.refusal,
            "all_in_memory": self.all_in_memory,
            "host_memory": self.host_memory,
            "tiers": tiers,
        }


def fit(
    sizes: ModelSizes, machine: PlanMachine, *, context: int, host_memory: int | str | None = None
) -> Fit:
    """Plan with room for the keys and values of `context` tokens. Raises ConfigError for a
    `host_memory` that is no size.
    """
    kv = sizes.kv.of(context)
    gpu = _gpu_tier(sizes, machine, kv) if machine.gpu else None
    on_host = gpu is None  # dense weights and the KV cache
    dense = sizes.dense_bytes if on_host else 0
    free = max(machine.ram - machine.runtime - dense, 0)
    beside_kv = max(free - (kv if on_host else 0), 0)
    given = host_memory is not None
    budget = int(free * HOST_SHARE)
    if host_memory is not None:
        budget = parse_size(host_memory, whole_bytes=sizes.expert_bytes)
    elif budget > beside_kv:
        budget = int(beside_kv)
        given = True
    num_slots = min(budget // sizes.slot_bytes, sizes.total_experts)
    host = TierBytes(
        name="host",
        available=machine.ram,
        runtime=machine.runtime,
        dense=dense,
        kv=kv if on_host else 0,
        num_slots=num_slots,
        slot_bytes=sizes.slot_bytes,
    )
    tiers = (host,) if gpu is None else (gpu, host)
    disk = TierBytes(
        name="disk",
        available=sizes.dense_bytes + sizes.total_experts * sizes.stored_bytes,
        dense=sizes.dense_bytes,
        num_slots=sizes.total_experts,
        slot_bytes=sizes.stored_bytes,
    )
    return Fit(
        tiers=(*tiers, disk),
        host_memory=budget if given else None,
        refusal=_refusal(tiers, machine, budget),
        all_in_memory=num_slots == sizes.total_experts,
    )


def _gpu_tier(sizes: ModelSizes, machine: PlanMachine, kv: int) -> TierBytes:
    """Dense weights, the KV cache, and slots in most of what is left."""
    free = max(machine.gpu - sizes.dense_bytes, 0)
    room = max(kv, machine.gpu * LEAST_ROOM_SHARE)
    budget = min(free * GPU_SHARE, max(free - room, 0))
    return TierBytes(
        name="gpu",
        available=machine.gpu,
        dense=sizes.dense_bytes,
        kv=kv,
        num_slots=min(int(budget) // sizes.slot_bytes, sizes.total_experts),
        slot_bytes=sizes.slot_bytes,
    )


def _refusal(tiers: tuple[TierBytes, ...], machine: PlanMachine, budget: int) -> str | None:
    if budget > machine.ram:
        return (
            f"host_memory of {format_bytes(budget)} is more than is free "
            f"({format_bytes(machine.ram)})"
        )
    for tier in tiers:
        where = "the GPU" if tier.name == "gpu" else "memory"
        needed = tier.runtime + tier.dense + tier.kv
        if needed + tier.slot_bytes > tier.available:
            what = "dense weights, KV cache" + (", Python and torch" if tier.runtime else "")
            return (
                f"{what} and one expert take {format_bytes(needed + tier.slot_bytes)}, "
                f"{where} has {format_bytes(tier.available)}"
            )
        if tier.left < 0:
            over = format_bytes(-tier.left)
            return f"{where} lacks {over} for experts, dense weights and KV cache together"
        if tier.num_slots < 1:
            return f"no expert has room in {where}"
    return None
