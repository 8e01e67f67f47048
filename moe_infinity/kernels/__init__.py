"""Kernels, and a plain reference of each."""

from importlib.util import find_spec

import torch


def host_float32(*shape: int) -> torch.Tensor:
    """New memory for kernels of the CPU, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def has_triton_kernels() -> bool:
    """Whether triton_*.py can be imported: triton comes with torch's CUDA builds for Linux."""
    return find_spec("triton") is not None
