"""Experts packed on their way into a slot, for who wants no second checkpoint on disk.

    recipe.load -> scratch -> parameters --kernels/pack.py--> parts, in the slot

A load costs packing as well (kernels/pack.py has the speed): `moe-infinity pack` does it once.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moe_infinity.checkpoint.extents import STORED_DTYPES, Extent
from moe_infinity.checkpoint.formats import PACKED_BY_US
from moe_infinity.checkpoint.layout import WeightLayout, view_of
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import LayerRecipes, Recipe, Shapes
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import ExpertLayout, ParamSpec
from moe_infinity.kernels.pack import Precision, pack, precision_of

GROUP_SIZE = 32  # columns of int4 that share a scale; `moe-infinity pack` has the same default


def packed_on_load(plan: Plan, expert_dtype: str) -> Plan:
    """The plan with experts that take `expert_dtype` in slots. Raises UnsupportedModelError for a
    checkpoint that is packed already, or weights that do not fit.
    """
    if plan.packing is not None:
        raise UnsupportedModelError(f"the checkpoint is quantized already ({plan.packing})")
    precision = precision_of(expert_dtype, GROUP_SIZE)
    made: dict[int, LayerRecipes] = {}  # layers may have tied experts
    for layer, recipes in zip(plan.layers, plan.recipes, strict=True):
        if id(recipes) not in made:
            is_transposed = bool(layer.is_transposed)
            packed = [
                PackedRecipe(recipe, precision, is_transposed=is_transposed)
                for recipe in recipes.recipes
            ]
            made[id(recipes)] = LayerRecipes(packed, is_transposed=is_transposed)
    if not any(recipes.is_packed for recipes in made.values()):
        raise UnsupportedModelError(
            f"no expert has a weight that {expert_dtype} fits"
            + (f": groups of {GROUP_SIZE} columns" if precision.group_size else "")
        )
    return dataclasses.replace(
        plan, recipes=[made[id(recipes)] for recipes in plan.recipes], packing=expert_dtype
    )


class PackedRecipe(Recipe):
    """A recipe whose matrices are packed when they are loaded. What is no matrix, or fits no
    group, stays as it is.
    """

    def __init__(self, recipe: Recipe, precision: Precision, *, is_transposed: bool) -> None:
        fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe)}
        super().__init__(**fields)
        self._recipe = recipe
        self._precision = precision
        self._is_transposed = is_transposed
        self._scratch = ExpertLayout.of(recipe.slot_shapes())
        recipe.place(
            {spec.name: spec for spec in self._scratch.params}, is_transposed=is_transposed
        )
        self._packed = {spec.name for spec in self.targets.values() if self._fits(spec)}

    def _fits(self, spec: ParamSpec) -> bool:
        if len(spec.shape) != 2 or 0 in spec.shape or spec.dtype == "float64":
            return False
        return self._precision.group_of(self._shape_RC(spec)[1]) is not None

    def _shape_RC(self, spec: ParamSpec) -> tuple[int, int]:
        rows, columns = spec.shape
        return (columns, rows) if self._is_transposed else (rows, columns)

    @property
    def is_packed(self) -> bool:
        return bool(self._packed)

    @property
    def is_in_rows(self) -> bool:
        return len(self.targets) == 1

    def slot_shapes(self) -> Shapes:
        shapes: Shapes = {}
        for spec in self.targets.values():
            if spec.name not in self._packed:
                shapes[spec.name] = spec.shape, spec.dtype
                continue
            for role, (stored, shape) in self._precision.layout(self._shape_RC(spec)).items():
                shapes[f"{spec.name} {role}"] = shape, STORED_DTYPES[stored][0]
        return shapes

    def place(self, specs: dict[str, ParamSpec], *, is_transposed: bool) -> None:
        self.stored = tuple(specs[name] for name in self.slot_shapes())
        self.weights = tuple(self._layout_of(spec, specs) for spec in self.targets.values())

    def _layout_of(self, target: ParamSpec, specs: dict[str, ParamSpec]) -> WeightLayout:
        if target.name not in self._packed:
            return WeightLayout.plain(specs[target.name], is_transposed=self._is_transposed)
        roles = self._precision.layout(self._shape_RC(target))
        parts = {role: specs[f"{target.name} {role}"] for role in roles}
        return PACKED_BY_US[self._precision.name].place(parts, is_transposed=self._is_transposed)

    def pieces(self, expert_idx: int, slot: memoryview) -> None:
        return None

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        scratch = torch.empty(self._scratch.slot_bytes, dtype=torch.uint8, device="cpu")
        self._recipe.load(expert_idx, reader, scratch.numpy().data)
        params = self._recipe.params(
            {spec.name: view_of(spec, scratch) for spec in self._scratch.params}
        )
        for spec, weight in zip(self.targets.values(), self.weights, strict=True):
            values = {"values": params[spec.name]}
            if spec.name in self._packed:
                weight_RC = params[spec.name].t() if self._is_transposed else params[spec.name]
                values = pack(weight_RC.contiguous(), self._precision, is_searched=False).parts
            for role, place in weight.parts.items():
                flat = values[role].contiguous().view(torch.uint8).flatten().numpy()
                slot[place.offset : place.offset + place.num_bytes] = flat.data

    def extents(self, expert_idx: int) -> list[Extent]:
        return self._recipe.extents(expert_idx)

    def params(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            spec.name: weight.unpacked(slot, getattr(torch, spec.dtype))
            for spec, weight in zip(self.targets.values(), self.weights, strict=True)
        }
