"""Memory of a test that measures what a pass takes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

ELSEWHERE_BYTES = 16 << 20  # heaps of threads
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h; it grows to 32 MiB while a process runs


@pytest.fixture
def pages_for_each_block() -> Iterator[None]:
    """Each large block gets pages of its own, which go back as soon as it is freed.

    Else the peak depends on the gaps that earlier tests left in the heap: 153 to 232 MB were seen
    for one pass. SAFETY is there for such gaps; this is a test of the formula.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        pytest.skip("no glibc, whose heap has this option")
    set_option(M_MMAP_THRESHOLD, 128 << 10)
    yield
    set_option(M_MMAP_THRESHOLD, 32 << 20)
