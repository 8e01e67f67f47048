"""How the experts of one MoE row compute once they are in their slots.

    all that arrived together, in one call     kernels/experts_cpu.py, for few rows
    one by one, packed                         kernels/packed_cpu.py, for few rows
    one by one, unpacked if they are packed    as the class does, kernels/reference.py

The first is for classes of transformers' experts interface with a gate and nothing special about
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.integrations import moe

from moe_infinity.experts import ExpertKey, ParamSpec
from moe_infinity.kernels import has_packed_kernels
from moe_infinity.kernels.dispatch import NO_EXPERT, ExpertWork, RoutedRows
from moe_infinity.kernels.fused_rows import FUSED_ROWS, FusedRows
from moe_infinity.kernels.slot_mlp import SlotMlp, slot_mlp
from moe_infinity.kernels.stored import KINDS, StoredPart, StoredWeight
from moe_infinity.memory.host import Slots
from moe_infinity.models.adapters import INTERFACE, ExpertsModule
from moe_infinity.models.recipes import Recipe, RowRecipes

if TYPE_CHECKING:
    from moe_infinity.kernels.experts_cpu import FusedExperts

ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu"}  # by class
PACKED = {  # by name of the scheme
    "fp8": "fp8", "mxfp8": "fp8", "float-quantized": "fp8", "pack-quantized": "int4",
    "int-quantized": "int8", "mxfp4": "mxfp4",
}  # fmt: skip
GPT_OSS_EXPERTS = "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts"


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
        has_kernels &= all(device.type == "cpu" for device in slots.devices)
        self._mlp = recipes.computing(
            row.compute, is_transposed=row.is_transposed if has_kernels else None
        )
        # With weights as they are, the bits would not be those of transformers.
        is_fused = has_kernels and (recipes.is_packed or experts_implementation == "fast")
        self._fused = fused_row(row, recipes) if is_fused else None
        packed = "read by kernels" if has_kernels else "unpacked when they compute"
        plain = "fast" if self._fused is not None else "exact"
        self.how = packed if recipes.is_packed else plain

    def work(
        self, index_TK: NDArray[np.int64], x_TD: Tensor, top_k_weights_TK: Tensor
    ) -> RoutedRows | FusedRows:
        """What the experts of this row have to do for T tokens of K experts each."""
        if self._fused is not None:
            flat_P = index_TK.ravel().tolist()
            if has_few_rows(flat_P, len(index_TK)):
                return FusedRows(self._fused, flat_P, x_TD, top_k_weights_TK)
        rows = RoutedRows(index_TK, is_eager=bool(self._is_eager))
        rows.gather(
            x_TD,
            top_k_weights_TK,
            weighs_input=self._weighs_input,
            devices=self._slots.devices,
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


def has_few_rows(flat_P: list[int], num_tokens: int) -> bool:
    """Whether no expert has more than kernels are good for, and no pair is without one."""
    if not flat_P or NO_EXPERT in flat_P:
        return False
    return num_tokens <= FUSED_ROWS or max(Counter(flat_P).values()) <= FUSED_ROWS


def fused_row(row: ExpertsModule, recipes: RowRecipes) -> FusedExperts | None:
    """None if its experts can only be computed one by one."""
    if not _is_plain_gate(row) or (weights := _gated_weights(recipes)) is None:
        return None
    from moe_infinity.kernels.experts_cpu import fused_experts

    up, down = weights
    return fused_experts(up, down, activation=_activation(row))


def slot_row(row: ExpertsModule, recipes: RowRecipes) -> SlotMlp | None:
    """None if kernels of a device do not read its experts."""
    if _is_gpt_oss(row):
        return _slot_row_of_gpt_oss(row, recipes)
    if not _is_plain_gate(row) or (weights := _gated_weights(recipes)) is None:
        return None
    up, down = weights
    return slot_mlp(up, down[0], activation=_activation(row)) if len(down) == 1 else None


def _slot_row_of_gpt_oss(row: ExpertsModule, recipes: RowRecipes) -> SlotMlp | None:
    """Packed; weights that are not lie transposed in a slot, which no kernel reads."""
    biases = {
        spec.name: StoredPart(spec.offset, getattr(torch, spec.dtype), spec.shape)
        for recipe in recipes.recipes
        for spec in recipe.stored
        if not recipe.is_packed
    }
    if biases.keys() != {"gate_up_proj_bias", "down_proj_bias"}:
        return None
    if (weights := _gated_weights(recipes, *biases, is_transposed=True)) is None:
        return None
    ((up,), (down,)), known = weights, vars(row.module)
    return slot_mlp(
        [up],
        down,
        activation="swiglu_oai",
        up_bias=[biases["gate_up_proj_bias"]],
        down_bias=biases["down_proj_bias"],
        is_interleaved=True,
        alpha=float(known["alpha"]),
        limit=float(known["limit"]),
    )


def _activation(row: ExpertsModule) -> str:
    return ACTIVATIONS[type(row.module.act_fn).__name__]


def _gated_weights(
    recipes: RowRecipes, *beside: str, is_transposed: bool = False
) -> tuple[list[StoredWeight], list[StoredWeight]] | None:
    """Gate and up, and down, as they lie in a slot; nothing but `beside` may be there, too."""
    by_name = {
        spec.name: _stored(recipe, is_transposed=is_transposed)
        for recipe in recipes.recipes
        for spec in recipe.targets.values()
    }
    up, down = by_name.get("gate_up_proj"), by_name.get("down_proj")
    if len(by_name) != 2 + len(beside) or up is None or down is None:
        return None
    return up, down


def _is_gpt_oss(row: ExpertsModule) -> bool:
    """Gate and up in turn, biases, and a gate that clamps: the class and no other."""
    kind = type(row.module)
    return f"{kind.__module__}.{kind.__name__}" == GPT_OSS_EXPERTS and vars(row.module).keys() >= {
        "alpha",
        "limit",
    }


def _is_plain_gate(row: ExpertsModule) -> bool:
    module, known = row.module, vars(row.module)
    return (
        row.adapter is INTERFACE
        and known["has_gate"]
        and known["is_concatenated"]
        and not known["has_bias"]
        and not known["is_transposed"]
        and not known.get("has_post_expert_norm")
        and getattr(type(module), "_apply_gate", None) is moe._default_apply_gate
        and type(getattr(module, "act_fn", None)).__name__ in ACTIVATIONS
    )


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
        if kind is None or len(spec.shape) != 2 or is_transposed:
            return None
        return [StoredWeight(kind, (spec.shape[0], spec.shape[1]), {"": part(spec, spec.shape)})]
    weights = []
    for piece in recipe.pieces_in_slot(is_transposed=is_transposed):
        kind, (num_rows, num_columns) = PACKED.get(piece.scheme.name), piece.shape
        if kind is None:
            return None
        parts = {role: part(spec, shape) for role, (spec, shape) in piece.parts.items()}
        weights.append(StoredWeight(kind, (num_rows, num_columns), parts, piece.block))
    return weights or None
