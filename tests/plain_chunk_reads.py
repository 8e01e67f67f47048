"""What kernels/cpu/chunk_reads.py does, in Python: the reference of its test, and what tests run
that stand in the place of the system's reads."""

from __future__ import annotations

import ctypes
import os
import threading

from moe_infinity.checkpoint.files import BLOCK_BYTES
from moe_infinity.kernels.cpu.chunk_reads import (
    FAILED,
    GROUP_SIZE,
    HEADER,
    IS_STOPPED,
    LEFT,
    NEXT,
    NUM_CHUNKS,
    ROW_SIZE,
    ChunkRow,
)
from moe_infinity.system import linux

_lock = threading.Lock()


def read_group(table: int, scratch: int) -> int:
    """Read chunks until one was the last of its group, and return the group; -1 if none is left."""
    words = (ctypes.c_int64 * (1 << 40)).from_address(table)
    num_chunks = words[NUM_CHUNKS]
    while not words[IS_STOPPED]:
        with _lock:
            taken = words[NEXT]
            words[NEXT] += 1
        if taken >= num_chunks:
            break
        first = HEADER + ROW_SIZE * taken
        row = ChunkRow(*words[first : first + ROW_SIZE])
        is_read = _read_chunk(row, scratch)
        group = HEADER + ROW_SIZE * num_chunks + GROUP_SIZE * row.group
        with _lock:
            words[group + FAILED] += not is_read
            words[group + LEFT] -= 1
            is_last = words[group + LEFT] == 0
        if is_last:
            return row.group
    return -1


def _read_chunk(row: ChunkRow, scratch: int) -> bool:
    def memory(address: int, num_bytes: int) -> memoryview:
        return memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B")

    destination = memory(row.address, row.num_bytes)
    try:
        if linux.is_cached(row.cached, row.offset, row.num_bytes):
            return os.preadv(row.cached, [destination], row.offset) == row.num_bytes
    except OSError:
        pass
    skip = row.offset % BLOCK_BYTES
    wanted = -(-(skip + row.num_bytes) // BLOCK_BYTES) * BLOCK_BYTES
    buffer = memory(scratch + BLOCK_BYTES, wanted)
    try:
        count = os.preadv(row.direct, [buffer], row.offset - skip)
    except OSError:
        return False
    if count < skip + row.num_bytes:
        return False
    destination[:] = buffer[skip : skip + row.num_bytes]
    return True
