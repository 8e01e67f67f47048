"""Packs a key or a value into a row of a cache, in machine code: the bytes of kernels/kv_rows.py,
which is the reference. And how the rows are read: as those of a weight with a scale each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.kernels.cpu.steps import InnerLoop, KernelArguments, arguments_for
from moe_infinity.kernels.cpu.vectors import F32, I8, I32, LANES, float_at, put_float
from moe_infinity.kernels.kv_rows import LARGEST, LEAST_SCALE, SCALE_BYTES

PACKINGS = ("", *LARGEST)  # of a cache, by the number that machine code has for it; "": not packed
INT8 = PACKINGS.index("int8")
LARGEST_INT8 = LARGEST["int8"]
LARGEST_FP8 = LARGEST["fp8"]
LEAST_NORMAL = 2.0**-6  # of float8_e4m3fn; below it numbers are multiples of 2 ** -9


def row_loop(kv_dtype: str, width: int) -> InnerLoop | None:
    """The loop over the codes of a row. None if no number of vectors fills it."""
    sizes = (num for num in (8, 4, 2, 1) if width % (num * LANES) == 0)
    num_vectors = next(sizes, None)
    return None if num_vectors is None else InnerLoop(kv_dtype, num_vectors, 1, "float32", False)


def row_arguments(loop: InnerLoop, width: int) -> KernelArguments:
    """The arguments for rows as those of a weight, from the first row on."""
    row_bytes = width + SCALE_BYTES
    arguments = arguments_for(loop, (1, width), (1, width), num_scale_rows=1)
    return arguments._replace(scales=width, row_bytes=row_bytes, scales_bytes=row_bytes)


@intrinsic  # type: ignore[untyped-decorator]
def _put_int8(_: Any, address: Any, index: Any, value: Any) -> Any:
    """Rounds to nearest, ties to even."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        kind = ir.FunctionType(F32, [F32])
        nearest = cgutils.get_or_insert_function(b.module, kind, "llvm.nearbyint.f32")
        code = b.trunc(b.fptosi(b.call(nearest, [args[2]]), I32), I8)
        b.store(code, b.inttoptr(b.add(args[0], args[1]), I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic  # type: ignore[untyped-decorator]
def _put_float8(_: Any, address: Any, index: Any, value: Any) -> Any:
    """Rounds to nearest, ties to even, a number of at most 448 and a little."""

    def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
        bits = b.bitcast(args[2], I32)
        sign = b.and_(b.lshr(bits, I32(24)), I32(0x80))
        size = b.and_(bits, I32(0x7FFFFFFF))
        half = b.add(I32(0x7FFFF), b.and_(b.lshr(size, I32(20)), I32(1)))
        normal = b.sub(b.lshr(b.add(size, half), I32(20)), I32(120 << 3))
        kind = ir.FunctionType(F32, [F32])
        nearest = cgutils.get_or_insert_function(b.module, kind, "llvm.nearbyint.f32")
        units = b.fmul(b.bitcast(size, F32), F32(2.0**9))
        small = b.fptosi(b.call(nearest, [units]), I32)
        is_small = b.fcmp_ordered("<", b.bitcast(size, F32), F32(LEAST_NORMAL))
        code = b.trunc(b.or_(sign, b.select(is_small, small, normal)), I8)
        b.store(code, b.inttoptr(b.add(args[0], args[1]), I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@njit(nogil=True)
def put_row(at, count, to, packing):  # type: ignore[no-untyped-def]
    """Pack `count` float32 at one address into a row at another; `packing` is that of PACKINGS."""
    largest = types.float32(0)
    for i in range(count):
        size = abs(float_at(at, i))
        if size > largest or size != size:  # NaN stays, as nothing is larger
            largest = size
    scale = largest / types.float32(LARGEST_INT8 if packing == INT8 else LARGEST_FP8)
    if scale < types.float32(LEAST_SCALE):
        scale = types.float32(LEAST_SCALE)
    for i in range(count):
        unit = float_at(at, i) / scale
        if packing == INT8:
            _put_int8(to, i, unit)
        else:
            _put_float8(to, i, unit)
    put_float(to + count, 0, scale)
