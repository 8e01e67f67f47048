"""Kernels, and a plain reference of each."""

import torch


def host_float32(*shape: int) -> torch.Tensor:
    """New memory for kernels of the CPU, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")
