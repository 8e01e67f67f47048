"""A part of the work of one MoE layer that another host does: rows of some experts go there, what
the experts make of them comes back. Weights and sums stay here, so the order of a sum is the same.

P rows, I inputs, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_infinity.experts import Ints


class Share(NamedTuple):
    """Rows sorted by expert, in the order in which one process would compute them."""

    expert_idxs: list[int]
    stops: list[int]  # behind the last row of each of these experts
    x_ID: Tensor
    input_P: Tensor  # int64: of each row, which input it has
    by_kernels: bool  # in float32, by our kernels, and not with the bits of transformers

    @classmethod
    def of(
        cls,
        rows_of: dict[int, slice],
        expert_idxs: list[int],
        x_ID: Tensor,
        input_P: Ints,
        *,
        by_kernels: bool,
    ) -> Share:
        """Those experts of a layer's work. `input_P` is for all of its rows."""
        rows = [rows_of[expert_idx] for expert_idx in expert_idxs]
        inputs = np.concatenate([input_P[each] for each in rows])
        used_I, input_P = np.unique(inputs, return_inverse=True)
        stops = np.cumsum([each.stop - each.start for each in rows]).tolist()
        return cls(
            expert_idxs,
            stops,
            x_ID[torch.from_numpy(used_I)],
            torch.from_numpy(input_P),
            by_kernels,
        )

    @property
    def rows_of(self) -> dict[int, slice]:
        """By expert."""
        return dict(zip(self.expert_idxs, map(slice, [0, *self.stops], self.stops), strict=False))
