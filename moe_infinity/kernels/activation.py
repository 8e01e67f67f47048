"""What an expert does between its two products, told in numbers: kernels are given them, and
architectures are asked for them by trying what they compute, not known by name.

    hidden = function(min(gate, limit)) * (clamp(up, -limit, limit) + shift)        with a gate
    hidden = function(up)                                                         without one
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu2")
SAME = 1e-6  # apart, of 1 or of the value if it is more: some round to float32 on the way
LARGE = 1e4  # beyond every limit; where a function is asked
ASKED = (0.0, 0.1, 0.6, 1.0, 1.5, 3.0, 5.0, 6.5, 8.0, 12.0, 30.0, LARGE)  # and their negatives


@dataclass(frozen=True, slots=True)
class Activation:
    """Called with tensors it is the definition that kernels are tested against."""

    function: str = "silu"
    is_gated: bool = True
    alpha: float = 1.0  # of silu: x * sigmoid(alpha * x)
    shift: float = 0.0
    limit: float = math.inf

    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Of one shape and dtype; without a gate, the one matrix's outputs alone."""
        x = gate.clamp(max=self.limit)
        if self.function == "silu":
            hidden = x * torch.sigmoid(self.alpha * x)
        elif self.function == "relu2":
            hidden = x.relu().square()
        else:
            kind = "tanh" if self.function == "gelu_tanh" else "none"
            hidden = F.gelu(x, approximate=kind)
        return hidden if up is None else hidden * (up.clamp(-self.limit, self.limit) + self.shift)


def find_activation(
    compute: Callable[[Tensor], Tensor], *, is_gated: bool
) -> tuple[Activation, bool] | None:
    """What `compute` does to the outputs of the first product, [R, 2F] or [R, F], and whether gate
    and up come in turn there instead of one after the other. None: something else.
    """
    values = torch.tensor([*ASKED, *(-x for x in ASKED)], dtype=torch.float64, device="cpu")
    gate, up = (axis.flatten() for axis in torch.meshgrid(values, values, indexing="ij"))
    if not is_gated:
        found = _match(lambda gate, _: compute(gate[None])[0], gate, up, is_gated=False)
        return None if found is None else (found, False)
    for is_interleaved in (False, True):
        arranged = _interleaved if is_interleaved else torch.cat

        def ask(
            gate: Tensor, up: Tensor, arranged: Callable[[list[Tensor]], Tensor] = arranged
        ) -> Tensor:
            return compute(arranged([gate, up])[None])[0]

        found = _match(ask, gate, up, is_gated=True)
        if found is not None:
            return found, is_interleaved
    return None


def _interleaved(halves: list[Tensor]) -> Tensor:
    return torch.stack(halves, -1).flatten()


def _match(
    ask: Callable[[Tensor, Tensor], Tensor], gate: Tensor, up: Tensor, *, is_gated: bool
) -> Activation | None:
    """The activation that gives what `ask` gives."""
    try:
        told = ask(gate, up)
        if told.shape != gate.shape:
            return None
        alpha, shift, limit = _measured(ask, is_gated=is_gated)
    except Exception:  # of anybody's code: it has parameters, or wants another dtype or width
        return None
    for function in FUNCTIONS:
        found = Activation(function, is_gated, 1.0, shift, limit)
        if function == "silu":
            found = replace(found, alpha=alpha)
        expected = found(gate, up if is_gated else None)
        if ((told - expected).abs() <= SAME * expected.abs().clamp(min=1)).all():
            return found
    return None


def _measured(
    ask: Callable[[Tensor, Tensor], Tensor], *, is_gated: bool
) -> tuple[float, float, float]:
    """alpha, shift and limit, were it silu."""
    up = torch.tensor([0.0, 1.0, LARGE], dtype=torch.float64, device="cpu")
    none, one, most = ask(torch.ones_like(up), up).tolist()
    slope = one - none if is_gated else one  # what the gate gives for 1
    alpha = math.log(slope / (1 - slope)) if 0 < slope < 1 else 1.0
    if not is_gated or slope == 0:
        return _rounded(alpha), 0.0, math.inf
    shift = none / slope
    limit = (most - none) / slope
    return _rounded(alpha), _rounded(shift), math.inf if limit > LARGE / 2 else _rounded(limit)


def _rounded(number: float) -> float:
    """As somebody wrote it."""
    return float(f"{number:.6g}")
