"""Random experts in slots, computed by Triton's kernels or by their reference, and how far the
result may be from the definition in float64.

Legend: T tokens, K experts per token, D model width, F expert width.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.triton import reference
from moe_infinity.kernels.triton.slot_mlp import SlotMlp, plain_matrix, slot_mlp
from moe_infinity.layout import PLAIN
from tests.kernels.stored_weights import StoredExperts

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.kernels.triton import experts as triton_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON: Any = triton_experts
REFERENCE: Any = SimpleNamespace(
    compute_pairs=reference.compute_pairs, sum_pairs=reference.sum_pairs
)
KERNELS = [pytest.param(REFERENCE, id="reference"), pytest.param(TRITON, id="triton")]
EPS = {dtype: torch.finfo(dtype).eps for dtype in PLAIN.values()}
SILU = Activation("silu")
OF_GPT_OSS = Activation("silu", alpha=1.702, shift=1.0, limit=7.0)


def slot_moe(
    kernels: Any,
    mlp: SlotMlp,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    pointers_E: Tensor,
) -> Tensor:
    """[T, D] -> [T, D]"""
    shape = index_TK.numel(), x_TD.shape[1]
    out_PD = torch.empty(shape, dtype=torch.float32, device=x_TD.device)
    kernels.compute_pairs(mlp, x_TD, index_TK, weights_TK, pointers_E, out_PD)
    found: Tensor = kernels.sum_pairs(mlp, out_PD, index_TK, weights_TK, x_TD.dtype)
    return found


class Experts(StoredExperts):
    """Experts in slots, and routing to them."""

    def __init__(
        self,
        kind,
        width,
        expert_width,
        *,
        act=SILU,
        is_interleaved=False,
        matrix_of=plain_matrix,
        **options,
    ):
        super().__init__(kind, width, expert_width, is_gated=act.is_gated, **options)
        *up, down = self.described
        mlp = slot_mlp(
            up,
            down,
            activation=act,
            is_interleaved=is_interleaved,
            biases=self.described_biases,
            matrix_of=matrix_of,
        )
        assert mlp is not None
        self.mlp, self.act, self.is_interleaved = mlp, act, is_interleaved

    def compute(self, kernels, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        device = "cpu" if kernels is REFERENCE else DEVICE
        slots = self.slots.to(device)
        pointers_E = slots.data_ptr() + torch.arange(len(slots)) * slots.shape[1]
        given = (t.to(device) for t in (x_TD, index_TK, weights_TK, pointers_E))
        return slot_moe(kernels, self.mlp, *given).cpu()

    def largest_error(
        self, found_TD: Tensor, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
    ) -> float:
        """As a share of the bound. A float32 sum of n values in chunks is off by less than
        (n / 8 + 40) eps of the sum of sizes: 40 for a chunk and the tree over threads. An error of
        what activations give reaches the output through |down|. No activation is steeper than 1.2,
        and each rounds less than 16 times. Packed weights, and what activations give, are rounded
        to the dtype of x.
        """
        exact_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
        bound_TD = torch.zeros_like(exact_TD)
        eps = EPS[torch.float32]
        rounding = EPS[x_TD.dtype]
        rounding_of_weights = 0.0 if self.mlp.gate.kind in PLAIN else rounding
        for t, k in torch.cartesian_prod(*map(torch.arange, index_TK.shape)).tolist():
            expert, share = int(index_TK[t, k]), weights_TK[t, k].double()
            if expert < 0:
                continue
            x, (up, down), (up_sizes, down_sizes), biases = (
                x_TD[t].double(),
                self.weights[expert],
                self.sizes[expert],
                [bias.double() for bias in self.biases[expert]],
            )
            if self.mlp.weighs_input:
                x, share = share * x, torch.ones(())
            bias = torch.cat(biases[:-1])
            inner = up.double() @ x + bias
            terms = up_sizes.double() @ x.abs() + bias.abs()
            share_of_terms = (len(x) / 8 + 40) * eps + rounding_of_weights
            hidden, bound = self._activated(inner, share_of_terms * terms)
            bound += rounding * hidden.abs()
            exact_TD[t] += share * (down.double() @ hidden + biases[-1])
            bound = down.double().abs() @ bound
            terms = down_sizes.double() @ hidden.abs() + biases[-1].abs()
            share_of_terms = (len(hidden) / 8 + 40) * eps + rounding_of_weights
            bound_TD[t] += share.abs() * (bound + share_of_terms * terms)
        bound_TD += EPS[found_TD.dtype] * exact_TD.abs()
        return ((found_TD.double() - exact_TD).abs() / bound_TD.clamp(min=1e-30)).max().item()

    def _activated(self, inner: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        def parts(t: Tensor) -> list[Tensor]:
            if self.is_interleaved:
                return [t[0::2], t[1::2]]
            return list(t.chunk(1 + self.act.is_gated))

        (gate, *ups), (gate_bound, *up_bounds) = parts(inner), parts(bound)
        size = gate.clamp(max=self.act.limit).abs()
        if self.act.function == "relu2":
            gate_bound, size = 2 * gate_bound * (size + gate_bound), size.square()
        bound = 1.2 * gate_bound + 16 * EPS[torch.float32] * size
        for up, up_bound in zip(ups, up_bounds, strict=True):
            up_size = up.clamp(-self.act.limit, self.act.limit).abs() + abs(self.act.shift)
            bound = (bound + EPS[torch.float32] * size) * up_size + size * up_bound
        return self.act(gate, *ups), bound


def routing(num_tokens: int, top_k: int, num_experts: int = 4) -> tuple[Tensor, Tensor]:
    index_TK = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    return index_TK, torch.rand(num_tokens, top_k).softmax(dim=1)


def inputs(kind: str, num_tokens: int, width: int) -> Tensor:
    """In the dtype of plain weights; in float32 for packed ones, which are rounded to it."""
    return torch.randn(num_tokens, width).to(PLAIN.get(kind.split()[0], torch.float32))
