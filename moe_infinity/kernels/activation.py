"""The activation between the two products of an expert, as a few numbers that kernels are given.
They are found by trying the architecture's own code: no architecture is known by name.

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
TOLERANCE = 1e-6  # relative, below 1 absolute: some architectures round to float32 on the way
LARGE = 1e4  # beyond every limit
TRIED = (0.0, 0.1, 0.6, 1.0, 1.5, 3.0, 5.0, 6.5, 8.0, 12.0, 30.0, LARGE)  # and their negatives


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation. Called with tensors it is the reference that kernels are tested against."""

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


def find_activation(
    compute: Callable[[Tensor], Tensor], *, is_gated: bool
) -> tuple[Activation, bool] | None:
    """The activation that `compute` applies to the outputs of the first product, [R, 2F] or [R, F],
    and True if the columns of gate and up alternate there, instead of all of gate before all of up.
    None: it is no activation that kernels know.
    """
    values = torch.tensor([*TRIED, *(-x for x in TRIED)], dtype=torch.float64, device="cpu")
    gate, up = (axis.flatten() for axis in torch.meshgrid(values, values, indexing="ij"))
    if not is_gated:
        found = _match(lambda gate, _: compute(gate[None])[0], gate, up, is_gated=False)
        return None if found is None else (found, False)
    for is_interleaved in (False, True):
        arranged = _interleaved if is_interleaved else torch.cat

        def apply(
            gate: Tensor, up: Tensor, arranged: Callable[[list[Tensor]], Tensor] = arranged
        ) -> Tensor:
            return compute(arranged([gate, up])[None])[0]

        found = _match(apply, gate, up, is_gated=True)
        if found is not None:
            return found, is_interleaved
    return None


def _interleaved(halves: list[Tensor]) -> Tensor:
    return torch.stack(halves, -1).flatten()


def _match(
    apply: Callable[[Tensor, Tensor], Tensor], gate: Tensor, up: Tensor, *, is_gated: bool
) -> Activation | None:
    """The activation that gives what `apply` gives."""
    try:
        outputs = apply(gate, up)
        if outputs.shape != gate.shape:
            return None
        alpha, shift, limit = _measured(apply, is_gated=is_gated)
    except Exception:  # the model's code may want parameters, another dtype or another width
        return None
    for function in FUNCTIONS:
        found = Activation(function, is_gated, 1.0, shift, limit)
        if function == "silu":
            found = replace(found, alpha=alpha)
        expected = found(gate, up if is_gated else None)
        if ((outputs - expected).abs() <= TOLERANCE * expected.abs().clamp(min=1)).all():
            return found
    return None


def _measured(
    apply: Callable[[Tensor, Tensor], Tensor], *, is_gated: bool
) -> tuple[float, float, float]:
    """Measure alpha, shift and limit, as they would be for silu."""
    up = torch.tensor([0.0, 1.0, LARGE], dtype=torch.float64, device="cpu")
    none, one, most = apply(torch.ones_like(up), up).tolist()
    slope = one - none if is_gated else one  # what the gate gives for 1
    alpha = math.log(slope / (1 - slope)) if 0 < slope < 1 else 1.0
    if not is_gated or slope == 0:
        return _rounded(alpha), 0.0, math.inf
    shift = none / slope
    limit = (most - none) / slope
    return _rounded(alpha), _rounded(shift), math.inf if limit > LARGE / 2 else _rounded(limit)


def _rounded(number: float) -> float:
    """The number to 6 digits, which is how it stands in the model's code."""
    return float(f"{number:.6g}")
