"""How the experts of one MoE row compute once they are in their slots.

    all that arrived together, in one call     kernels/cpu/experts.py, for few rows
    one by one, unpacked if they are packed    as the class does, kernels/reference.py

The first is for experts that are two products with an activation between them that kernels know
(kernels/activation.py), whatever class they are of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.checkpoint.layout import KINDS, WORDS, StoredPart, StoredWeight
from moe_infinity.checkpoint.recipe import Recipe, RowRecipes
from moe_infinity.engine.fused_rows import FUSED_ROWS, FusedRows
from moe_infinity.engine.routing import NO_EXPERT, ExpertWork, RoutedRows
from moe_infinity.experts import ExpertKey, ParamSpec
from moe_infinity.kernels import has_packed_kernels
from moe_infinity.kernels.activation import Activation, find_activation
from moe_infinity.kernels.cuda.slot_mlp import SlotMlp, slot_mlp
from moe_infinity.memory.host import Slots

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts

PACKED = {  # by name of the scheme
    "fp8": "fp8", "mxfp8": "fp8", "float-quantized": "fp8", "pack-quantized": "int4",
    "int-quantized": "int8", "mxfp4": "mxfp4", **{kind: kind for kind in WORDS},
}  # fmt: skip

# Unpacking an expert costs as much as so many of its rows, multiplied one by one.
PACKED_ROWS = 16

Work = ExpertWork | FusedRows


class RowComputer:
    """Computes experts of one row from their slots, as `experts_implementation` tells."""

    def __init__(
        self,
        row: ExpertsModule,
        recipes: RowRecipes,
        slots: Slots,
        experts_implementation: str,
    ) -> None:
        self._slots = slots
        self._views = slots.views(recipes.layout)
        self._weighs_input = row.adapter.weighs_input
        self._is_eager = row.adapter.is_eager
        if self._is_eager is None:
            self._is_eager = experts_implementation == "eager"
        has_kernels = experts_implementation in ("auto", "fast") and has_packed_kernels()
        has_kernels &= slots.device.type == "cpu"
        self._mlp = recipes.computing(row.compute)
        # With weights as they are, the bits would not be those of transformers.
        is_fused = has_kernels and (recipes.is_packed or experts_implementation == "fast")
        self._fused = fused_row(row, recipes) if is_fused else None
        self._most_rows = PACKED_ROWS if recipes.is_packed else FUSED_ROWS
        read, other = ("read by kernels", "unpacked") if recipes.is_packed else ("fast", "exact")
        self.how = other if self._fused is None else read

    def work(
        self, index_TK: NDArray[np.int64], x_TD: Tensor, top_k_weights_TK: Tensor
    ) -> RoutedRows | FusedRows:
        """What the experts of this row have to do for T tokens of K experts each."""
        if self._fused is not None:
            flat_P = index_TK.ravel().tolist()
            if has_few_rows(flat_P, len(index_TK), self._most_rows):
                return FusedRows(
                    self._fused, flat_P, x_TD, top_k_weights_TK, weighs_input=self._weighs_input
                )
        rows = RoutedRows(index_TK, is_eager=bool(self._is_eager))
        rows.gather(
            x_TD,
            top_k_weights_TK,
            weighs_input=self._weighs_input,
        )
        return rows

    def run(self, work: Work, keys: Sequence[ExpertKey], slot_ids: Mapping[ExpertKey, int]) -> None:
        """Do the part of the work that these experts have."""
        if isinstance(work, FusedRows):
            addresses = [self._slots.address_of(slot_ids[key]) for key in keys]
            work.add([key.expert_idx for key in keys], addresses)
            return
        for key in keys:
            work.compute(key.expert_idx, self._mlp, self._views[slot_ids[key]])


def has_few_rows(flat_P: list[int], num_tokens: int, most: int) -> bool:
    """Whether no expert has more than `most` rows, and no pair is without one."""
    if not flat_P or NO_EXPERT in flat_P:
        return False
    return num_tokens <= most or max(Counter(flat_P).values()) <= most


def fused_row(row: ExpertsModule, recipes: RowRecipes) -> FusedExperts | None:
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


def slot_row(row: ExpertsModule, recipes: RowRecipes) -> SlotMlp | None:
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


def _two_products(row: ExpertsModule, recipes: RowRecipes) -> _TwoProducts | None:
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
