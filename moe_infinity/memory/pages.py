"""Memory in huge pages, for buffers that the disk writes to."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_infinity.system.memory import zeroed_memory

# Reading from disk into huge pages takes the operating system 0.01-0.05 s of CPU time per GB, into
# small ones 0.04-0.11: it has fewer pages to look up and fewer segments to hand to the device.
HUGE_PAGE_BYTES = 2 << 20


def huge_pages(num_bytes: int) -> memoryview:
    """Zeroed memory that begins at a huge page, in huge pages if the system has any to give.

    Raises OSError, OverflowError or ValueError if there is not enough memory.
    """
    whole = memoryview(zeroed_memory(num_bytes + HUGE_PAGE_BYTES))  # keeps the mapping alive
    start = -address_of(whole) % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def uint8_memory(num_bytes: int) -> Tensor:
    """uint8, in huge pages if it pays: products with one row read small pages at 38 GB/s, huge ones
    at 43.
    """
    if num_bytes >= HUGE_PAGE_BYTES:
        return torch.frombuffer(huge_pages(num_bytes), dtype=torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
