"""Options of the MoE-Infinity that was published with the paper. A config asks here about the names
it does not know: each is honoured, or answered by a warning that says what replaces it.
"""

from __future__ import annotations

import warnings
from typing import Any

from moe_infinity.errors import ConfigError
from moe_infinity.system.machine import machine_memory_bytes

# What to tell the user of an option that has no effect.
IGNORED = {
    "offload_path": "experts are read in place from the checkpoint, no copy is kept; remove it",
    "device_memory_ratio": "torch finds no CUDA device, experts run on the CPU; remove it",
    "trace_capacity": "the collection of earlier requests keeps 120; remove it",
    "trace_path": "use `history`, a file that is made when the model is closed",
    "num_threads": "use `num_read_threads` for disk reads and torch.set_num_threads() for compute",
}


def translated(options: dict[str, Any]) -> dict[str, Any]:
    """The options without older names. Raises ConfigError for a bad ratio."""
    kept: dict[str, Any] = {}
    for name, value in options.items():
        device_memory = None
        if name == "device_memory_ratio":
            device_memory = memory_of_ratio(value, str(options.get("device", "auto")))
        if device_memory is not None:
            kept["device_memory"] = device_memory
        elif name in IGNORED:
            text = f"option {name!r} has no effect: {IGNORED[name]}"
            warnings.warn(text, UserWarning, stacklevel=4)  # of the caller of MoE
        elif name == "host_memory_ratio":
            kept["host_memory"] = int(_ratio(name, value) * machine_memory_bytes())
        else:
            kept[name] = value
    return kept


def memory_of_ratio(ratio: Any, device: str) -> int | None:
    """The device_memory of an older device_memory_ratio; None without a GPU. Raises ConfigError."""
    from moe_infinity.memory.cuda import device_memory_bytes  # torch takes seconds to import

    share = _ratio("device_memory_ratio", ratio)
    num_bytes = device_memory_bytes(device)
    return None if num_bytes is None else int(share * num_bytes)


def _ratio(name: str, ratio: Any) -> float:
    if type(ratio) not in (int, float) or not 0 < ratio <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, got {ratio!r}")
    return float(ratio)
