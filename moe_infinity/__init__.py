"""MoE-Infinity: run Mixture-of-Experts models that do not fit in memory, with exactly the tokens
they would give.
"""

from moe_infinity.config import OffloadConfig
from moe_infinity.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    LoadTimeout,
    MoEInfinityError,
    OutOfSlots,
    TraceError,
    UnsupportedModelError,
)
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
    "OutOfSlots",
    "TraceError",
    "UnsupportedModelError",
]
