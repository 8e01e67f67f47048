"""What this machine could do at best: reading memory, multiplying matrices, reading the disk."""

from __future__ import annotations

import logging
from pathlib import Path

from moe_infinity.errors import CheckpointError
from moe_infinity.tools.bench.rows import Rates
from moe_infinity.tools.planning.disk import WEIGHTS, measure_disk
from moe_infinity.tools.planning.rates import memory_rate, products_rate

DISK_S = 2.0

logger = logging.getLogger(__name__)


def measure_rates(checkpoint: Path, *, bytes_per_expert: int, num_threads: int) -> Rates:
    """Of this machine's processor and memory, and of the disk that a folder or file is on."""
    return Rates(
        memory=memory_rate(num_threads),
        disk=_disk_rate(checkpoint, bytes_per_expert),
        products=products_rate(),
    )


def _disk_rate(checkpoint: Path, bytes_per_expert: int) -> float | None:
    """None if no weight file is large enough to be read past the page cache."""
    files = [checkpoint]
    if checkpoint.is_dir():
        files = [file for file in checkpoint.iterdir() if file.suffix in WEIGHTS]
    largest = max(files, key=lambda file: file.stat().st_size)
    try:
        return measure_disk(largest, DISK_S, read_bytes=bytes_per_expert)
    except CheckpointError as error:
        logger.info("no bound by the disk: %s", error)
        return None
