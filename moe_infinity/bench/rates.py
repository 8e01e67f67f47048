"""What this machine could do at best: reading memory, multiplying matrices, reading the disk."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from moe_infinity.bench.rows import Rates
from moe_infinity.errors import CheckpointError
from moe_infinity.planning.disk import WEIGHTS, measure_disk

SECONDS = 1.0  # of each measurement
MEMORY_BYTES = 256 << 20  # of all threads together, much more than caches hold
TOKENS = 600  # of the measured product, as the next two
ROWS = 1536
COLUMNS = 2048

logger = logging.getLogger(__name__)


def measure_rates(checkpoint: Path, *, bytes_per_expert: int, num_threads: int) -> Rates:
    """Of this machine's processor and memory, and of the disk that a folder or file is on."""
    return Rates(
        memory=memory_rate(num_threads),
        disk=_disk_rate(checkpoint, bytes_per_expert),
        products=max(map(products_rate, (torch.bfloat16, torch.float32))),
    )


def memory_rate(num_threads: int) -> float:
    """Bytes per second that threads read together."""
    parts = [np.ones(MEMORY_BYTES // 8 // num_threads) for _ in range(num_threads)]
    started = time.perf_counter()

    def read(part: np.ndarray) -> int:
        num_passes = 0
        while num_passes == 0 or time.perf_counter() < started + SECONDS:
            part.max()
            num_passes += 1
        return num_passes * part.nbytes

    with ThreadPoolExecutor(num_threads) as pool:
        num_bytes = sum(pool.map(read, parts))
    return num_bytes / (time.perf_counter() - started)


def products_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of torch's matrix product, of a prompt's size."""
    x = torch.ones(TOKENS, COLUMNS, dtype=dtype, device="cpu")
    weight = torch.ones(ROWS, COLUMNS, dtype=dtype, device="cpu")
    torch.nn.functional.linear(x, weight)
    started = time.perf_counter()
    num_done = 0
    while num_done == 0 or time.perf_counter() < started + SECONDS:
        torch.nn.functional.linear(x, weight)
        num_done += 1
    return 2.0 * TOKENS * ROWS * COLUMNS * num_done / (time.perf_counter() - started)


def _disk_rate(checkpoint: Path, bytes_per_expert: int) -> float | None:
    """None if no weight file is large enough to be read past the page cache."""
    files = [checkpoint]
    if checkpoint.is_dir():
        files = [file for file in checkpoint.iterdir() if file.suffix in WEIGHTS]
    largest = max(files, key=lambda file: file.stat().st_size)
    try:
        return measure_disk(largest, SECONDS, read_bytes=bytes_per_expert)
    except CheckpointError as error:
        logger.info("no bound by the disk: %s", error)
        return None
