"""Experts packed on their way into a slot, for who wants no second checkpoint on disk.

    recipe.load -> scratch -> parameters --kernels/pack.py--> parts, in the slot

A load costs packing as well (kernels/pack.py has the speed): `moe-infinity pack` does it once.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.checkpoint.extents import STORED_DTYPES, Extent
from moe_infinity.checkpoint.formats import SCHEME_OF
from moe_infinity.checkpoint.packing import Scheme
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import LayerRecipes, PieceInSlot, Recipe, Shapes
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
    made: dict[int, LayerRecipes] = {}  # rows may share their experts
    for row, recipes in zip(plan.layers, plan.recipes, strict=True):
        if id(recipes) not in made:
            packed = [PackedRecipe(recipe, row, precision) for recipe in recipes.recipes]
            made[id(recipes)] = LayerRecipes(packed)
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

    def __init__(self, recipe: Recipe, row: ExpertsModule, precision: Precision) -> None:
        fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe)}
        super().__init__(**fields)
        self._recipe = recipe
        self._precision = precision
        self._scheme: Scheme = SCHEME_OF[precision.name]
        self._is_transposed = bool(row.is_transposed)
        self._scratch = ExpertLayout.of(recipe.slot_shapes())
        recipe.place({spec.name: spec for spec in self._scratch.params})
        self._packed = {name for name, spec in self.targets.items() if self._fits(spec)}

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

    def slot_shapes(self) -> Shapes:
        shapes: Shapes = {}
        for name, spec in self.targets.items():
            if name not in self._packed:
                shapes[spec.name] = spec.shape, spec.dtype
                continue
            for suffix, (stored, shape) in self._precision.layout(self._shape_RC(spec)).items():
                shapes[f"{spec.name} {self._role(suffix)}"] = shape, STORED_DTYPES[stored][0]
        return shapes

    def _role(self, suffix: str) -> str:
        (role,) = [part.role for part in self._scheme.parts if part.suffix == suffix]
        return role

    def pieces(self, expert_idx: int, slot: memoryview) -> None:
        return None

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        scratch = torch.empty(self._scratch.slot_bytes, dtype=torch.uint8, device="cpu")
        self._recipe.load(expert_idx, reader, scratch.numpy().data)
        views = {
            spec.name: scratch[spec.offset :][: spec.num_bytes]
            .view(getattr(torch, spec.dtype))
            .view(spec.shape)
            for spec in self._scratch.params
        }
        params = self._recipe.params(views)
        places = {spec.name: spec for spec in self.stored}
        for name, spec in self.targets.items():
            values = {spec.name: params[spec.name]}
            if name in self._packed:
                weight = params[spec.name].t() if self._is_transposed else params[spec.name]
                parts = pack(weight.contiguous(), self._precision, is_searched=False).parts
                values = {f"{spec.name} {self._role(s)}": part for s, part in parts.items()}
            for key, value in values.items():
                place = places[key]
                flat = value.contiguous().view(torch.uint8).flatten().numpy()
                slot[place.offset : place.offset + place.num_bytes] = flat.data

    def extents(self, expert_idx: int) -> list[Extent]:
        return self._recipe.extents(expert_idx)

    def params(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        params = {}
        for name, spec in self.targets.items():
            if name not in self._packed:
                params[spec.name] = slot[spec.name]
                continue
            weight = self._scheme.unpack(self._parts_of(spec, slot), getattr(torch, spec.dtype))
            params[spec.name] = weight.t().contiguous() if self._is_transposed else weight
        return params

    def is_multiplied(self, *, is_transposed: bool) -> bool:
        return self._packed == self.targets.keys() and len(self.targets) == 1

    def pieces_in_slot(self, *, is_transposed: bool) -> list[PieceInSlot]:
        if not self.is_multiplied(is_transposed=is_transposed):
            return []
        (spec,) = self.targets.values()
        places = {place.name: place for place in self.stored}
        parts = {}
        for suffix in self._precision.layout(self._shape_RC(spec)):
            place = places[f"{spec.name} {self._role(suffix)}"]
            parts[self._role(suffix)] = place, place.shape
        return [PieceInSlot(self._scheme, self._shape_RC(spec), parts)]

    def _parts_of(self, spec: ParamSpec, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        suffixes = self._precision.layout(self._shape_RC(spec))
        return {self._role(s): slot[f"{spec.name} {self._role(s)}"] for s in suffixes}
