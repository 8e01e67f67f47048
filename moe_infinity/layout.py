"""How a weight of one expert lies in a slot.

    a format of formats/methods.py --Recipe.place--> WeightLayout
        unpacked()       the weight again, for the model's own code
        kernels/cpu      products with it, where it lies

Layouts are made once, when a model is planned. Code that fills or reads slots gets nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe_infinity.experts import ParamSpec

NIBBLES = 8  # values of 4 bits in a word
SCALES = ("float32", "bfloat16", "float16")
FLOAT8 = "float8_e4m3fn"
EXPONENTS = ("uint8", "float8_e8m0fnu")  # of two, 127 standing for 2 ** 0
PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}  # by kind
KINDS = {dtype: kind for kind, dtype in PLAIN.items()}
GROUP_OF_MXFP4 = 32  # columns that share a scale
GROUP_OF_NVFP4 = 16
WORDS = ("gptq", "gptq_v2", "awq")  # kinds that lie as [C, R], 8 values to a word

Block = tuple[int, int]
Parts = dict[str, Tensor]  # by role: values, scale, zeros, groups, global_scale
Unpack = Callable[[Parts, Block | None, torch.dtype], Tensor]  # gives [R, C]


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """A weight [R, C], or a bias [R], in a slot. Layouts of one weight in two layers are equal."""

    kind: str  # bf16, f16, f32, or that of a format; kernels have a loader for each kind they read
    shape: tuple[int, ...]
    values: ParamSpec
    scale: ParamSpec | None = None
    zeros: ParamSpec | None = None  # words of 8 numbers of 4 bits, packed along rows
    groups: ParamSpec | None = None  # of every column the group, where they may be in any order
    global_scale: ParamSpec | None = None  # one number for all values, beside their scales
    block: Block | None = None  # rows and columns that share a scale; None: see `groups`
    is_transposed: bool = False  # the experts' class has it as [C, R]; a plain kind lies so, too
    unpack: Unpack | None = field(default=None, compare=False, repr=False)  # None: a plain kind

    @classmethod
    def plain(cls, spec: ParamSpec, *, is_transposed: bool = False) -> WeightLayout:
        """The layout of a parameter that is not packed."""
        kind = KINDS.get(getattr(torch, spec.dtype), spec.dtype)
        shape = spec.shape[::-1] if is_transposed else spec.shape
        return cls(kind, shape, spec, is_transposed=is_transposed)

    @property
    def parts(self) -> dict[str, ParamSpec]:
        """The parts of the weight by role, without those that it lacks."""
        parts = {
            "values": self.values, "scale": self.scale, "zeros": self.zeros, "groups": self.groups,
            "global_scale": self.global_scale,
        }  # fmt: skip
        return {role: part for role, part in parts.items() if part is not None}

    @property
    def end(self) -> int:
        """Bytes from the start of the slot to the end of the last part."""
        return max(part.offset + part.num_bytes for part in self.parts.values())

    def is_stored_in(self, bits: float) -> bool:
        """True if the values take `bits` bits each."""
        return 8 * self.values.num_bytes == bits * prod(self.shape) > 0

    def moved(self, num_bytes: int) -> WeightLayout:
        """The same layout `num_bytes` further on."""
        parts: dict[str, Any] = {
            role: replace(part, offset=part.offset + num_bytes) for role, part in self.parts.items()
        }
        return replace(self, **parts)

    def unpacked(self, slot: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight as the experts' class has it, from the views of a slot by name."""
        if self.unpack is None:
            return slot[self.values.name].to(dtype)
        parts = {role: slot[part.name] for role, part in self.parts.items()}
        weight = self.unpack(parts, self.block, dtype)
        return weight.t().contiguous() if self.is_transposed else weight


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [R, C] that is no expert's, packed in memory of its own or in a mapped file."""

    layout: WeightLayout
    memory: Tensor  # uint8 on a CPU; offsets of the layout count from its start

    def __len__(self) -> int:
        return self.layout.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(part.num_bytes for part in self.layout.parts.values())

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The weight [R, C]."""
        parts = self.layout.parts.values()
        return self.layout.unpacked({p.name: view_of(p, self.memory) for p in parts}, dtype)


def view_of(part: ParamSpec, slot: Tensor) -> Tensor:
    """A part of a slot, which is given as uint8 [bytes]."""
    flat = slot[part.offset :][: part.num_bytes]
    return flat.view(getattr(torch, part.dtype)).view(part.shape)


def block_of(weight: WeightLayout) -> Block | None:
    """The rows and columns that share a scale, as if groups were in order. None if there are no
    scales, or if the parts do not fit each other as kernels expect it.
    """
    scale = weight.scale
    if scale is None or scale.dtype not in (*SCALES, *EXPONENTS, FLOAT8):
        return None
    rows, columns = weight.shape
    block = weight.block
    if block is None:  # groups of [G, R] scales
        block = 1, columns // max(1, scale.shape[0])
    if 0 in (*block, rows, columns):
        return None
    grid = -(-rows // block[0]), -(-columns // block[1])
    if weight.kind in WORDS:
        words = (columns, rows // NIBBLES) if weight.kind == "awq" else (columns // NIBBLES, rows)
        zeros: tuple[int, ...] = grid[1], rows // NIBBLES
        fits = rows % NIBBLES == columns % NIBBLES == columns % block[1] == 0
        fits &= weight.values.shape == words and weight.zeros is not None
        grid = grid[1], grid[0]
    else:
        zeros = -(-rows // NIBBLES), grid[1]
        fits = weight.groups is None and (weight.zeros is None or block[0] == 1)
    fits &= without_ones(scale.shape) == without_ones(grid)
    fits &= weight.zeros is None or weight.zeros.shape == zeros
    groups = weight.groups
    fits &= groups is None or (groups.shape, groups.dtype) == ((columns,), "int32")
    return block if fits else None


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes that tell where a number lies."""
    return tuple(size for size in shape if size != 1)
