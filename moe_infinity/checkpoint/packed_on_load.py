"""Experts packed on their way into a slot, for who wants no second checkpoint on disk.

    recipe.load -> scratch -> parameters --kernels/pack.py--> parts, in the slot

A load costs packing as well (kernels/pack.py has the speed): `moe-infinity pack` does it once.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moe_infinity.checkpoint.formats import PACKED_BY_US
from moe_infinity.checkpoint.headers import STORED_DTYPES
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import Recipe, Shapes
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.pack import Precision, pack, precision_of
from moe_infinity.layout import WeightLayout, view_of

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
        self._precision = precision
        self._is_transposed = is_transposed
        self._unpacked = LayerRecipes([recipe], is_transposed=is_transposed)
        self._parts = {name: self._parts_of(spec) for name, spec in self.targets.items()}

    def _parts_of(self, spec: ParamSpec) -> Shapes | None:
        """What a slot holds of this parameter, by role; None: the parameter as it is."""
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

    def place(self, specs: dict[str, ParamSpec], *, is_transposed: bool) -> None:
        self.stored = tuple(specs[name] for name in self.slot_shapes())
        weights = []
        for name, spec in self.targets.items():
            if (parts := self._parts[name]) is None:
                weight = WeightLayout.plain(specs[spec.name], is_transposed=is_transposed)
            else:
                placed = {role: specs[f"{spec.name} {role}"] for role in parts}
                weight_format = PACKED_BY_US[self._precision.name]
                weight = weight_format.place(placed, is_transposed=is_transposed)
            weights.append(weight)
        self.weights = tuple(weights)

    def places(self, expert_idx: int) -> None:
        return None

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
            for role, place in weight.parts.items():
                flat = values[role].contiguous().view(torch.uint8).flatten().numpy()
                slot[place.offset : place.offset + place.num_bytes] = flat.data

    def params(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            spec.name: weight.unpacked(slot, getattr(torch, spec.dtype))
            for spec, weight in zip(self.targets.values(), self.weights, strict=True)
        }
