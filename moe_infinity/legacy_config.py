"""Options of the MoE-Infinity that was published with the paper: each is honoured, or answered by a
warning that says what replaces it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from moe_infinity.config import OffloadConfig, options_of
from moe_infinity.errors import ConfigError
from moe_infinity.memory.machine import device_memory_bytes, machine_memory_bytes

# What to tell the user of an option that has no effect.
LEGACY_IGNORED = {
    "offload_path": "experts are read in place from the checkpoint, no copy is kept; remove it",
    "device_memory_ratio": "torch finds no CUDA device, experts run on the CPU; remove it",
    "trace_capacity": "the collection of earlier requests keeps 120; remove it",
    "trace_path": "use `history`, a file that is made when the model is closed",
    "num_threads": "use `num_read_threads` for disk reads and torch.set_num_threads() for compute",
}


def config_of(
    config: OffloadConfig | dict[str, Any] | str | Path | None,
    options: dict[str, Any],
    kind: type[OffloadConfig] = OffloadConfig,
) -> OffloadConfig:
    """Return what `MoE(...)` was given as a config of this kind. Older options are understood,
    except on top of an OffloadConfig. Raises ConfigError.
    """
    if isinstance(config, OffloadConfig):
        return kind.from_options(config, options)
    return kind.from_options(None, translate_legacy(options_of(config) | options))


def translate_legacy(options: dict[str, Any]) -> dict[str, Any]:
    """Honour or answer each key of the older config dict."""
    kept: dict[str, Any] = {}
    for name, value in options.items():
        device_memory = None
        if name == "device_memory_ratio":
            device_memory = memory_of_ratio(value, str(options.get("device", "auto")))
        if device_memory is not None:
            kept["device_memory"] = device_memory
        elif name in LEGACY_IGNORED:
            warnings.warn(
                f"option {name!r} has no effect: {LEGACY_IGNORED[name]}", UserWarning, stacklevel=4
            )
        elif name == "host_memory_ratio":
            kept["host_memory"] = int(_ratio(name, value) * machine_memory_bytes())
        else:
            kept[name] = value
    return kept


def memory_of_ratio(ratio: Any, device: str) -> int | None:
    """The device_memory of an older device_memory_ratio; None without a GPU. Raises ConfigError."""
    share = _ratio("device_memory_ratio", ratio)
    num_bytes = device_memory_bytes(device)
    return None if num_bytes is None else int(share * num_bytes)


def _ratio(name: str, ratio: Any) -> float:
    if type(ratio) not in (int, float) or not 0 < ratio <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, got {ratio!r}")
    return float(ratio)
