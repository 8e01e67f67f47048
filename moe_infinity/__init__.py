"""MoE-Infinity: run Mixture-of-Experts models that do not fit in memory, with the tokens they would
give with all experts in it.

`MoE` is imported when first asked for: torch and transformers take seconds.
"""

from typing import TYPE_CHECKING, Any

from moe_infinity.config import OffloadConfig
from moe_infinity.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    LoadTimeout,
    MoEInfinityError,
    OutOfMemory,
    OutOfSlots,
    OutputError,
    TraceError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from moe_infinity.model import MoE

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "LoadTimeout",
    "MoE",
    "MoEInfinityError",
    "OffloadConfig",
    "OutOfMemory",
    "OutOfSlots",
    "OutputError",
    "TraceError",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> Any:
    if name == "MoE":
        from moe_infinity.model import MoE

        return MoE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
