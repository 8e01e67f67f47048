"""Sizes as people write them: bytes, "8GiB", or a share of all expert bytes."""

from __future__ import annotations

import re

from moe_infinity.errors import ConfigError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(value: int | str, *, whole_bytes: int) -> int:
    """Bytes of 8_000_000_000, "8GiB", "500 MB" or "25%" (of `whole_bytes`). Raises ConfigError."""
    text = str(value).strip()
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    sized = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if percent:
        return int(whole_bytes * float(percent[1]) / 100)
    if isinstance(value, bool) or not sized or sized[2].upper() not in UNITS or len(text) > 40:
        raise ConfigError(
            f"{value!r} is not a size, "
            "expected bytes (8000000000), a unit ('8GiB', '500MB') or '25%'"
        )
    return int(float(sized[1]) * UNITS[sized[2].upper()])


def format_bytes(num_bytes: float) -> str:
    """The size as text: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
