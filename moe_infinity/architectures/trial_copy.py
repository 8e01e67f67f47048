"""Copies of modules, to try what they compute."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def for_trial(module: nn.Module) -> Any:
    """A copy without hooks: nobody is to be told of a trial."""
    hooks = [h for m in module.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
    nothing: dict[int, Any] = {id(of_module): type(of_module)() for of_module in hooks}
    return copy.deepcopy(module, nothing)


def in_float32(module: nn.Module) -> Any:
    """A copy for a trial."""
    return for_trial(module).float()
