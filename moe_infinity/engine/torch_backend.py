"""The torch backend: experts compute one by one, with the bits of stock transformers.

Two of transformers' implementations are reproduced, in whatever order experts arrive:

    grouped_mm  (its default on CPU)  rows of an expert as torch.sort leaves them;
                                      a token's K outputs summed as one reduction
    eager       (the class's loop)    rows of an expert in (k, token) order;
                                      outputs added one by one by expert id

T tokens, K experts per token, P = T * K (token, k) pairs, D model width, R rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_infinity.experts import Ints, Routing, rows_of_experts

ExpertMlp = Callable[..., Tensor]  # (weights of one expert by name, its rows [R, D]) -> [R, D]
Weights = Mapping[str, Tensor]  # of one expert, by name


class MlpInSteps(NamedTuple):
    """An expert's MLP whose activation is rounded by where its rows are among those of the others:
    grouped_mm activates the rows of all experts at once.
    """

    up: Callable[..., Tensor]  # as `mlp` is called
    activate: Callable[[Tensor], Tensor]
    down: Callable[..., Tensor]  # the same


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Computes the experts of one MoE layer with torch."""

    mlp: ExpertMlp
    weights_of: Callable[[int], Weights]  # that a slot, by its id, holds
    _: KW_ONLY
    is_eager: bool
    weighs_input: bool  # a routing's weights scale what goes into an expert, not what comes out
    in_steps: MlpInSteps | None = None  # for `mlp`, where an expert alone lacks grouped_mm's bits


class TorchWork:
    """One MoE layer in one step: rows sorted by expert, outputs kept by (token, k) pair."""

    def __init__(self, backend: TorchBackend, x_TD: Tensor, routing: Routing) -> None:
        assert routing.top_k_index_TK is not None, routing
        assert routing.top_k_weights_TK is not None, routing
        self._backend = backend
        self._shape_TK = routing.top_k_index_TK.shape
        self._dtype = x_TD.dtype
        self._num_without = routing.num_without
        self.rows_of = rows_of_experts(routing)  # of `inputs_PD`, by expert
        self._pairs_P = torch.from_numpy(self._order(routing.top_k_index_TK)).to(x_TD.device)
        self.inputs_PD = x_TD[self._pairs_P // self._shape_TK[1]]
        self._weights_P1: Tensor | None = routing.top_k_weights_TK.reshape(-1, 1)
        if backend.weighs_input:
            self.inputs_PD = self.inputs_PD * self._weights_P1[self._pairs_P]
            self._weights_P1 = None
        self._outputs_PD: Tensor | None = None
        self._hidden_P: Tensor | None = None  # before the activation, if it is done in steps

    def _order(self, top_k_index_TK: Ints) -> Ints:
        """The pairs, sorted by expert as the reproduced implementation sorts them."""
        if not self._backend.is_eager:
            return _order_of_grouped_mm(top_k_index_TK.ravel())
        num_tokens, top_k = top_k_index_TK.shape
        # Of pairs counted as k * T + token.
        order_P = top_k_index_TK.T.ravel().argsort(kind="stable")
        order: Ints = order_P % num_tokens * top_k + order_P // num_tokens
        return order

    def compute(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute these experts, which lie in these slots, and keep their weighted outputs."""
        backend = self._backend
        if backend.in_steps is not None:
            self._compute_in_steps(backend.in_steps, expert_idxs, slot_ids)
            return
        for expert_idx, slot_id in zip(expert_idxs, slot_ids, strict=True):
            inputs_RD = self.inputs_PD[self.rows_of[expert_idx]]
            self.put(expert_idx, backend.mlp(backend.weights_of(slot_id), inputs_RD))

    def _compute_in_steps(
        self, mlp: MlpInSteps, expert_idxs: Sequence[int], slot_ids: Sequence[int]
    ) -> None:
        """Activate the rows of these experts where they are among those of all."""
        weights_of = self._backend.weights_of
        for expert_idx, slot_id in zip(expert_idxs, slot_ids, strict=True):
            rows = self.rows_of[expert_idx]
            hidden = mlp.up(weights_of(slot_id), self.inputs_PD[rows])
            if self._hidden_P is None:
                self._hidden_P = hidden.new_zeros(len(self._pairs_P), hidden.shape[1])
            self._hidden_P[rows] = hidden
        if self._hidden_P is None:
            return
        activated_PF = mlp.activate(self._hidden_P)
        for expert_idx, slot_id in zip(expert_idxs, slot_ids, strict=True):
            activated_RF = activated_PF[self.rows_of[expert_idx]]
            self.put(expert_idx, mlp.down(weights_of(slot_id), activated_RF))

    def put(self, expert_idx: int, out_RD: Tensor) -> None:
        """Keep the output of an expert, weighted, whatever computed it."""
        pairs_R = self._pairs_P[self.rows_of[expert_idx]]
        if self._weights_P1 is not None:
            out_RD = out_RD * self._weights_P1[pairs_R]
        if self._outputs_PD is None:
            make = out_RD.new_zeros if self._num_without else out_RD.new_empty
            self._outputs_PD = make(len(self._pairs_P), out_RD.shape[1])
        self._outputs_PD[pairs_R] = out_RD

    def sum(self) -> Tensor:
        """[T, D]: the layer's output, the same bits in whatever order experts were run."""
        num_tokens, top_k = self._shape_TK
        if self._outputs_PD is None:
            assert not self.rows_of, "compute() comes first"
            return self.inputs_PD.new_zeros(num_tokens, self.inputs_PD.shape[1], dtype=self._dtype)
        if not self._backend.is_eager:
            return self._outputs_PD.view(num_tokens, top_k, -1).sum(dim=1).to(self._dtype)
        total_TD = self._outputs_PD.new_zeros(
            num_tokens, self._outputs_PD.shape[1], dtype=self._dtype
        )
        for rows in self.rows_of.values():
            pairs_R = self._pairs_P[rows]
            total_TD.index_add_(0, pairs_R // top_k, self._outputs_PD[pairs_R].to(self._dtype))
        return total_TD


def _order_of_grouped_mm(experts_P: Ints) -> Ints:
    """How stock grouped_mm sorts pairs by expert. With several threads the bits of a matrix product
    depend on where in the matrix a row is, so equal keys need the same order, too.

    torch sorts up to 16 elements by insertion, which is stable, and more without being stable; the
    numpy call is eight times faster than torch's on a decode step.
    """
    if len(experts_P) <= 16:
        return experts_P.argsort(kind="stable")
    order: Ints = torch.from_numpy(experts_P).sort().indices.numpy()
    return order
