"""Reads chunks of files in machine code. A thread that reads needs the GIL once per expert: with a
dozen turns per chunk, it and the thread that computes would wait for each other.

    table    NEXT, NUM_CHUNKS, IS_STOPPED | NUM_CHUNKS x row | per group: chunks left, chunks failed

A group is the chunks of one expert. Any number of threads take chunks from one table.

Private names of numba used here: `types.ExternalFunction`.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import njit, types

from moe_infinity.kernels.cpu.compiler import machine_code, reader_of
from moe_infinity.kernels.cpu.team import fetch, fetch_add
from moe_infinity.kernels.cpu.vectors import words_at
from moe_infinity.system.linux import CACHESTAT, PAGE_BYTES

NEXT = 0  # the first chunk that no thread has taken
NUM_CHUNKS = 1
IS_STOPPED = 2  # 1: no thread takes more
HEADER = 3
LEFT = 0
FAILED = 1
GROUP_SIZE = 2
BLOCK_BYTES = 4096  # of reads past the page cache
ANSWER = 2  # the word where it begins, with the number of pages that are cached


class ChunkRow(NamedTuple):
    """A chunk of a file, and where it goes."""

    cached: int  # the descriptor that reads through the page cache
    direct: int  # the one that reads past it
    offset: int
    num_bytes: int
    address: int
    group: int


ROW_SIZE = len(ChunkRow._fields)

read_at = types.ExternalFunction(
    "pread", types.int64(types.int32, types.int64, types.int64, types.int64)
)
copy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
system_call = types.ExternalFunction(
    "syscall",
    types.int64(types.int64, types.int64, types.int64, types.int64, types.int64),
)


row_at = reader_of(ChunkRow)


@njit(nogil=True)
def _is_cached(descriptor, offset, num_bytes, scratch):  # type: ignore[no-untyped-def]
    """True if the page cache has all of these bytes; False also where the system cannot say."""
    words = words_at(scratch)
    words[0] = offset
    words[1] = num_bytes
    if system_call(CACHESTAT, descriptor, scratch, scratch + 8 * ANSWER, 0) != 0:
        return False
    last_page = (offset + num_bytes - 1) // PAGE_BYTES
    return words[ANSWER] == last_page - offset // PAGE_BYTES + 1


@njit(nogil=True)
def _is_read(row, scratch):  # type: ignore[no-untyped-def]
    """Read a chunk; False if not all of it was read."""
    if _is_cached(row.cached, row.offset, row.num_bytes, scratch):
        return read_at(row.cached, row.address, row.num_bytes, row.offset) == row.num_bytes
    skip = row.offset % BLOCK_BYTES
    if (skip | row.num_bytes | row.address) % BLOCK_BYTES == 0:
        return read_at(row.direct, row.address, row.num_bytes, row.offset) == row.num_bytes
    buffer = scratch + BLOCK_BYTES
    wanted = (skip + row.num_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
    if read_at(row.direct, buffer, wanted, row.offset - skip) < skip + row.num_bytes:
        return False
    copy(row.address, buffer + skip, row.num_bytes)
    return True


@machine_code(types.int64(types.int64, types.int64))
def read_group(table, scratch):  # type: ignore[no-untyped-def]
    """Read chunks until one was the last of its group, and return the group; -1 if no chunk is left
    to take. `scratch`, memory of this thread, has a block for what the system is asked and answers,
    then a chunk and the rest of its first and last block.
    """
    num_chunks = words_at(table)[NUM_CHUNKS]
    rows = table + 8 * HEADER
    groups = rows + 8 * ROW_SIZE * num_chunks
    while fetch(table + 8 * IS_STOPPED) == 0:
        taken = fetch_add(table + 8 * NEXT, 1)
        if taken >= num_chunks:
            break
        row = row_at(rows + 8 * ROW_SIZE * taken)
        group = groups + 8 * GROUP_SIZE * row.group
        if not _is_read(row, scratch):
            fetch_add(group + 8 * FAILED, 1)
        if fetch_add(group + 8 * LEFT, -1) == 1:
            return row.group
    return -1
