"""How much memory this machine, or the container we run in, has, and how much is free."""

from __future__ import annotations

from moe_infinity.system import control_groups, machine


def machine_memory_bytes() -> int:
    """Bytes of physical memory, or the control group's limit if that is less."""
    limits = [limit.num_bytes for limit in control_groups.memory_limits()]
    return min([machine.physical_bytes(), *limits])


def device_memory_bytes(device: str) -> int | None:
    """Bytes of the CUDA device that "cuda:1", "cuda" or "auto" names; None if there is none."""
    import torch  # takes seconds, and only a config of an older MoE-Infinity needs it

    if device in ("cpu", "mps") or not torch.cuda.is_available():
        return None
    return int(torch.cuda.mem_get_info(0 if device == "auto" else device)[1])


def available_memory_bytes() -> int:
    """Bytes that can be allocated without swapping, by the operating system's own estimate and
    within the limits of our control groups.
    """
    left = [limit.num_bytes - limit.used_bytes for limit in control_groups.memory_limits()]
    return max(min([machine.available_bytes(), *left]), 0)
