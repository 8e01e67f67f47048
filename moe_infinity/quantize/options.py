"""The options of `moe-infinity pack`, without torch."""

from __future__ import annotations

from moe_infinity.config import EXPERT_DTYPES
from moe_infinity.errors import ConfigError

GROUP_SIZES = (32, 64, 128)
ROUNDINGS = ("nearest", "search")


def check_options(experts: str, group_size: int, rounding: str) -> None:
    """Raises ConfigError for a value that is none of those known."""
    for name, value, allowed in (
        ("--experts", experts, EXPERT_DTYPES),
        ("--group-size", group_size, GROUP_SIZES),
        ("--rounding", rounding, ROUNDINGS),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} {value}, expected one of: {', '.join(map(str, allowed))}")
