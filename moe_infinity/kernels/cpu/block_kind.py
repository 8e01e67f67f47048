"""A kind of GGML's blocks, as inner loops see it: steps of values, and how x has to be arranged for
these. blocks.py and grids.py have the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_infinity.kernels.cpu.vectors import FLOATS, I32, LANES, all_lanes


class Segment(NamedTuple):
    """Values that are multiplied by the same vector of scales."""

    scale: Any
    values: Iterable[Any]  # vectors, each when asked for
    words: tuple[Any, ...] = ()  # one or two, whose bytes these values are; (): they are no bytes


class BlockStep(NamedTuple):
    """One step of one row, decoded."""

    segments: Iterable[Segment]
    minima: Any = None  # multiplies the sums of x


# What values lack that are neighbouring bytes of words, masked without a shift. Where the last byte
# may be 128 or more, it is shifted.
MASKED = 1.0, 2.0**-8, 2.0**-16, 2.0**-24
LAST_SHIFTED = 1.0, 2.0**-8, 2.0**-16, 1.0

# Of x, where bytes are multiplied with digits. The sums of eight products have 32 bits: the first
# are of bytes below 64 with numbers of 22 bits, the others of any bytes with numbers of 20.
DIGIT_BITS: dict[tuple[float, ...], int] = {MASKED: 8, LAST_SHIFTED: 7}


class BlockKind(NamedTuple):
    """Decodes a step of one kind, and says how x has to be arranged for that."""

    load: Callable[[Any, int, Any], BlockStep]  # builder, number of vectors, address
    order: tuple[tuple[int, ...], tuple[int, ...]] = (), ()  # see `columns`
    sum_width: int = 0  # columns that share a minimum; 0: there are no minima
    sum_lanes: tuple[int, ...] = ()  # the lanes of `minima` that count
    times: float = 0.0  # what is multiplied with their sums
    left_out: float = 1.0  # a factor of all values
    lacking: tuple[float, ...] = MASKED  # factors of neighbouring vectors, over and over
    rows: int = 1  # at once for a single token: 1, 2 or 4

    def columns(self, num_vectors: int) -> NDArray[np.int64]:
        """[vectors, LANES]: where in a step the column of a lane is. `order` has a shape of these
        columns, and in which order its axes have to be taken.
        """
        shape, axes = self.order
        count: NDArray[np.int64] = np.arange(num_vectors * LANES)
        if shape:
            count = count.reshape(shape).transpose(axes)
        return count.reshape(num_vectors, LANES)

    @property
    def digit_bits(self) -> int:
        """The bits of a digit of x, if values are the bytes of words; else 0."""
        return DIGIT_BITS.get(self.lacking, 0)

    def units(self, num_vectors: int) -> NDArray[np.float32]:
        """The factor that the values of each vector lack."""
        return np.asarray(np.resize(self.lacking, num_vectors) * self.left_out, np.float32)

    def sums(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The first of the columns that each lane sums, and its factor; 0 for other lanes."""
        first = np.zeros(LANES, np.int64)
        factors = np.zeros(LANES, np.float32)
        for group, lane in enumerate(self.sum_lanes):
            first[lane] = group * self.sum_width
            factors[lane] = self.times * self.left_out
        return first, factors


def segment_of(b: Any, scale: Any, *words: Any, is_wide: bool = False) -> Segment:
    """The bytes of one or two vectors of words. They are below 64; with `is_wide`, for kinds that
    lack LAST_SHIFTED, they may be any.
    """
    return Segment(scale, _bytes(b, *words, is_wide=is_wide), words)


def _bytes(b: Any, *words: Any, is_wide: bool) -> Iterator[Any]:
    """The four bytes of each lane's word as numbers, one after the other; see `units`."""
    for word in words:
        for byte in range(3):
            yield b.sitofp(b.and_(word, all_lanes(I32, 0xFF << 8 * byte)), FLOATS)
        if is_wide:
            yield b.sitofp(b.lshr(word, all_lanes(I32, 24)), FLOATS)
        else:
            yield b.sitofp(b.and_(word, all_lanes(I32, 0x7F << 24)), FLOATS)
