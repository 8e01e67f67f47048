"""One read, as bytes."""

from __future__ import annotations

from pathlib import Path

from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import Reader


def read(reader: Reader, file: Path, offset: int, num_bytes: int) -> bytes:
    destination = bytearray(num_bytes)
    reader.read_into(Extent(file, offset, num_bytes), memoryview(destination))
    return bytes(destination)
