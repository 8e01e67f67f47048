"""How stored values are read: a product runs along the columns of a weight in steps, and a loader
makes vectors of float32 of the values of a step. rows.py and words.py have the machine code; the
order of the values decides how x is arranged (arrangement.py).

A step is `num_vectors` vectors of LANES columns. For WORDS, which are stored column by column, a
step is a group. The last step of a row may overlap the one before.

A kernel of the CPU needs a loader and the WeightLayout. Kinds that are stored column by column are
read by words.py instead, those whose scales lie among the values by blocks.py and grids.py. A
loader may leave out a factor that all values share: x is multiplied by it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from moe_infinity.experts import DTYPE_BYTES
from moe_infinity.kernels.cpu.block_kind import BlockKind
from moe_infinity.kernels.cpu.blocks import BLOCK_KINDS
from moe_infinity.kernels.cpu.compiler import multiplies_bytes
from moe_infinity.kernels.cpu.digits import NUM_DIGITS
from moe_infinity.kernels.cpu.grids import GRID_KINDS
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
from moe_infinity.layout import NIBBLES, WORDS, Block

NIBBLE_UNITS = np.array([*(16.0**-k for k in range(NIBBLES - 1)), 1.0], np.float32)
# (builder, number of vectors, address of the first value) -> those vectors, each when asked for:
# then few registers hold values that wait for their use
LoadValues = Callable[[Any, int, Any], Iterable[Any]]


class ValueLoader(NamedTuple):
    """Loads the values of one kind."""

    bits: float  # of a value, with its share of scales that lie among the values
    num_vectors: tuple[int, ...]  # that one call may load; the most that fit a row are taken
    load: LoadValues
    left_out: float = 1.0
    short_groups: tuple[int, ...] = ()  # columns that share a scale, fewer than one call loads
    columns_per_lane: int = 1  # neighbouring columns that lie in one lane of neighbouring vectors
    global_scale: str | None = None  # "multiplies" scales or "divides" them; None: there is none
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


def _uint8(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    """Unsigned numbers less 128: with the upper bit inverted, a byte is that signed number."""
    for k in range(num_vectors):
        signed = b.xor(load(b, at, k * LANES, I8), all_lanes(I8, 0x80))
        yield b.sitofp(b.sext(signed, vector_of(I32)), FLOATS)


def _fp8(b: Any, num_vectors: int, at: Any) -> Iterator[Any]:
    """Make the bits of a float16, which is the value / 2 ** 8."""
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


def _block_loader(kind: str, blocks: BlockKind) -> ValueLoader:
    num_weights, num_bytes = BLOCKS[kind.removeprefix("ggml_")]
    num_vectors = (8, 4, 2) if kind == "q8_0" else (max(8, num_weights // LANES),)
    return ValueLoader(
        8 * num_bytes / num_weights, num_vectors, _none,
        subtracts_zero=blocks.sum_width > 0, blocks=blocks,
    )  # fmt: skip


LOADERS = {
    "int4": ValueLoader(
        4, (NIBBLES,), _int4, short_groups=(32, 64), columns_per_lane=8, subtracts_zero=True
    ),
    "mxfp4": ValueLoader(4, (4,), _mxfp4, left_out=2.0**14, short_groups=(32,), columns_per_lane=4),
    **{
        kind: ValueLoader(
            4,
            (4,),
            _mxfp4,
            left_out=2.0**14,
            short_groups=(16,),
            columns_per_lane=4,
            global_scale=use,
        )
        for kind, use in (("nvfp4", "multiplies"), ("nvfp4_divided", "divides"))
    },
    "int8": ValueLoader(8, (8, 4, 2), _int8),
    "uint8": ValueLoader(8, (8, 4, 2), _uint8),
    "fp8": ValueLoader(8, (8, 4, 2), _fp8, left_out=2.0**8),
    "bf16": ValueLoader(16, (4, 2, 1), _bf16),
    "f16": ValueLoader(16, (4, 2, 1), _f16),
    "f32": ValueLoader(32, (4, 2, 1), _f32),
    **{kind: ValueLoader(4, (), _none, subtracts_zero=True) for kind in WORDS},
    **{kind: _block_loader(kind, blocks) for kind, blocks in (BLOCK_KINDS | GRID_KINDS).items()},
}


class InnerLoop(NamedTuple):
    """The columns of a row read in steps: one function is compiled for each such loop."""

    kind: str  # of LOADERS
    num_vectors: int  # decoded at a step
    num_scales: int  # loaded at a step: more than one where groups are shorter than a step
    scale: str | None  # a float of 1, 2 or 4 bytes, or uint8 for an exponent; None: no scales
    has_zeros: bool

    @classmethod
    def of_literals(
        cls, kind: str, num_vectors: int, num_scales: int, scale: str, has_zeros: int
    ) -> InnerLoop:
        """The loop that constants of compiled code stand for."""
        return cls(kind, num_vectors, num_scales, scale or None, bool(has_zeros))

    @property
    def loader(self) -> ValueLoader:
        return LOADERS[self.kind]

    @property
    def scale_bytes(self) -> int:
        """The bytes of one scale; 0 without scales."""
        return 0 if self.scale is None else DTYPE_BYTES[self.scale]

    @property
    def num_columns(self) -> int:
        return self.num_vectors * LANES

    @property
    def num_bytes(self) -> int:
        return int(self.num_columns * self.loader.bits / 8)

    @property
    def digit_bits(self) -> int:
        """The bits of a digit of x, if values are multiplied as bytes; else 0."""
        blocks = self.loader.blocks
        return 0 if blocks is None or not multiplies_bytes() else blocks.digit_bits

    @property
    def num_x(self) -> int:
        """The number of vectors of x at a step: numbers, or digits and their unit. There may be
        sums behind them.
        """
        vectors = self.num_vectors // 4 * NUM_DIGITS + 1 if self.digit_bits else self.num_vectors
        return vectors + self.loader.subtracts_zero


class Tile(NamedTuple):
    """Products that are summed at once, in registers."""

    num_rows: int
    num_tokens: int


class KernelArguments(NamedTuple):
    """The arguments that describe a weight to a kernel: integers, and in the kernel's code LLVM's
    values. Fields that name no unit are addresses.
    """

    weight: Any
    scales: Any
    zeros: Any  # words [rows / 8, groups]; not read if there are none
    global_scale: Any  # in the kernel's code what scales are multiplied by, or None
    row_bytes: Any  # of weight; for WORDS of a line: one word of every row, or of every eighth
    x_bytes: Any  # of a token
    out_bytes: Any  # of a token
    scales_bytes: Any  # of a row of scales; for WORDS of a group
    block_rows: Any  # that share a row of scales
    num_steps: Any
    inverse: Any  # 2 ** 32 / (steps that share a scale) + 1, to divide by multiplying
    last_scale: Any  # the scale, or first of the scales, of the last step


NUM_ARGUMENTS = len(KernelArguments._fields)
NUM_PARTS = 4  # the first fields: addresses of parts of a weight


def loop_for(
    kind: str,
    num_columns: int,
    *,
    group: int,
    scale: str | None,
    has_zeros: bool = False,
) -> InnerLoop | None:
    """The loop for rows whose `group` columns share a scale. None: no step fits these columns."""
    num_groups = -(-num_columns // group)
    num_vectors = _num_vectors(kind, num_columns, num_groups, min(group, num_columns))
    if num_vectors is None:
        return None
    num_scales = max(1, num_vectors * LANES // group) if num_groups > 1 else 1
    return InnerLoop(kind, num_vectors, num_scales, scale, has_zeros)


def _num_vectors(kind: str, num_columns: int, num_groups: int, group: int) -> int | None:
    """The most vectors that fit a row, where a step is inside one group or has whole groups."""
    if kind in WORDS:
        return group // LANES if group % LANES == 0 else None
    loader = LOADERS[kind]
    for num_vectors in loader.num_vectors:
        width = num_vectors * LANES
        is_whole = group % width == 0 or group in loader.short_groups
        if width <= num_columns and (num_groups == 1 or is_whole):
            return num_vectors
    return None


def arguments_for(
    loop: InnerLoop, shape_RC: tuple[int, ...], block: Block, num_scale_rows: int
) -> KernelArguments:
    """The arguments for a weight without gaps whose blocks [rows, columns] have a scale each.
    Addresses and `out_bytes` are left to the caller.
    """
    num_rows, num_columns = shape_RC
    num_steps = -(-num_columns // loop.num_columns)
    num_groups = -(-num_columns // block[1])
    row_bytes = int(num_columns * loop.loader.bits / 8)
    num_scales = num_groups
    if loop.kind in WORDS:
        row_bytes = num_rows // 2 if loop.kind == "awq" else num_rows * 4
        num_scales = num_rows
    per_scale = loop.num_scales * block[1] // loop.num_columns if num_groups > 1 else num_steps
    return KernelArguments(
        weight=0,
        scales=0,
        zeros=0,
        global_scale=0,
        row_bytes=row_bytes,
        x_bytes=num_steps * loop.num_x * LANES * 4,
        out_bytes=0,
        scales_bytes=num_scales * loop.scale_bytes,
        block_rows=block[0] if num_scale_rows > 1 else num_rows,
        num_steps=num_steps,
        inverse=(1 << 32) // per_scale + 1,
        last_scale=num_groups - loop.num_scales,
    )
