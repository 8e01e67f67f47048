"""Kernels as they are compiled for a GPU that need not be there, launched without one by ptx.py.
`make test-compiled` uses it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.gpu.kernels.ptx import Program
from tests.gpu.kernels.ptx_memory import Memory


class AbsentGpu:
    """For Triton's driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launcher:
    """Kernels see the tensors that they are given, and those that somebody asked for an address."""

    def __init__(self) -> None:
        self._asked: dict[int, torch.UntypedStorage] = {}
        self._data_ptr = data_ptr = Tensor.data_ptr

        def watched(tensor: Tensor) -> int:
            storage = tensor.untyped_storage()
            self._asked[storage.data_ptr()] = storage  # kept, as others remember the address
            return data_ptr(tensor)

        Tensor.data_ptr = watched  # type: ignore[assignment, method-assign]

    def change(self, ptx: str) -> str:
        """For tests to replace."""
        return ptx

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            asked = {at: storage.nbytes() for at, storage in self._asked.items()}
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            kinds = compiled.src.signature
            given = dict(zip(kernel.arg_names, args, strict=False)) | options
            kept = [given[name] for name in kernel.arg_names if kinds[name] != "constexpr"]
            tensors = [each for each in kept if isinstance(each, Tensor)]
            sizes = {self._data_ptr(t): bytes_of(t) for t in tensors}
            memories = [memory_at(*place) for place in (sizes | asked).items()]
            numbers = [self._data_ptr(t) if isinstance(t, Tensor) else bits_of(t) for t in kept]
            ptx = self.change(compiled.asm["ptx"])
            for at in itertools.product(*map(range, grid)):
                for memory in memories:
                    memory.forget()
                program = Program(at, compiled.metadata.num_warps, memories)
                program.run(ptx, [*numbers, 0, 0])  # and two scratch memories

        return run


def bits_of(number: int | float) -> int:
    """Kernels take floats in float32."""
    if isinstance(number, float):
        return int(np.float32(number).view(np.uint32))
    return number


def bytes_of(tensor: Tensor) -> int:
    """From its first number to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def memory_at(address: int, num_bytes: int) -> Memory:
    place = (ctypes.c_uint8 * num_bytes).from_address(address)
    return Memory(np.ctypeslib.as_array(place), address)


def use_absent_gpu(capability: int) -> None:
    """For good: in a process of its own."""
    launcher = Launcher()
    driver.set_active(AbsentGpu(capability))
    JITFunction.__getitem__ = lambda kernel, grid: launcher.launch(kernel, grid)
