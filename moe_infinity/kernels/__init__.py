"""Kernels, a plain reference of each, and memory for them."""

import torch

from moe_infinity.system.memory import HUGE_PAGE_BYTES, huge_pages


def host_float32(*shape: int) -> torch.Tensor:
    """New memory for kernels of the CPU, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def uint8_memory(num_bytes: int) -> torch.Tensor:
    """New memory for weights, in huge pages if it pays: products with one row read small pages at
    38 GB/s, huge ones at 43.
    """
    if num_bytes >= HUGE_PAGE_BYTES:
        return torch.frombuffer(huge_pages(num_bytes), dtype=torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
