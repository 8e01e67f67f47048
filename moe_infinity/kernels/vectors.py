"""Vectors of 16 lanes in LLVM's terms, for the inner loops of packed_rows.py and packed_words.py.

Only what LLVM can give every processor; `b` builds the code of a function, values are its values.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16  # float32 values of a vector; LLVM splits them where the machine has narrower ones
NIBBLES = 8  # in a word

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))


def vector_of(kind: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(kind, lanes)


FLOATS = vector_of(F32)


def all_lanes(kind: Any, value: float, lanes: int = LANES) -> Any:
    return ir.Constant(vector_of(kind, lanes), [value] * lanes)


def load(b: Any, at: Any, offset: int, kind: Any, lanes: int = LANES) -> Any:
    pointer = b.inttoptr(b.add(at, I64(offset)), vector_of(kind, lanes).as_pointer())
    return b.load(pointer, align=1)


def spread(b: Any, vector: Any) -> Any:
    """Each element over as many lanes as it is for."""
    count = vector.type.count
    lanes = [lane * count // LANES for lane in range(LANES)]
    return b.shuffle_vector(vector, vector, ir.Constant(vector_of(I32), lanes))


def repeated(b: Any, value: Any) -> Any:
    one = b.insert_element(ir.Constant(vector_of(value.type, 1), None), value, I32(0))
    return spread(b, one)


def from_half(b: Any, bits: Any) -> Any:
    return b.fpext(b.bitcast(bits, vector_of(ir.HalfType())), FLOATS)


def nibbles_of(b: Any, words: Any) -> list[Any]:
    """Of every lane the 8, in float32: nibble k times 16 ** k where it is masked without a shift,
    which is for all but the last.
    """
    masked = [b.and_(words, all_lanes(I32, 15 << 4 * k)) for k in range(NIBBLES - 1)]
    return [b.sitofp(m, FLOATS) for m in (*masked, b.lshr(words, all_lanes(I32, 28)))]


def smaller(b: Any, one: Any, other: Any) -> Any:
    return b.select(b.icmp_signed("<", one, other), one, other)


def fma(b: Any, one: Any, other: Any, addend: Any) -> Any:
    return _call(b, "llvm.fma.v16f32", FLOATS, [one, other, addend])


def sum_of_lanes(b: Any, vector: Any) -> Any:
    return _call(b, "llvm.vector.reduce.fadd.v16f32", F32, [F32(-0.0), vector], ("reassoc",))


def prefetch(b: Any, at: Any) -> None:
    pointer = b.inttoptr(at, I8.as_pointer())
    _call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(3), I32(1)])


def _call(b: Any, name: str, result: Any, args: list[Any], fastmath: tuple[str, ...] = ()) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args, fastmath=fastmath)
