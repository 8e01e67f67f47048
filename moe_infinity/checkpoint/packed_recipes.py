"""Recipes of packed experts whose slots differ from the checkpoint: rows in another order, or
weights that are packed on their way into the slot.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.checkpoint.formats import PACKED_BY_US
from moe_infinity.checkpoint.headers import STORED_DTYPES
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import Recipe, Shapes
from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.pack import Precision, pack
from moe_infinity.layout import WeightLayout, view_of

Order = NDArray[np.int64]  # by row of a parameter: the row of the weights that it is


def order_of(recipe: Recipe, *, is_transposed: bool) -> Order | None:
    """The order in which a conversion puts rows, learned by converting a pattern. None if it does
    anything else, or if the weights are not all packed in rows of one kind.
    """
    formats = {source.packed.format if source.packed else None for source in recipe.sources}
    (packed, *others) = formats
    if others or packed is None or not packed.has_free_rows or len(recipe.targets) != 1:
        return None
    patterns, values = recipe.tried()
    (value,) = values.values()
    converted = value[0].t() if is_transposed else value[0]
    rows = [row.tobytes() for pattern in patterns for row in _rows_of(pattern[0])]
    number = {row: at for at, row in enumerate(rows)}
    order = [number.get(row.tobytes(), -1) for row in _rows_of(converted)]
    return np.array(order) if sorted(order) == list(range(len(rows))) else None


def _rows_of(weight_RC: Tensor) -> NDArray[np.uint8]:
    return weight_RC.contiguous().view(torch.uint8).numpy()


class DerivedRecipe(Recipe):
    """A recipe that fills a slot in its own way with what another recipe reads."""

    def __init__(self, recipe: Recipe) -> None:
        fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe)}
        super().__init__(**fields)

    def copies(self, expert_idx: int) -> None:
        return None

    def params(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            spec.name: weight.unpacked(slot, getattr(torch, spec.dtype))
            for spec, weight in zip(self.targets.values(), self.weights, strict=True)
        }


class ReorderedRecipe(DerivedRecipe):
    """A recipe that puts the rows of packed weights in the order that the experts' class wants.

        gate [R, C], up [R, C], in the file --rows taken in turn--> [2 R, C], in the slot

    Rows of a block format are runs of bytes that nothing else depends on. So they are put in order
    when an expert is loaded, and stay packed: gpt-oss and Llama 4 in GGUF files.
    """

    def __init__(self, recipe: Recipe, order: Order) -> None:
        super().__init__(recipe)
        self._order = order

    @property
    def is_in_rows(self) -> bool:
        return True

    def slot_shapes(self) -> Shapes:
        (spec,) = self.targets.values()
        (shape, dtype), *_ = self.sources[0].stored_shapes().values()
        return {f"{spec.name} values": ((len(self._order), shape[-1]), dtype)}

    def lay_out(self, specs: dict[str, ParamSpec], *, is_transposed: bool) -> None:
        self.stored = tuple(specs[name] for name in self.slot_shapes())
        packed = self.sources[0].packed
        assert isinstance(packed, PackedTensor)
        parts = {"values": self.stored[0]}
        self.weights = (packed.format.layout_of(parts, is_transposed=is_transposed),)

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


class PackedRecipe(DerivedRecipe):
    """A recipe whose matrices are packed when they are loaded. Parameters that are no matrices, or
    fit no group, stay as they are.

        recipe.load -> scratch -> parameters --kernels/pack.py--> parts, in the slot

    A load costs packing as well (kernels/pack.py has the speed): `moe-infinity pack` does it once.
    """

    def __init__(self, recipe: Recipe, precision: Precision, *, is_transposed: bool) -> None:
        super().__init__(recipe)
        self._precision = precision
        self._is_transposed = is_transposed
        self._unpacked = LayerRecipes([recipe], is_transposed=is_transposed)
        self._parts = {name: self._parts_of(spec) for name, spec in self.targets.items()}

    def _parts_of(self, spec: ParamSpec) -> Shapes | None:
        """The parts of this parameter in a slot, by role; None: the parameter as it is."""
        if len(spec.shape) != 2 or 0 in spec.shape or spec.dtype == "float64":
            return None
        rows, columns = spec.shape[::-1] if self._is_transposed else spec.shape
        if self._precision.group_of(columns) is None:
            return None
        layout = self._precision.layout((rows, columns))
        return {role: (shape, STORED_DTYPES[stored][0]) for role, (stored, shape) in layout.items()}

    @property
    def is_packed(self) -> bool:
        return any(parts is not None for parts in self._parts.values())

    @property
    def is_in_rows(self) -> bool:
        return len(self.targets) == 1

    def slot_shapes(self) -> Shapes:
        shapes: Shapes = {}
        for name, spec in self.targets.items():
            if (parts := self._parts[name]) is None:
                shapes[spec.name] = spec.shape, spec.dtype
            else:
                shapes |= {f"{spec.name} {role}": part for role, part in parts.items()}
        return shapes

    def lay_out(self, specs: dict[str, ParamSpec], *, is_transposed: bool) -> None:
        self.stored = tuple(specs[name] for name in self.slot_shapes())
        weights = []
        for name, spec in self.targets.items():
            if (parts := self._parts[name]) is None:
                weight = WeightLayout.plain(specs[spec.name], is_transposed=is_transposed)
            else:
                placed = {role: specs[f"{spec.name} {role}"] for role in parts}
                weight_format = PACKED_BY_US[self._precision.name]
                weight = weight_format.layout_of(placed, is_transposed=is_transposed)
            weights.append(weight)
        self.weights = tuple(weights)

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        layout = self._unpacked.layout
        scratch = torch.empty(layout.slot_bytes, dtype=torch.uint8, device="cpu")
        self._unpacked.load(expert_idx, reader, scratch.numpy().data)
        params = {spec.name: view_of(spec, scratch) for spec in layout.params}
        for spec, weight in zip(self.targets.values(), self.weights, strict=True):
            values = {"values": params[spec.name]}
            if weight.unpack is not None:
                weight_RC = params[spec.name].t() if self._is_transposed else params[spec.name]
                values = pack(weight_RC.contiguous(), self._precision, is_searched=False).parts
            for role, part in weight.parts.items():
                flat = values[role].contiguous().view(torch.uint8).flatten().numpy()
                slot[part.offset : part.offset + part.num_bytes] = flat.data
