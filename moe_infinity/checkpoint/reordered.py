"""Packed experts whose class wants the rows of their weights in another order, or transposed.

    gate [R, C], up [R, C], in the file --rows taken in turn--> [2 R, C], in the slot

Rows of a block format are runs of bytes that nothing else depends on. So they are put in order when
an expert is loaded, and stay packed: gpt-oss and Llama 4 in GGUF files.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import Recipe, Shapes
from moe_infinity.experts import ParamSpec

Order = NDArray[np.int64]  # of every row of a parameter, which row of the weights it is


def order_of(recipe: Recipe, *, is_transposed: bool) -> Order | None:
    """How a conversion orders rows, found by converting a pattern. None if it does anything else,
    or if the weights are not all packed in rows of one kind.
    """
    formats = {source.packed.format if source.packed else None for source in recipe.sources}
    (packed, *others) = formats
    if others or packed is None or not packed.has_free_rows or len(recipe.targets) != 1:
        return None
    patterns, found = recipe.tried()
    (value,) = found.values()
    converted = value[0].t() if is_transposed else value[0]
    rows = [row.tobytes() for pattern in patterns for row in _rows_of(pattern[0])]
    number = {row: at for at, row in enumerate(rows)}
    order = [number.get(row.tobytes(), -1) for row in _rows_of(converted)]
    return np.array(order) if sorted(order) == list(range(len(rows))) else None


def _rows_of(weight_RC: Tensor) -> NDArray[np.uint8]:
    return weight_RC.contiguous().view(torch.uint8).numpy()


class ReorderedRecipe(Recipe):
    """A recipe that puts the rows of packed weights in order."""

    def __init__(self, recipe: Recipe, order: Order) -> None:
        fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe)}
        super().__init__(**fields)
        self._order = order

    @property
    def is_in_rows(self) -> bool:
        return True

    def slot_shapes(self) -> Shapes:
        (spec,) = self.targets.values()
        (shape, dtype), *_ = self.sources[0].stored_shapes().values()
        return {f"{spec.name} values": ((len(self._order), shape[-1]), dtype)}

    def place(self, specs: dict[str, ParamSpec], *, is_transposed: bool) -> None:
        self.stored = tuple(specs[name] for name in self.slot_shapes())
        packed = self.sources[0].packed
        assert isinstance(packed, PackedTensor)
        parts = {"values": self.stored[0]}
        self.weights = (packed.format.place(parts, is_transposed=is_transposed),)

    def places(self, expert_idx: int) -> list[tuple[Extent, int]] | None:
        return None

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        (spec,) = self.stored
        scratch = np.empty(spec.shape, np.uint8)
        begin = 0
        pieces = []
        for extent in self.extents(expert_idx):
            flat = scratch.reshape(-1)[begin : begin + extent.num_bytes]
            pieces.append((extent, flat.data))
            begin += extent.num_bytes
        reader.read(pieces)
        rows = np.frombuffer(slot[spec.offset : spec.offset + spec.num_bytes], np.uint8)
        np.take(scratch, self._order, axis=0, out=rows.reshape(spec.shape))

    def params(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        (spec,) = self.targets.values()
        (weight,) = self.weights
        return {spec.name: weight.unpacked(slot, getattr(torch, spec.dtype))}
