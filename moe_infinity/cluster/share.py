"""A part of the work of one MoE layer that another host does: rows of some experts go there, what
the experts make of them comes back. Weights and sums stay here, so the order of a sum is the same.

P rows, I inputs, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_infinity.engine.compute import LayerComputer
from moe_infinity.engine.fused import FusedBackend, FusedWork
from moe_infinity.engine.torch_backend import TorchBackend, TorchWork
from moe_infinity.experts import Ints
from moe_infinity.kernels.many_rows import RowPath


class Share(NamedTuple):
    """Rows sorted by expert, in the order in which one process would compute them."""

    expert_idxs: list[int]
    stops: list[int]  # behind the last row of each of these experts
    x_ID: Tensor
    input_P: Tensor  # int64: of each row, which input it has
    path: RowPath | None  # of our kernels; None: with the bits of transformers

    @classmethod
    def of(
        cls,
        rows_of: dict[int, slice],
        expert_idxs: list[int],
        x_ID: Tensor,
        input_P: Ints,
        *,
        path: RowPath | None,
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
            path,
        )

    @property
    def rows_of(self) -> dict[int, slice]:
        """Return the rows of each expert."""
        return dict(zip(self.expert_idxs, map(slice, [0, *self.stops], self.stops), strict=False))

    def outputs(self) -> Tensor:
        """Return [P, D] without data: the shape and dtype of what the experts make of the rows."""
        dtype = torch.float32 if self.path else self.x_ID.dtype
        size = (len(self.input_P), self.x_ID.shape[1])
        return torch.empty(size, dtype=dtype, device="meta")


def share_of(work: FusedWork | TorchWork, expert_idxs: list[int]) -> Share:
    """The rows that these experts have in a layer's work, for another host."""
    if isinstance(work, FusedWork):
        return Share.of(work.rows_of, expert_idxs, work.x_TD, work.input_P, path=work.path)
    input_P = np.arange(len(work.inputs_PD))
    return Share.of(work.rows_of, expert_idxs, work.inputs_PD, input_P, path=None)


def put_share(work: FusedWork | TorchWork, share: Share, out_PD: Tensor) -> None:
    """Hand the outputs of another host to the layer's work."""
    for expert_idx, rows in share.rows_of.items():
        work.put(expert_idx, out_PD[rows])


def work_of_share(computer: LayerComputer, share: Share) -> FusedShareWork | TorchShareWork:
    """Begin the work that a head asked for, with the backend that the head has chosen."""
    if share.path is None:
        return TorchShareWork(computer.by_torch, share)
    assert computer.by_kernels is not None, computer.how
    return FusedShareWork(computer.by_kernels, share)


class FusedShareWork:
    """The rows of a share, computed by kernels."""

    def __init__(self, backend: FusedBackend, share: Share) -> None:
        self._backend = backend
        self._rows_of = share.rows_of
        path = share.path or RowPath.FEW
        self._rows = backend.experts.begin(share.x_ID, len(share.input_P), share.input_P, path=path)

    def compute(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""
        self._backend.compute(self._rows, self._rows_of, expert_idxs, slot_ids)

    def outputs(self) -> Tensor:
        """Return [P, D] in float32, not weighted."""
        return self._rows.out_PD


class TorchShareWork:
    """The rows of a share, computed by torch."""

    def __init__(self, backend: TorchBackend, share: Share) -> None:
        self._backend = backend
        self._rows_of = share.rows_of
        self._inputs_PD = share.x_ID[share.input_P]
        self._outputs: dict[int, Tensor] = {}

    def compute(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their outputs."""
        for expert_idx, slot_id in zip(expert_idxs, slot_ids, strict=True):
            inputs_RD = self._inputs_PD[self._rows_of[expert_idx]]
            weights = self._backend.weights_of(slot_id)
            self._outputs[expert_idx] = self._backend.mlp(weights, inputs_RD)

    def outputs(self) -> Tensor:
        """Return [P, D], not weighted."""
        return torch.cat([self._outputs[expert_idx] for expert_idx in self._rows_of])
