"""Takes the report of what a model did so far."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from moe_infinity.architectures.model_parts import bytes_by_type
from moe_infinity.architectures.stored_embedding import row_bytes_by_type
from moe_infinity.config import OffloadConfig
from moe_infinity.engine.engine import LocalExperts
from moe_infinity.experts import Tier
from moe_infinity.memory.needs import kv_bytes_of
from moe_infinity.report import PathTaken, Report, TierOccupancy, count_paths


def report_of(
    model: Any,
    engine: LocalExperts,
    config: OffloadConfig,
    startup_bytes_read: int,
    around: Iterable[PathTaken],
) -> Report:
    """Return a snapshot. `around`: how the modules beside the experts are computed."""
    num_experts = engine.bookkeeping.total_experts
    disk = TierOccupancy(Tier.DISK.value, num_experts, num_experts, engine.stored_expert_bytes)
    counters = copy.deepcopy(engine.bookkeeping.counters)
    table = engine.tiers[0].table
    return Report(
        policy=config.policy,
        experts=engine.description,
        prefill=counters.prefill,
        decode=counters.decode,
        startup_bytes_read=startup_bytes_read,
        dense_types=bytes_by_type(model),
        row_types=row_bytes_by_type(model),
        kv=kv_bytes_of(model.config, model.dtype.itemsize, config.kv_dtype),
        prefetches=copy.copy(table.prefetches),
        preload=counters.preload,
        evictions=table.evictions,
        tiers=(*(tier.occupancy() for tier in engine.tiers), disk),
        paths=count_paths([computer.path_taken for computer in engine.path.computers], around),
    )
