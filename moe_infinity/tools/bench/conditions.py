"""What a measurement was made under, and whether its models fit into memory."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

from moe_infinity.errors import ConfigError
from moe_infinity.inspection import Summary
from moe_infinity.legacy_config import device_memory_bytes
from moe_infinity.memory.slots import AUTOMATIC_SHARE
from moe_infinity.sizes import format_bytes, parse_size
from moe_infinity.system.machine import (
    available_memory_bytes,
    machine_memory_bytes,
    num_cores,
    processor_name,
)

PACKAGES = ("moe-infinity", "torch", "transformers", "numba")
SHARE = 0.8  # of the free memory that models may take together


def about_machine(device: str) -> dict[str, Any]:
    """Versions, processor, threads, memory."""
    return {
        "versions": {name: version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "cpu": processor_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": machine_memory_bytes(),
        "device": device if device_memory_bytes(device) is not None else "cpu",
    }


def fit_together(
    summary: Summary, budgets: Sequence[str | None], *, others_bytes: int, device: str
) -> bool:
    """Whether one model for each budget, and files of `others_bytes` that others map, are in memory
    at once. Raises ConfigError if not even one is.
    """
    free = available_memory_bytes()
    own = [_num_bytes(summary, budget, free) for budget in budgets]
    if max(own) > free:
        raise ConfigError(
            f"{format_bytes(summary.dense_bytes)} of dense weights and "
            f"{format_bytes(max(own) - summary.dense_bytes)} for experts, "
            f"{format_bytes(free)} of memory are free\nhint: a smaller --host-memory"
        )
    if device_memory_bytes(device) is not None:
        return False  # each takes most of a GPU's memory
    return sum(own) + others_bytes <= SHARE * free


def _num_bytes(summary: Summary, budget: str | None, free: int) -> int:
    """Of a model with that budget; None is its own choice."""
    if budget is None:
        experts = min(summary.expert_bytes, int(AUTOMATIC_SHARE * free) - summary.dense_bytes)
        return summary.dense_bytes + max(experts, 0)
    asked = parse_size(budget, whole_bytes=summary.expert_bytes)
    return summary.dense_bytes + min(asked, summary.expert_bytes)
