"""What the threads of a warp do together: products of matrices, votes, shuffles, sums in shared
memory; for ptx.py. Layouts of the fragments are those of NVIDIA's PTX ISA 8.7, section 9.7.14.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.gpu.kernels.ptx_code import Instruction
from tests.gpu.kernels.ptx_memory import Lanes, Memory

WARP = 32
LANE = np.arange(WARP)


def ballot(program: Any, one: Instruction, dtype: Any) -> Lanes:
    """The bits of a warp's predicates."""
    votes = program.get(one.operands[1], np.bool_).reshape(-1, WARP)
    words = (votes << LANE.astype(np.uint64)).sum(axis=1, dtype=np.uint64)
    return np.repeat(words.astype(np.uint32), WARP)


def shuffle(program: Any, one: Instruction, dtype: Any) -> Lanes:
    """From another lane of the warp; up, from a lower one, or from itself."""
    number = program.get(one.operands[2], np.uint32).astype(np.int64)
    lane = program.lane
    kind = one.name[2]
    assert one.operands[3:] == ["0" if kind == "up" else "31", "-1"], one.text
    if kind == "up":
        lane = np.where(lane >= number, lane - number, lane)
    else:
        lane = {"bfly": lane ^ number, "idx": number % WARP}[kind]
    return np.asarray(program.get(one.operands[1], dtype)[program.warp * WARP + lane])


def atomic_add(program: Any, memory: Memory, one: Instruction, is_on: Lanes) -> None:
    """To words of shared memory, by whichever warps. What was there before is not looked at."""
    assert one.name == ["atom", "shared", "add", "u32"], one.text
    address = program.address_of(one.operands[1])[is_on]
    assert not (address % 4).any(), one.text
    memory.note_sum(address, program.warp[is_on])
    words = memory.content.view(np.uint32)
    np.add.at(words, (address - memory.start) // 4, program.get(one.operands[2], np.uint32)[is_on])


def product(program: Any, one: Instruction, is_on: Lanes) -> None:
    """mma of bfloat16: [16, 16] x [16, 8] + [16, 8], in float32."""
    assert is_on.all(), one.text
    assert one.name[3:] == ["m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"], one.text
    names = [re.findall(r"[^{},\s]+", operand) for operand in one.operands]
    num_warps = program.num_threads // WARP
    group, within = LANE // 4, LANE % 4
    halves = np.arange(2)
    left = np.zeros((num_warps, 16, 16), np.float32)
    for n, name in enumerate(names[1]):
        row = (group + 8 * (n % 2))[:, None]
        column = 2 * within[:, None] + halves + 8 * (n // 2)
        left[:, row, column] = _numbers(program, name)
    right = np.zeros((num_warps, 16, 8), np.float32)
    for n, name in enumerate(names[2]):
        right[:, 2 * within[:, None] + halves + 8 * n, group[:, None]] = _numbers(program, name)
    found = left.astype(np.float64) @ right
    for n, (to, source) in enumerate(zip(names[0], names[3], strict=True)):
        before = program.get(source, np.float32).reshape(num_warps, WARP)
        after = before + found[:, group + 8 * (n // 2), 2 * within + n % 2]
        program.put(to, after.astype(np.float32).reshape(-1), is_on)


def _numbers(program: Any, name: str) -> Lanes:
    """[warps, lanes, 2]: the two bfloat16s of a register, in float32."""
    halves = program.get(name, np.uint32).view(np.uint16).reshape(-1, WARP, 2)
    return (halves.astype(np.uint32) << 16).view(np.float32)
