"""How the weights of one expert lie in a slot: what every kernel that reads slots is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from moe_infinity.kernels.unpack import NIBBLES

SCALES = (torch.float32, torch.bfloat16, torch.float16)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}  # by kind
KINDS = {dtype: kind for kind, dtype in PLAIN.items()}
VALUES = ("", "weight", "packed", "blocks", "qweight")  # the role that is not scales or zeros
MXFP4_GROUP = 32  # columns
WORDS = ("gptq", "gptq_v2", "awq")  # kinds that lie as [C, R], 8 values to a word
Stored = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # by role


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a weight, without gaps and without the expert dimension."""

    offset: int  # bytes from the start of the slot
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [R, C] as it lies in a slot; parts by role as in checkpoint/formats.py."""

    kind: str  # bf16, f16, f32 (role ""), int8, fp8 (weight, scale), int4 (packed, scale, ...),
    # mxfp4 (blocks, scales), WORDS (qweight, qzeros, scales, ...)
    shape: tuple[int, int]
    parts: Mapping[str, StoredPart]
    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: equal parts
    is_transposed: bool = False  # of a plain kind: it lies as [C, R]

    @property
    def stored(self) -> Stored:
        return {role: (part.dtype, part.shape) for role, part in self.parts.items()}

    @property
    def values(self) -> StoredPart:
        (found,) = [part for role, part in self.parts.items() if role in VALUES]
        return found

    @property
    def scale(self) -> StoredPart | None:
        return self.parts.get("scale", self.parts.get("scales"))

    @property
    def zeros(self) -> StoredPart | None:
        return self.parts.get("zero_point", self.parts.get("qzeros"))

    @property
    def groups(self) -> StoredPart | None:
        """Of every column the group, where groups may be in any order."""
        return None if self.block else self.parts.get("g_idx")


def block_of(weight: StoredWeight) -> tuple[int, int] | None:
    """Rows and columns that share a scale, of packed kinds; None if the parts are not what kernels
    read.
    """
    (rows, columns), stored = weight.shape, weight.stored
    if weight.kind == "mxfp4":
        num_groups = columns // MXFP4_GROUP
        wanted: Stored = {"blocks": (torch.uint8, (rows, num_groups, MXFP4_GROUP // 2))}
        wanted["scales"] = torch.uint8, (rows, num_groups)
        return (1, MXFP4_GROUP) if stored == wanted and columns % MXFP4_GROUP == 0 else None
    if weight.kind in WORDS:
        return _block_of_words(weight)
    dtype, grid = stored.get("scale", (None, ()))
    if dtype not in SCALES + (EXPONENTS if weight.kind == "fp8" else ()):
        return None
    if len(grid) != 2:
        grid = (1, 1) if prod(grid) == 1 else (0, 0)
    block = weight.block or (rows // max(1, grid[0]), columns // max(1, grid[1]))
    if 0 in block or grid != (-(-rows // block[0]), -(-columns // block[1])):
        return None
    wanted = {"scale": stored["scale"]}
    if weight.kind in ("int8", "fp8"):
        bytes_of = torch.int8 if weight.kind == "int8" else torch.float8_e4m3fn
        wanted["weight"] = bytes_of, (rows, columns)
    elif weight.kind == "int4" and grid[0] == rows and columns % (NIBBLES * grid[1]) == 0:
        wanted["packed"] = torch.int32, (rows, columns // NIBBLES)
        if "zero_point" in stored:
            wanted["zero_point"] = torch.int32, (-(-rows // NIBBLES), grid[1])
    return block if stored == wanted else None


def _block_of_words(weight: StoredWeight) -> tuple[int, int] | None:
    """As if groups were in order."""
    (rows, columns), stored = weight.shape, weight.stored
    dtype, (num_groups, *_) = stored.get("scales", (None, (0,)))
    if dtype not in SCALES or 0 in (rows, columns, num_groups):
        return None
    words = (columns, rows // NIBBLES) if weight.kind == "awq" else (columns // NIBBLES, rows)
    wanted: Stored = {"qweight": (torch.int32, words), "scales": (dtype, (num_groups, rows))}
    wanted["qzeros"] = torch.int32, (num_groups, rows // NIBBLES)
    if "g_idx" in stored:
        wanted["g_idx"] = (torch.int32, (columns,)) if weight.groups else stored["g_idx"]
    is_whole = rows % NIBBLES == columns % NIBBLES == columns % num_groups == 0
    return (1, columns // num_groups) if is_whole and stored == wanted else None
