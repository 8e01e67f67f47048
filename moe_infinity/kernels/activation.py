"""The activation that an expert computes between its two products, as a few numbers that kernels
read. architectures/adapters.py finds them by trying out what an architecture computes.

    hidden = function(min(gate, limit)) * (clamp(up, -limit, limit) + shift)        with a gate
    hidden = function(up)                                                         without one
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
