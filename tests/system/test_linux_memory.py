"""Memory that is given back to Linux."""

from __future__ import annotations

import mmap

import pytest

from moe_infinity.system import linux
from moe_infinity.system.memory import address_of, give_back, zeroed_memory

HUGE = 2 << 20


@pytest.mark.skipif(not linux.is_linux(), reason="needs Linux")
def test_huge_pages_at_the_ends_are_split_before_pages_are_dropped(monkeypatch):
    memory = memoryview(zeroed_memory(6 * HUGE))
    memory[:] = b"x" * len(memory)
    start = address_of(memory)
    asked: list[tuple[int, int, int]] = []
    madvise = linux.libc().madvise

    class Noting:
        def madvise(self, address, num_bytes, advice):
            asked.append((advice, address, num_bytes))
            return madvise(address, num_bytes, advice)

    monkeypatch.setattr(linux, "libc", Noting)
    aligned = start + -start % HUGE
    first, end = aligned + HUGE // 2, aligned + 3 * HUGE + 3 * mmap.PAGESIZE
    give_back(first, end - first)
    assert asked == [
        (linux.MADV_COLD, first, aligned + HUGE - first),
        (linux.MADV_COLD, aligned + 3 * HUGE, end - aligned - 3 * HUGE),
        (mmap.MADV_DONTNEED, first, end - first),
    ]
    given = slice(first - start, end - start)
    assert bytes(memory[given]) == bytes(end - first)
    assert bytes(memory[: given.start]) == b"x" * given.start
    assert bytes(memory[given.stop :]) == b"x" * (len(memory) - given.stop)
    asked.clear()
    give_back(aligned, 2 * HUGE)  # whole ones need not be split
    assert [advice for advice, *_ in asked] == [mmap.MADV_DONTNEED]
    asked.clear()
    give_back(aligned + mmap.PAGESIZE, mmap.PAGESIZE)  # within one
    assert asked == [
        (linux.MADV_COLD, aligned + mmap.PAGESIZE, mmap.PAGESIZE),
        (mmap.MADV_DONTNEED, aligned + mmap.PAGESIZE, mmap.PAGESIZE),
    ]
