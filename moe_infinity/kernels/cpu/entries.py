"""Entries of the tables of GGML's types IQ1 to IQ3: 8 or 4 neighbouring weights of a few values.
The blocks of grids.py have numbers of such entries.

Tables are those of the `gguf` package, and become constants of the compiled code. If the processor
multiplies bytes, weights are bytes to which a number is added so that none, nor its negative, is
below zero. Otherwise they are numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from moe_infinity.kernels.cpu.compiler import permutes_bytes
from moe_infinity.kernels.cpu.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    all_lanes,
    call,
    joined,
    load,
    look_up,
    number_at,
    pick,
    store,
    vector_of,
)

NUM_BYTES = 64  # of a vector
WORDS = vector_of(I16, 32)
MOST_FLOAT_BYTES = 32 << 10
MOST_ENTRIES = 512  # of a table in registers: choosing from 1,024 takes longer than reading memory


class Entries(NamedTuple):
    """The entries of one block, in memory: a table, and places in it."""

    table: Any  # address; of float32, or of bytes
    places: Any  # address of an int16 for each entry: bytes from the table's start
    width: int  # weights of an entry
    is_signed: bool = False  # bytes of numbers

    def bytes_of(self, b: Any, entries: Iterable[int]) -> Any:
        """The weights of as many of the block's entries as fill a vector of bytes."""
        kind = {4: F32, 8: ir.DoubleType()}[self.width]  # integers would take a detour
        found = vector_of(kind, NUM_BYTES // self.width)(ir.Undefined)
        for lane, entry in enumerate(entries):
            place = b.add(self.table, b.zext(number_at(b, self.places, 2 * entry, I16), I64))
            found = b.insert_element(found, number_at(b, place, 0, kind), I32(lane))
        return b.bitcast(found, vector_of(I8, NUM_BYTES))

    def eight(self, b: Any, index: int) -> Any:
        """The weights of a block from 8 x `index` on, in float32."""
        kind = I8 if self.is_signed else F32
        found = []
        for number in range(index * 8 // self.width, (index + 1) * 8 // self.width):
            place = b.zext(number_at(b, self.places, 2 * number, I16), I64)
            found.append(load(b, b.add(self.table, place), 0, kind, self.width))
        weights = joined(b, found)
        if kind == F32:
            return weights
        return b.sitofp(b.sext(weights, vector_of(I32, 8)), vector_of(F32, 8))


class CodedEntries(NamedTuple):
    """The entries of one block, in registers: 16 bits for each, which are the numbers of its
    weights' values.
    """

    codes: Any  # int16
    values: tuple[int, ...]  # at most 4 for entries of 8 weights, 16 for those of 4
    width: int

    def bytes_of(self, b: Any, entries: Iterable[int]) -> Any:
        """The weights of as many of the block's entries as fill a vector."""
        num_bits = 16 // self.width
        copies = self.width // 2  # so each weight has its number in its own 64 bits
        words = pick(b, self.codes, [entry for entry in entries for _ in range(copies)])
        shifts = [
            16 * copies * (byte // self.width) + num_bits * (byte % self.width)
            for byte in [*range(8)] * 8
        ]
        args = [ir.Constant(vector_of(I8, NUM_BYTES), shifts), b.bitcast(words, vector_of(I8, 64))]
        numbers = call(b, "llvm.x86.avx512.pmultishift.qb.512", args[0].type, args)
        numbers = b.and_(numbers, all_lanes(I8, (1 << num_bits) - 1, NUM_BYTES))
        table = (*self.values, *[0] * ((1 << num_bits) - len(self.values)))
        values = look_up(b, table * (16 // len(table)), b.bitcast(numbers, vector_of(I32)))
        return b.bitcast(values, numbers.type)


def grid(name: str) -> NDArray[np.int64]:
    """[entries, weights]: the table of a type."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    found: NDArray[np.float32] = kind.grid.reshape(kind.grid_shape)
    return found.astype(np.int64)


def bytes_of_entries(b: Any, name: str, table: NDArray[np.int64], numbers: Any) -> Any:
    """The entries that have these numbers, int16, of a table of bytes. The name is that of the
    table in the compiled code.
    """
    num_entries, width = table.shape
    values, value_numbers = np.unique(table, return_inverse=True)
    if not permutes_bytes() or num_entries > MOST_ENTRIES:
        return _in_memory(b, name, table.astype(np.uint8), numbers)
    shifts = 16 // width * np.arange(width)
    codes = (value_numbers.reshape(table.shape) << shifts).sum(axis=1)
    chosen = [
        _chosen(b, codes, pick(b, numbers, range(first, first + 32)))
        for first in range(0, numbers.type.count, 32)
    ]
    return CodedEntries(joined(b, chosen), tuple(values.tolist()), width)


def numbers_of_entries(b: Any, name: str, table: NDArray[np.int64], numbers: Any) -> Entries:
    """The same of a table of numbers. They are float32 as long as the first cache holds the table:
    AVX2 takes several instructions to widen bytes.
    """
    is_small = 4 * table.size <= MOST_FLOAT_BYTES
    return _in_memory(b, name, table.astype(np.float32 if is_small else np.int8), numbers)


def _in_memory(b: Any, name: str, table: NDArray[Any], numbers: Any) -> Entries:
    entry_bytes = table[0].nbytes
    shift = all_lanes(I16, entry_bytes.bit_length() - 1, numbers.type.count)
    places = on_stack(b, b.shl(numbers, shift))
    return Entries(_address(b, name, table), places, table.shape[1], table.dtype == np.int8)


def _chosen(b: Any, codes: NDArray[np.int64], numbers: Any) -> Any:
    """Codes of these numbers. One instruction chooses among 64."""
    found = []
    for first in range(0, len(codes), 64):
        low, high = (ir.Constant(WORDS, codes[k : k + 32].tolist()) for k in (first, first + 32))
        found.append(call(b, "llvm.x86.avx512.vpermi2var.hi.512", WORDS, [low, numbers, high]))
    bit = 64
    while len(found) > 1:
        is_set = b.icmp_signed("!=", b.and_(numbers, all_lanes(I16, bit, 32)), WORDS(None))
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [b.select(is_set, upper, lower) for lower, upper in pairs]
        bit *= 2
    return found[0]


def _address(b: Any, name: str, table: NDArray[Any]) -> Any:
    name = f"moe_infinity_{name}"
    constant = b.module.globals.get(name)
    if constant is None:
        kind = ir.ArrayType(I8, table.nbytes)
        constant = ir.GlobalVariable(b.module, kind, name)
        constant.initializer = ir.Constant(kind, bytearray(table.tobytes()))
        constant.global_constant = True
        constant.linkage = "internal"
        constant.align = 64
    return b.ptrtoint(constant, I64)


def on_stack(b: Any, vector: Any) -> Any:
    """Store a vector, and return the address."""
    with b.goto_entry_block():
        memory = b.alloca(vector.type)
    at = b.ptrtoint(memory, I64)
    store(b, vector, at)
    return at
