"""Which kernels of ours read the experts of an MoE layer where they lie in their slots.

An expert is taken if it is two products with an activation between them that kernels know
(kernels/activation.py), whatever class it is of, and if its weights lie as kernels read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.checkpoint.layout import KINDS, WORDS, StoredPart, StoredWeight
from moe_infinity.checkpoint.recipe import LayerRecipes, Recipe
from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.activation import Activation, find_activation
from moe_infinity.kernels.cuda.slot_mlp import SlotMlp, slot_mlp

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts

PACKED = {  # by name of the scheme
    "fp8": "fp8", "mxfp8": "fp8", "float-quantized": "fp8", "pack-quantized": "int4",
    "int-quantized": "int8", "mxfp4": "mxfp4", **{kind: kind for kind in WORDS},
}  # fmt: skip


def fused_layer(row: ExpertsModule, recipes: LayerRecipes) -> FusedExperts | None:
    """None if its experts can only be computed one by one."""
    mlp = _two_products(row, recipes)
    if mlp is None:
        return None
    from moe_infinity.kernels.cpu.experts import fused_experts

    return fused_experts(
        mlp.up,
        mlp.down,
        mlp.activation,
        biases=mlp.biases,
        is_interleaved=mlp.is_interleaved,
    )


def slot_layer(row: ExpertsModule, recipes: LayerRecipes) -> SlotMlp | None:
    """None if kernels of a device do not read its experts."""
    mlp = _two_products(row, recipes)
    if mlp is None or len(mlp.down) != 1:
        return None
    return slot_mlp(
        mlp.up,
        mlp.down[0],
        activation=mlp.activation,
        biases=mlp.biases,
        is_interleaved=mlp.is_interleaved,
        weighs_input=row.adapter.weighs_input,
    )


class _TwoProducts(NamedTuple):
    """An expert that is one product, an activation, and another product."""

    up: list[StoredWeight]  # one below the other, as they lie in a slot
    down: list[StoredWeight]
    biases: list[StoredPart]  # one for each product, or none
    activation: Activation
    is_interleaved: bool


def _two_products(row: ExpertsModule, recipes: LayerRecipes) -> _TwoProducts | None:
    """None if it is anything else, or lies otherwise in its slot."""
    hidden = row.adapter.hidden(row.module)
    filled_by = {spec.name: found for found in recipes.recipes for spec in found.targets.values()}
    is_gated = "gate_up_proj" in filled_by
    names = ["gate_up_proj" if is_gated else "up_proj", "down_proj"]
    bias_names = [f"{name}_bias" for name in names if f"{name}_bias" in filled_by]
    if hidden is None or set(filled_by) != {*names, *bias_names}:
        return None
    biases = [part for name in bias_names if (part := _bias(filled_by[name])) is not None]
    up, down = (_stored(filled_by[name], is_transposed=bool(row.is_transposed)) for name in names)
    found = find_activation(hidden, is_gated=is_gated)
    if up is None or down is None or found is None:
        return None
    if len(biases) != len(bias_names) or len(biases) == 1:
        return None
    return _TwoProducts(up, down, biases, *found)


def _bias(recipe: Recipe) -> StoredPart | None:
    if recipe.is_packed or len(recipe.stored) != 1:
        return None
    (spec,) = recipe.stored
    return StoredPart(spec.offset, getattr(torch, spec.dtype), spec.shape)


def _stored(recipe: Recipe, *, is_transposed: bool) -> list[StoredWeight] | None:
    """How the one parameter that a recipe fills lies in a slot. Transposed: the class has it
    as [C, R].
    """

    def part(spec: ParamSpec, shape: tuple[int, ...]) -> StoredPart:
        return StoredPart(spec.offset, getattr(torch, spec.dtype), shape)

    if len(recipe.targets) != 1:
        return None
    if not recipe.is_packed:
        (spec,) = recipe.stored
        kind = KINDS.get(getattr(torch, spec.dtype))
        if kind is None or len(spec.shape) != 2:
            return None
        columns, rows = spec.shape if is_transposed else spec.shape[::-1]
        parts = {"": part(spec, spec.shape)}
        return [StoredWeight(kind, (rows, columns), parts, is_transposed=is_transposed)]
    weights = []
    for piece in recipe.pieces_in_slot(is_transposed=is_transposed):
        kind, (num_rows, num_columns) = PACKED.get(piece.scheme.name), piece.shape
        if kind is None:
            return None
        parts = {role: part(spec, shape) for role, (spec, shape) in piece.parts.items()}
        weights.append(StoredWeight(kind, (num_rows, num_columns), parts, piece.block))
    return weights or None
