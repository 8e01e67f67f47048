"""Which rows go to which expert, and the sum over a token's experts in a fixed order.

Two of transformers' implementations are reproduced bit for bit, in whatever order experts come:

    grouped_mm  (its default on CPU)  rows of an expert as torch.sort leaves them;
                                      a token's K outputs summed as one reduction
    eager       (the class's loop)    rows of an expert in (k, token) order;
                                      outputs added one by one by expert id

T tokens, K experts per token, P = T * K (token, k) pairs, D model width, R rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from moe_infinity.experts import Ints

NO_EXPERT = -1  # in place of an expert id: the pair has none
ExpertMlp = Callable[..., Tensor]  # (weights of one expert by name, its rows [R, D]) -> [R, D]


class ExpertWork(Protocol):
    """What the experts of one layer have to do in one step."""

    activated: list[int]  # distinct expert ids

    @property
    def counts(self) -> Ints | int:
        """Tokens routed to each activated expert; 1 if to all of them."""

    def compute(self, expert_idx: int, mlp: ExpertMlp, weights: Any) -> None:
        """Run this expert on its rows and keep the output."""


class RoutedRows:
    """The rows of one layer in one step, sorted by expert; collects outputs expert by expert."""

    def __init__(self, top_k_index_TK: Ints, *, is_eager: bool) -> None:
        self._index_TK = top_k_index_TK
        self._is_eager = is_eager
        flat = (top_k_index_TK.T if is_eager else top_k_index_TK).ravel()
        self._order = flat.argsort(kind="stable") if is_eager else _order_of_stock(flat)
        by_expert = flat[self._order].tolist()
        self._stops = {expert: stop for stop, expert in enumerate(by_expert, start=1)}
        self.num_without = self._stops.pop(NO_EXPERT, 0)  # pairs without an expert: they come first
        self.activated = list(self._stops)  # distinct expert ids, ascending
        # Set by gather(): the rows of each expert, their (token, k) pairs, their inputs, and the
        # weights of all pairs unless they went into the inputs.
        self._rows: dict[int, slice]
        self._pairs_P: Tensor
        self._inputs_PD: Tensor
        self._outputs_PD: Tensor | None = None

    @property
    def counts(self) -> Ints | int:
        """Tokens routed to each activated expert; 1 if to all of them."""
        if len(self._index_TK) == 1:
            return 1
        return np.diff(list(self._stops.values()), prepend=self.num_without)

    def gather(
        self,
        x_TD: Tensor,
        top_k_weights_TK: Tensor,
        *,
        weighs_input: bool = False,
    ) -> None:
        """Copy the rows of every expert next to each other. Weights scale what comes out of an
        expert, or what goes in.
        """
        num_tokens, top_k = self._index_TK.shape
        stops = self._stops.values()
        starts = (self.num_without, *stops)
        self._rows = dict(zip(self._stops, map(slice, starts, stops), strict=False))
        order = self._order
        if self._is_eager:  # its pairs are counted k first
            order = order % num_tokens * top_k + order // num_tokens
        self._pairs_P = torch.from_numpy(order).to(x_TD.device)
        tokens_P = self._pairs_P // top_k
        self._inputs_PD = x_TD[tokens_P]
        self._weights_P1: Tensor | None = top_k_weights_TK.reshape(-1, 1)
        if weighs_input:
            scales_P1, self._weights_P1 = self._weights_P1[self._pairs_P], None
            self._inputs_PD = self._inputs_PD * scales_P1

    def inputs_of(self, expert_idx: int) -> Tensor:
        """[R, D]: the rows routed to this expert. gather() comes first."""
        return self._inputs_PD[self._rows[expert_idx]]

    def compute(self, expert_idx: int, mlp: ExpertMlp, weights: Any) -> None:
        """Run this expert on its rows and keep the output."""
        self.add(expert_idx, mlp(weights, self.inputs_of(expert_idx)))

    def add(self, expert_idx: int, out_RD: Tensor) -> None:
        """Keep an expert's output, weighted, at the places of its (token, k) pairs."""
        pairs_R = self._pairs_P[self._rows[expert_idx]]
        if self._weights_P1 is not None:
            out_RD = out_RD * self._weights_P1[pairs_R]
        if self._outputs_PD is None:
            make = out_RD.new_zeros if self.num_without else out_RD.new_empty
            self._outputs_PD = make(len(self._pairs_P), out_RD.shape[1])
        self._outputs_PD[pairs_R] = out_RD

    def sum(self, dtype: torch.dtype) -> Tensor:
        """[T, D]: the layer's output, the same bits whatever the order of the `add` calls."""
        num_tokens, top_k = self._index_TK.shape
        if self._outputs_PD is None:
            assert not self._stops, "add() comes first"
            return self._inputs_PD.new_zeros(num_tokens, self._inputs_PD.shape[1], dtype=dtype)
        if not self._is_eager:
            return self._outputs_PD.view(num_tokens, top_k, -1).sum(dim=1).to(dtype)
        total_TD = self._outputs_PD.new_zeros(num_tokens, self._outputs_PD.shape[1], dtype=dtype)
        for rows in self._rows.values():
            pairs_R = self._pairs_P[rows]
            total_TD.index_add_(0, pairs_R // top_k, self._outputs_PD[pairs_R].to(dtype))
        return total_TD


def _order_of_stock(flat: Ints) -> Ints:
    """How stock grouped_mm sorts pairs by expert. With threads the bits of a matrix product depend
    on the place of a row in it, so another order of equal keys would show.

    torch sorts up to 16 elements by insertion, which is stable, and more without being stable; the
    numpy call is eight times faster than torch's on a decode step.
    """
    if len(flat) <= 16:
        return flat.argsort(kind="stable")
    order: Ints = torch.from_numpy(flat).sort().indices.numpy()
    return order
