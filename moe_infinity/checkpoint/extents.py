"""Tensors of a checkpoint as descriptions: name, dtype, shape, and which bytes of which file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

# Name in the header -> (torch's name, bits per element)
STORED_DTYPES = {
    "F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16),
    "I8": ("int8", 8), "U8": ("uint8", 8), "BOOL": ("bool", 8), "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8), "U16": ("uint16", 16),
    "U32": ("uint32", 32), "U64": ("uint64", 64),
}  # fmt: skip
STORED_NAMES = {name: stored for stored, (name, _) in STORED_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in a file."""

    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int

    def part(self, index: int, count: int) -> Extent:
        """Part `index` of `count` equal parts."""
        size = self.num_bytes // count
        assert size * count == self.num_bytes, (self, count)
        return Extent(self.file, self.offset + index * size, size)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint, as its header describes it."""

    name: str
    stored_dtype: str  # as in the header, e.g. "BF16"
    shape: tuple[int, ...]
    extent: Extent
    undo: Callable[[Tensor], Tensor] | None = None  # of what was done to the values; not of experts

    @property
    def dtype(self) -> str:
        """torch's name of the dtype, e.g. "bfloat16"."""
        return STORED_DTYPES[self.stored_dtype][0]

    @property
    def parts(self) -> tuple[tuple[str, StoredTensor], ...]:
        """Like those of a PackedTensor: the one tensor that stands for the weight."""
        return (("", self),)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Weights of one kind differ in nothing but their values."""
        return self.stored_dtype, self.shape
