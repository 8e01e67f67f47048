"""How the experts of one MoE row compute once they are in their slots.

    all that arrived together, in one call     kernels/cpu/experts.py, for few rows
    one by one, unpacked if they are packed    as the class does, kernels/reference.py

The first is for experts that are two products with an activation between them that kernels know
(kernels/activation.py), whatever class they are of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.checkpoint.recipe import LayerRecipes
from moe_infinity.engine.expert_kernels import fused_layer
from moe_infinity.engine.fused_rows import FUSED_ROWS, FusedRows
from moe_infinity.engine.routing import NO_EXPERT, ExpertWork, RoutedRows
from moe_infinity.experts import ExpertKey
from moe_infinity.kernels import has_packed_kernels
from moe_infinity.memory.host import Slots

if TYPE_CHECKING:
    pass

# Unpacking an expert costs as much as so many of its rows, multiplied one by one.
PACKED_ROWS = 16

Work = ExpertWork | FusedRows


class LayerComputer:
    """Computes experts of one row from their slots, as `experts_implementation` tells."""

    def __init__(
        self,
        row: ExpertsModule,
        recipes: LayerRecipes,
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
        self._fused = fused_layer(row, recipes) if is_fused else None
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
