"""Modules of a model that compute in fewer kernels than their own code launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from moe_infinity.gpu.attention_modules import fuse_attention
from moe_infinity.gpu.kernels import Kernels
from moe_infinity.gpu.residuals import find_norms, fuse_layers
from moe_infinity.gpu.routers import fuse_mlps, fuse_routers


class FusedModules:
    """Other forward methods for modules, which they have inside `installed()`."""

    def __init__(self, model: nn.Module, kernels: Kernels) -> None:
        norms = find_norms(model, kernels)
        self.forwards: list[tuple[nn.Module, Callable[..., Any]]] = [
            *((module, norm.forward) for module, norm in norms.items()),
            *fuse_attention(model, kernels),
            *fuse_routers(model, kernels),
            *fuse_mlps(model, kernels),
            *fuse_layers(model, norms),
        ]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the modules compute in few kernels."""
        for module, forward in self.forwards:
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module, _ in self.forwards:
                vars(module).pop("forward", None)
