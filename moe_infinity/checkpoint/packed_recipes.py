"""Recipes of packed experts that transformers' conversion would not leave as they are: rows in
another order, or weights that are packed on their way into the slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_infinity.checkpoint.headers import STORED_DTYPES
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.checkpoint.packing import WeightFormat
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import Recipe, Shapes, Source
from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.pack import Precision, pack
from moe_infinity.layout import WeightLayout, view_of

BIAS = "_bias"

Order = Tensor  # int64 [R], by row of a parameter: the row of the stored weights that it is


def order_of(recipe: Recipe, *, is_transposed: bool) -> Order | None:
    """The order in which a conversion puts rows, learned by converting a pattern: that of the
    stored weights, or gate and up in turn. None if it does anything else, or if the weights are not
    all packed in one way.
    """
    formats = {source.packed.format if source.packed else None for source in recipe.sources}
    (packed, *others) = formats
    if others or packed is None or len(recipe.targets) != 1:
        return None
    patterns, values = recipe.tried()
    (value,) = values.values()
    found_RC = (value[0].t() if is_transposed else value[0]).contiguous()
    stored_RC = torch.cat([pattern.flatten(0, -2) for pattern in patterns])
    if stored_RC.shape != found_RC.shape:
        return None
    num_rows = len(stored_RC)
    orders = [torch.arange(num_rows, device="cpu")]
    if num_rows % 2 == 0:
        orders.append(orders[0].view(2, -1).t().flatten())
    return next((order for order in orders if _are_same(stored_RC[order], found_RC)), None)


def _are_same(one: Tensor, other: Tensor) -> bool:
    """True for the same bits."""
    bits = [each.contiguous().view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


class RowsRecipe(Recipe):
    """A recipe whose conversion puts rows in another order, and rounds at most. A slot has them as
    they are stored, where kernels multiply with them: gpt-oss and Llama 4 in GGUF files.

        gate [R, C], up [R, C], in the file and in the slot --rows taken in turn--> [2 R, C]
    """

    def __init__(self, recipe: Recipe, order: Order, *, is_transposed: bool) -> None:
        super().__init__(**_fields_of(recipe))
        self.order = order
        self._is_transposed = is_transposed

    @property
    def is_in_parts(self) -> bool:
        return True

    @property
    def is_in_rows(self) -> bool:
        return True

    @property
    def alternates(self) -> bool:
        return self.order[:2].tolist() != [0, 1][: len(self.order)]

    def _layout(self, parts: dict[str, ParamSpec], source: Source) -> WeightLayout:
        if source.packed is None:
            return WeightLayout.plain(parts[""])
        return source.packed.format.layout_of(parts, is_transposed=self._is_transposed)

    def params(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        (spec,) = self.targets.values()
        dim = -1 if self._is_transposed else 0
        rows = torch.cat([weight.unpacked(slot, self._dtype) for weight in self.weights], dim)
        return {spec.name: rows.index_select(dim, self.order)}


def with_biases(recipes: list[Recipe]) -> list[Recipe]:
    """The recipes of a layer, in which biases have the order of weights that lie in rows."""
    weights = {
        spec.name: recipe
        for recipe in recipes
        if isinstance(recipe, RowsRecipe)
        for spec in recipe.targets.values()
    }
    return [_in_order_of(recipe, weights) for recipe in recipes]


def _in_order_of(recipe: Recipe, weights: Mapping[str, RowsRecipe]) -> Recipe:
    """The recipe of a bias, with numbers as they are stored, if its weight is so and if conversion
    does the same to both. Any other recipe as it is.
    """
    names = [spec.name for spec in recipe.targets.values()]
    weight = weights.get(names[0].removesuffix(BIAS))
    is_plain = not any(source.packed for source in recipe.sources)
    if len(names) > 1 or not names[0].endswith(BIAS) or weight is None or not is_plain:
        return recipe
    patterns, values = recipe.tried()
    (value,) = values.values()
    stored_R = torch.cat([pattern.flatten() for pattern in patterns]).to(value.dtype)
    if len(stored_R) != len(weight.order):
        return recipe
    is_same = _are_same(stored_R[weight.order], value.flatten())
    return RowsRecipe(recipe, weight.order, is_transposed=False) if is_same else recipe


def _fields_of(recipe: Recipe) -> dict[str, Any]:
    return {field.name: getattr(recipe, field.name) for field in dataclasses.fields(Recipe)}


class PackedRecipe(Recipe):
    """A recipe whose matrices are packed when they are loaded. Parameters that are no matrices, or
    fit no group, stay as they are.

        recipe.load -> scratch -> parameters --kernels/pack.py--> parts, in the slot

    A load costs packing as well (kernels/pack.py has the speed): `moe-infinity pack` does it once.
    """

    def __init__(
        self,
        recipe: Recipe,
        precision: Precision,
        packed_as: WeightFormat,
        *,
        is_transposed: bool,
    ) -> None:
        super().__init__(**_fields_of(recipe))
        self._precision = precision
        self._packed_as = packed_as
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
                weight = self._packed_as.layout_of(placed, is_transposed=is_transposed)
            weights.append(weight)
        self.weights = tuple(weights)

    def copies(self, expert_idx: int) -> None:
        return None

    def params(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            spec.name: weight.unpacked(slot, getattr(torch, spec.dtype))
            for spec, weight in zip(self.targets.values(), self.weights, strict=True)
        }

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
