"""Arithmetic of PTX with bfloat16s, one or two in a register."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gpu.kernels.ptx_code import Instruction
from tests.gpu.kernels.ptx_memory import Lanes


def to_bf16(numbers: Lanes) -> Lanes:
    """To the nearest, ties to even."""
    bits = numbers.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), rounded).astype(np.uint16)


def of_bf16(program: Any, one: Instruction) -> Lanes:
    """add, mul and fma."""
    word = np.uint32 if one.name[-1] == "bf16x2" else np.uint16
    words = (program.get(each, word).view(np.uint16).astype(np.uint32) for each in one.operands[1:])
    a, b, *more = ((each << 16).view(np.float32) for each in words)
    found = a + b if one.name[0] == "add" else a * b + sum(more)
    return to_bf16(found.astype(np.float32)).view(word)
