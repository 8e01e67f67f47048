"""What trials of a model's modules share: copies, and when two results are the same."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

TOLERANCE = 2e-5  # of the largest number: float32, summed in another order


def for_trial(module: nn.Module) -> Any:
    """A copy without hooks: nobody is to be told of a trial."""
    hooks = [h for m in module.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
    nothing: dict[int, Any] = {id(of_module): type(of_module)() for of_module in hooks}
    return copy.deepcopy(module, nothing)


def in_float32(module: nn.Module) -> Any:
    """A copy for a trial."""
    return for_trial(module).float()


def is_close(found: Tensor, wanted: Tensor) -> bool:
    """Whether two ways to compute in float32 gave the same; False if any number is NaN."""
    is_alike = found.shape == wanted.shape
    return is_alike and bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())
