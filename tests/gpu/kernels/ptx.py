"""Runs what a kernel compiles to, PTX, without a GPU: the threads of a program in lockstep.

Triton's interpreter runs what a kernel says; this, what the compiler made of it: layouts, shuffles,
shared memory, constants. What a GPU would punish is an error here: a load beyond the memory that it
was given or of an unaligned address, two warps at one address without a barrier between them.

Only the instructions that our kernels compile to, for compute capability 8.0 and 9.0; what they do
is in NVIDIA's PTX ISA 8.7.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.gpu.kernels.ptx_bf16 import of_bf16, to_bf16
from tests.gpu.kernels.ptx_code import Instruction, code_of
from tests.gpu.kernels.ptx_memory import Lanes, Memory
from tests.gpu.kernels.ptx_warps import atomic_add, ballot, product, shuffle

WARP = 32
SHARED_BYTES = 100 << 10
MAX_STEPS = 1_000_000
NEVER_WRITTEN = 0xBAD0BAD0BAD0BAD0  # what a register has that only an unused operand names
DTYPES: dict[str, Any] = {
    f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}")
    for letter, kind in (("b", "u"), ("u", "u"), ("s", "i"))
    for bits in (8, 16, 32, 64)
} | {"f16": np.float16, "f32": np.float32, "f64": np.float64, "pred": np.bool_}


class Program:
    """One of the grid."""

    def __init__(self, at: tuple[int, ...], num_warps: int, globals_: Sequence[Memory]) -> None:
        self.num_threads = WARP * num_warps
        thread = np.arange(self.num_threads)
        self.warp, self.lane = thread // WARP, thread % WARP
        self.registers: dict[str, Lanes] = {"%tid.x": thread.astype(np.uint32)}
        for name, number in zip("xyz", (*at, 0, 0), strict=False):
            self.registers[f"%ctaid.{name}"] = np.full(self.num_threads, number, np.uint32)
        self.shared = Memory(np.zeros(SHARED_BYTES, np.uint8), 0)
        self.globals = globals_
        self.copies: list[list[Callable[[], None]]] = [[]]  # cp.async, by group; the last is open

    def run(self, ptx: str, arguments: Sequence[int]) -> None:
        """Threads that part wait for each other where the one that is behind comes to."""
        code, labels = code_of(ptx)
        at_T, num_steps = np.zeros(self.num_threads, np.int64), 0
        while (at := int(at_T.min())) < len(code):
            one, num_steps = code[at], num_steps + 1
            assert num_steps < MAX_STEPS, "does not end"
            is_here = at_T == at
            is_on = is_here
            if one.guard is not None:
                is_on = is_here & (self.registers[one.guard] != one.is_negated)
            at_T += is_here
            if one.name[0] in ("bra", "ret"):
                at_T[is_on] = labels[one.operands[0]] if one.name[0] == "bra" else len(code)
            elif one.name[:2] == ["ld", "param"]:
                index = int(re.findall(r"_param_(\d+)", one.operands[1])[0])
                number = arguments[index] % (1 << 64)
                self.put(one.operands[0], np.full(self.num_threads, number, np.uint64), is_on)
            else:
                with np.errstate(all="ignore"):
                    self.execute(one, is_on)

    # Operands

    def get(self, operand: str, dtype: Any) -> Lanes:
        """As so many bits of that type."""
        dtype = np.dtype(dtype)
        if operand in self.registers:
            bits = self.registers[operand]
            if dtype == np.bool_ or bits.dtype == np.bool_:
                return bits.astype(dtype)
            return bits.astype(f"u{dtype.itemsize}").view(dtype)
        if operand == "global_smem":
            number = 0
        elif float_bits := re.fullmatch(r"0[fd]([0-9A-F]+)", operand):
            number = int(float_bits[1], 16)
        elif operand.startswith("%r"):
            number = NEVER_WRITTEN
        else:
            number = int(operand.rstrip("U"), 0)
        if dtype == np.bool_:
            return np.full(self.num_threads, number != 0)
        bits = np.array(number % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}")
        return np.full(self.num_threads, bits).view(dtype)

    def put(self, operand: str, values: Lanes, is_on: Lanes) -> None:
        if operand.startswith("%p"):
            bits = values.astype(np.bool_)
        else:
            size = {"%rs": 2, "%rd": 8}.get(operand[:3], 4)
            if values.dtype.kind == "i" and values.dtype.itemsize < size:
                values = values.astype(f"i{size}")
            bits = values.view(f"u{values.dtype.itemsize}").astype(f"u{size}")
        before = self.registers.get(operand, np.zeros_like(bits))
        self.registers[operand] = np.where(is_on, bits, before)

    # Memory

    def access(self, one: Instruction, is_on: Lanes) -> None:
        """ld and st, of one or more numbers."""
        space, dtype = one.name[1], DTYPES[one.name[-1]]
        where, what = one.operands[:2] if one.name[0] == "st" else one.operands[1::-1]
        address = self.address_of(where)[is_on]
        names = re.findall(r"[^{},\s]+", what)
        if not is_on.any():
            return
        assert not (address % (len(names) * dtype.itemsize)).any(), f"not aligned: {one.text}"
        memory = self.shared if space == "shared" else self.global_at(address, one)
        is_store = one.name[0] == "st"
        for n, name in enumerate(names):
            at = memory.at(
                address + n * dtype.itemsize, self.warp[is_on], dtype.itemsize, writes=is_store
            )
            if is_store:
                memory.put(at, self.get(name, dtype)[is_on], self.warp[is_on])
            else:
                found = np.zeros(self.num_threads, dtype)
                found[is_on] = np.ascontiguousarray(memory.content[at]).view(dtype)[:, 0]
                self.put(name, found, is_on)

    def copy(self, one: Instruction, is_on: Lanes) -> None:
        """cp.async: as late as it may be, when its group is waited for."""
        if one.name[2] == "commit_group":
            self.copies.append([])
        elif one.name[2] == "wait_group":
            kept = int(one.operands[0], 0)
            while len(self.copies) - 1 > kept:
                for copy in self.copies.pop(0):
                    copy()
        else:
            (to, start), size = map(self.address_of, one.operands[:2]), int(one.operands[2], 0)
            given = self.get(one.operands[3], np.uint32) if len(one.operands) > 3 else size + 0 * to
            self.copies[-1].append(partial(self.copied, one, to, start, size, given * is_on, is_on))

    def copied(
        self, one: Instruction, to: Lanes, start: Lanes, size: int, given: Lanes, is_on: Lanes
    ) -> None:
        """What is not given is 0."""
        content = np.zeros((self.num_threads, size), np.uint8)
        if (some := given > 0).any():
            assert set(given[some].tolist()) == {size}, one.text
            memory = self.global_at(start[some], one)
            content[some] = memory.content[
                memory.at(start[some], self.warp[some], size, writes=False)
            ]
        assert not (to % size)[is_on].any(), one.text
        assert not (start % size)[some].any(), one.text
        at = self.shared.at(to[is_on], self.warp[is_on], size, writes=True)
        self.shared.put(at, content[is_on], self.warp[is_on])

    def address_of(self, operand: str) -> Lanes:
        base, _, offset = operand.strip("[] ").partition("+")
        dtype = np.int64 if base.startswith("%rd") else np.int32
        return self.get(base.strip(), dtype).astype(np.int64) + int(offset or 0)

    def global_at(self, address: Lanes, one: Instruction) -> Memory:
        """The one that all of these are in."""
        low, high = int(address.min()), int(address.max())
        for memory in self.globals:
            if memory.start <= low and high < memory.start + len(memory.content):
                return memory
        raise AssertionError(f"no memory at {low:#x} to {high:#x}: {one.text}")

    def matrices(self, one: Instruction, is_on: Lanes) -> None:
        """ldmatrix and stmatrix: of 8 rows of 8 numbers, each thread has two neighbours in a row;
        transposed, in a column.
        """
        assert is_on.all(), one.text
        is_store = one.name[0] == "stmatrix"
        where, what = one.operands if is_store else one.operands[::-1]
        address = self.address_of(where)
        for n, name in enumerate(re.findall(r"%\w+", what)):
            halves = np.zeros((self.num_threads, 2), np.uint16)
            if is_store:
                halves = self.get(name, np.uint32).view(np.uint16).reshape(halves.shape).copy()
            for half in (0, 1):
                row, column = self.lane // 4, 2 * (self.lane % 4) + half
                if "trans" in one.name:
                    row, column = column, row
                place = address[self.warp * WARP + 8 * n + row] + 2 * column
                at = self.shared.at(place, self.warp, 2, writes=is_store)
                if is_store:
                    self.shared.put(at, np.ascontiguousarray(halves[:, half]), self.warp)
                else:
                    found = np.ascontiguousarray(self.shared.content[at])
                    halves[:, half] = found.view(np.uint16)[:, 0]
            if not is_store:
                self.put(name, halves.view(np.uint32)[:, 0], is_on)

    # Everything else

    def execute(self, one: Instruction, is_on: Lanes) -> None:
        name, kind = one.name[0], one.name[-1]
        if name in ("ld", "st"):
            self.access(one, is_on)
        elif name == "bar":
            if one.name[1] == "sync":  # not one of each warp for itself
                assert is_on.all(), f"some threads never come: {one.text}"
                for memory in (self.shared, *self.globals):
                    memory.forget()
        elif name == "createpolicy":
            return  # of caches
        elif name == "cp":
            self.copy(one, is_on)
        elif name in ("ldmatrix", "stmatrix"):
            self.matrices(one, is_on)
        elif name == "mma":
            product(self, one, is_on)
        elif kind in ("bf16", "bf16x2") and name in ("add", "mul", "fma"):
            self.put(one.operands[0], of_bf16(self, one), is_on)
        elif name == "atom":
            atomic_add(self, self.shared, one, is_on)
        elif name == "mov" and "{" in one.text:
            self.split_or_join(one, is_on)
        elif name == "cvt":
            self.put(one.operands[0], self.converted(one), is_on)
        elif name == "redux":
            numbers = self.get(one.operands[1], DTYPES[kind]).reshape(-1, WARP)
            ufunc = {"add": np.add, "max": np.maximum, "min": np.minimum}[one.name[2]]
            found = ufunc.reduce(numbers, axis=1, keepdims=True, dtype=numbers.dtype)
            self.put(one.operands[0], np.broadcast_to(found, numbers.shape).reshape(-1), is_on)
        else:
            assert kind.removesuffix("x2") in DTYPES, f"unknown: {one.text}"
            assert name in FUNCTIONS, f"unknown: {one.text}"
            if kind.endswith("x2"):
                self.put(one.operands[0], both_halves(self, one), is_on)
                return
            self.put(one.operands[0], FUNCTIONS[name](self, one, np.dtype(DTYPES[kind])), is_on)

    def split_or_join(self, one: Instruction, is_on: Lanes) -> None:
        to, source = one.operands
        size = DTYPES[one.name[1]].itemsize
        names = re.findall(r"[^{},\s]+", to if "{" in to else source)
        part = f"u{size // len(names)}"
        if "{" in to:
            parts = self.get(source, f"u{size}").view(part).reshape(self.num_threads, -1)
            for n, each in enumerate(names):
                self.put(each, np.ascontiguousarray(parts[:, n]), is_on)
        else:
            joined = np.stack([self.get(each, part) for each in names], 1)
            self.put(to, np.ascontiguousarray(joined).view(f"u{size}")[:, 0], is_on)

    def converted(self, one: Instruction) -> Lanes:
        *_, to, source = one.name
        if to.endswith("x2"):
            both = [self.get(each, np.float32) for each in one.operands[1:]]
            halves = map(to_bf16, both) if to == "bf16x2" else (n.astype(np.float16) for n in both)
            upper, lower = (each.view(np.uint16).astype(np.uint32) for each in halves)
            return upper << 16 | lower
        if source == "bf16":
            return (self.get(one.operands[1], np.uint16).astype(np.uint32) << 16).view(np.float32)
        numbers = self.get(one.operands[1], DTYPES[source])
        return to_bf16(numbers) if to == "bf16" else numbers.astype(DTYPES[to])


def numbers_of(program: Program, one: Instruction, dtype: Any) -> list[Lanes]:
    found = [program.get(operand, dtype) for operand in one.operands[1:]]
    return [without_denormals(each) for each in found] if "ftz" in one.name else found


def without_denormals(numbers: Lanes) -> Lanes:
    return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, 0, numbers).astype(np.float32)


def plain(function: Callable[..., Lanes]) -> Callable[..., Lanes]:
    """Of numbers of one type."""

    def call(program: Program, one: Instruction, dtype: Any) -> Lanes:
        found = function(*numbers_of(program, one, dtype))
        return without_denormals(found) if "ftz" in one.name else found

    return call


def both_halves(program: Program, one: Instruction) -> Lanes:
    """Of words that are two numbers each."""
    dtype = DTYPES[one.name[-1].removesuffix("x2")]
    ufunc = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[one.name[0]]
    a, b = (program.get(operand, np.uint32).view(dtype) for operand in one.operands[1:])
    return np.asarray(ufunc(a, b)).astype(dtype).view(np.uint32)


def least(program: Program, one: Instruction, dtype: Any) -> Lanes:
    """min and max."""
    a, b = numbers_of(program, one, dtype)
    passes_nan = dtype.kind != "f" or "NaN" in one.name
    ufuncs = (np.minimum, np.fmin) if one.name[0] == "min" else (np.maximum, np.fmax)
    if "xorsign" not in one.name:
        return np.asarray(ufuncs[not passes_nan](a, b))
    found = ufuncs[not passes_nan](np.abs(a), np.abs(b))
    return np.asarray(np.where(np.signbit(a) ^ np.signbit(b), -found, found))


def rounded_once(one: Instruction, a: Lanes, b: Lanes, *more: Lanes) -> Lanes:
    wide = a.astype(np.float64 if a.dtype == np.float32 else np.longdouble)
    found = (wide * b + sum(more)).astype(a.dtype)
    return without_denormals(found) if "ftz" in one.name else found


def multiply(program: Program, one: Instruction, dtype: Any) -> Lanes:
    """mul, mad and fma: integers wide or a half of them, floats rounded once."""
    if dtype.kind == "f":
        return rounded_once(one, *numbers_of(program, one, dtype)).astype(dtype)
    first, second, *more = one.operands[1:]
    a, b = program.get(first, dtype), program.get(second, dtype)
    result = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if "wide" in one.name else dtype
    if one.name[1] == "hi":
        return (a.astype(np.int64) * b >> 8 * dtype.itemsize).astype(dtype)
    product = a.astype(result) * b.astype(result)
    for third in more:
        product = product + program.get(third, result)
    return product


def shift(program: Program, one: Instruction, dtype: Any) -> Lanes:
    """By as many bits as there are where it is more."""
    numbers, amounts = program.get(one.operands[1], dtype), program.get(one.operands[2], np.uint32)
    bits = 8 * dtype.itemsize
    inside = np.minimum(amounts, bits - 1).astype(dtype)
    if one.name[0] == "shl":
        return np.where(amounts < bits, numbers << inside, 0).astype(dtype)
    beyond = numbers >> (bits - 1) if dtype.kind == "i" else np.zeros_like(numbers)
    return np.where(amounts < bits, numbers >> inside, beyond).astype(dtype)


def bit_field(program: Program, one: Instruction, dtype: Any) -> Lanes:
    """bfe, with a place and a length that are known."""
    numbers = program.get(one.operands[1], np.uint32).astype(np.int64)
    place, length = (int(operand) for operand in one.operands[2:])
    found = numbers >> place & (1 << length) - 1
    if dtype.kind == "i":
        found -= (found >> length - 1) << length
    return found.astype(dtype)


def permute(program: Program, one: Instruction, dtype: Any) -> Lanes:
    """prmt: each byte is one of eight, or the sign of one in all its bits."""
    low, high, selector = (program.get(operand, np.uint32) for operand in one.operands[1:])
    both = (high.astype(np.uint64) << np.uint64(32) | low).view(np.uint8).reshape(-1, 8)
    picks = np.stack([selector >> 4 * n & 15 for n in range(4)], 1)
    picked = np.take_along_axis(both, picks.astype(np.int64) % 8, axis=1)
    picked = np.where(picks < 8, picked, np.where(picked < 128, 0, 255)).astype(np.uint8)
    return np.ascontiguousarray(picked).view(np.uint32)[:, 0]


def compare(program: Program, one: Instruction, dtype: Any) -> Lanes:
    a, b = (program.get(operand, dtype) for operand in one.operands[1:])
    test = one.name[1]
    if dtype.kind == "f" and test.endswith("u"):  # or unordered
        return np.asarray(COMPARE[test[:-1]](a, b) | np.isnan(a) | np.isnan(b))
    return np.asarray(COMPARE[test](a, b))


def select(program: Program, one: Instruction, dtype: Any) -> Lanes:
    a, b = (program.get(operand, dtype) for operand in one.operands[1:3])
    return np.where(program.get(one.operands[3], np.bool_), a, b)


COMPARE: dict[str, Callable[[Lanes, Lanes], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Lanes]] = {
    "mov": plain(lambda a: a),
    "add": plain(np.add), "sub": plain(np.subtract), "neg": plain(np.negative),
    "abs": plain(np.abs), "min": least, "max": least,
    "and": plain(np.bitwise_and), "or": plain(np.bitwise_or), "xor": plain(np.bitwise_xor),
    "not": plain(np.invert), "ex2": plain(np.exp2), "rcp": plain(lambda a: 1 / a),
    "rsqrt": plain(lambda a: (1 / np.sqrt(a)).astype(a.dtype)),
    "div": plain(lambda a, b: (a.astype(np.float64) / b).astype(a.dtype)),
    "mul": multiply, "mad": multiply, "fma": multiply,
    "shl": shift, "shr": shift, "bfe": bit_field, "prmt": permute,
    "setp": compare, "selp": select, "shfl": shuffle, "vote": ballot,
    "popc": plain(lambda a: np.bitwise_count(a).astype(a.dtype)),
}  # fmt: skip
