"""One expert's MLP on the rows routed to it, in plain PyTorch: the definition that every faster
kernel is tested against.

T tokens, R rows of one expert, D model width, F expert width. Weights come by name, without the
expert dimension: gate_up_proj [2F, D] (or up_proj [F, D]) and down_proj [D, F]; transposed where
the architecture stores them so. A weight that is not transposed may be a list of matrices, one
below the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Weight = Tensor | list[Tensor]


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """[R, D] -> [R, D], called with the weights of one expert and its rows."""

    experts: Any  # the architecture's own experts module: it knows its activation and its layout

    def __call__(self, weights: Mapping[str, Weight], x_RD: Tensor) -> Tensor:
        return self.down(weights, self.activate(self.up(weights, x_RD)))

    def up(self, weights: Mapping[str, Weight], x_RD: Tensor) -> Tensor:
        """[R, D] -> [R, 2F], or [R, F] without a gate."""
        name = "gate_up_proj" if self.experts.has_gate else "up_proj"
        return _linear(self.experts, weights, name, x_RD)

    def activate(self, hidden: Tensor) -> Tensor:
        """[R, 2F] or [R, F] -> [R, F]."""
        experts = self.experts
        out: Tensor = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        return out

    def down(self, weights: Mapping[str, Weight], hidden_RF: Tensor) -> Tensor:
        """[R, F] -> [R, D]."""
        out = _linear(self.experts, weights, "down_proj", hidden_RF)
        if vars(self.experts).get("has_post_expert_norm"):  # since transformers 5.23
            out = self.experts.post_expert_norm(out)
        return out


def _linear(experts: Any, weights: Mapping[str, Weight], name: str, x: Tensor) -> Tensor:
    weight = weights[name]
    if isinstance(weight, list):
        out = torch.cat([torch.mm(x.to(part.dtype), part.t()) for part in weight], dim=1)
    else:
        out = torch.mm(x.to(weight.dtype), weight if experts.is_transposed else weight.t())
    if experts.has_bias:
        bias = weights[name + "_bias"]
        assert isinstance(bias, Tensor), name
        out += bias
    return out


FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu2")


@dataclass(frozen=True, slots=True)
class Activation:
    """Called with tensors it is the reference that kernels are tested against."""

    function: str = "silu"
    is_gated: bool = True
    alpha: float = 1.0  # of silu: x * sigmoid(alpha * x)
    shift: float = 0.0
    limit: float = math.inf

    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Gate and up have one shape and dtype. Without a gate, `gate` is the output of up."""
        x = gate.clamp(max=self.limit)
        if self.function == "silu":
            hidden = x * torch.sigmoid(self.alpha * x)
        elif self.function == "relu2":
            hidden = x.relu().square()
        else:
            kind = "tanh" if self.function == "gelu_tanh" else "none"
            hidden = F.gelu(x, approximate=kind)
        return hidden if up is None else hidden * (up.clamp(-self.limit, self.limit) + self.shift)
