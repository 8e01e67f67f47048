"""How stored values of each kind become vectors of float32. A kernel of the CPU needs this and the
WeightLayout. Kinds that are stored column by column are read by words.py instead, those whose
scales lie among the values by blocks.py.

A loader may leave out a factor that all values share: x is multiplied by it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from moe_infinity.kernels.cpu.blocks import BLOCK_KINDS, BlockKind
from moe_infinity.kernels.cpu.vectors import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    LANES,
    all_lanes,
    from_bfloat,
    from_half,
    load,
    nibbles_of,
    vector_of,
)
from moe_infinity.kernels.unpack import BLOCKS
from moe_infinity.layout import NIBBLES, WORDS

# (builder, number of vectors, address of the first value) -> those vectors, each when asked for:
# then few registers hold values that wait for their use
LoadValues = Callable[[Any, int, Any], Iterable[Any]]


class ValueLoader(NamedTuple):
    """How the values of one kind are loaded."""

    bits: float  # of a value, with its share of scales that lie among the values
    num_vectors: tuple[int, ...]  # that one call may load; the most that fit a row are taken
    load: LoadValues
    left_out: float = 1.0
    short_groups: tuple[int, ...] = ()  # columns that share a scale, fewer than one call loads
    columns_per_lane: int = 1  # neighbouring columns that lie in one lane of neighbouring vectors
    subtracts_zero: bool = False  # values are unsigned; their zero point is subtracted later
    blocks: BlockKind | None = None  # scales lie among the values; `load` is not called


def _int4(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    yield from nibbles_of(b, load(b, at, 0, I32))


def _mxfp4(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    """Moves the sign to bit 15, the others to bits 9-11: a float16 / 2 ** 14."""
    halves = load(b, at, 0, I16)
    for k in range(num_vectors):
        top = b.ashr(b.shl(halves, all_lanes(I16, 12 - 4 * k)), all_lanes(I16, 3))
        yield from_half(b, b.and_(top, all_lanes(I16, 0x8E00)))


def _int8(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    for k in range(num_vectors):
        yield b.sitofp(b.sext(load(b, at, k * LANES, I8), vector_of(I32)), FLOATS)


def _fp8(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    """As the bits of a float16, which is the value / 2 ** 8."""
    for k in range(num_vectors):
        halves = b.shl(b.sext(load(b, at, k * LANES, I8), vector_of(I16)), all_lanes(I16, 7))
        yield from_half(b, b.and_(halves, all_lanes(I16, 0xBF80)))


def _bf16(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    for k in range(num_vectors):
        yield from_bfloat(b, load(b, at, 2 * LANES * k, I16))


def _f16(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    for k in range(num_vectors):
        yield from_half(b, load(b, at, 2 * LANES * k, I16))


def _f32(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    for k in range(num_vectors):
        yield load(b, at, 4 * LANES * k, F32)


def _none(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    raise AssertionError("words.py or blocks.py has the inner loop of this kind")


def _block_loader(kind: str) -> ValueLoader:
    num_weights, num_bytes = BLOCKS[kind.removeprefix("ggml_")]
    num_vectors = (8, 4, 2) if kind == "q8_0" else (max(8, num_weights // LANES),)
    blocks = BLOCK_KINDS[kind]
    return ValueLoader(
        8 * num_bytes / num_weights, num_vectors, _none,
        subtracts_zero=blocks.sum_width > 0, blocks=blocks,
    )  # fmt: skip


LOADERS = {
    "int4": ValueLoader(
        4, (NIBBLES,), _int4, short_groups=(32, 64), columns_per_lane=8, subtracts_zero=True
    ),
    "mxfp4": ValueLoader(4, (4,), _mxfp4, left_out=2.0**14, short_groups=(32,), columns_per_lane=4),
    "int8": ValueLoader(8, (8, 4, 2), _int8),
    "fp8": ValueLoader(8, (8, 4, 2), _fp8, left_out=2.0**8),
    "bf16": ValueLoader(16, (4, 2, 1), _bf16),
    "f16": ValueLoader(16, (4, 2, 1), _f16),
    "f32": ValueLoader(32, (4, 2, 1), _f32),
    **{kind: ValueLoader(4, (), _none, subtracts_zero=True) for kind in WORDS},
    **{kind: _block_loader(kind) for kind in BLOCK_KINDS},
}
