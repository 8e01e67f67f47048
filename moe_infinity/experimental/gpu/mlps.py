"""MLPs that every token uses, on a GPU: dense ones and shared experts. One product for gate and up,
one kernel for what is between the products, and the product of down.

Which modules these are is found by trying: with the products taken out, a module has to compute an
activation that kernels know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moe_infinity.architectures.adapters import find_activation
from moe_infinity.architectures.trial import Found
from moe_infinity.experimental.gpu.joined_weights import joined
from moe_infinity.experimental.gpu.kernels import reference
from moe_infinity.kernels import has_triton_kernels
from moe_infinity.kernels.activation import Activation

PRODUCTS = ("gate_proj", "up_proj", "down_proj")

Gated = Callable[[Tensor, Activation], Tensor]


class FusedMlp:
    """In place of the forward method of one MLP."""

    def __init__(self, module: Any, activation: Activation, gated: Gated) -> None:
        self._stock: Callable[[Tensor], Tensor] = module.forward
        self._activation = activation
        self._gated = gated
        self._module = module
        self._products = [module.get_submodule(name) for name in PRODUCTS]
        self.weight, self.bias = joined(self._products[:2])

    def forward(self, x: Tensor) -> Tensor:
        """As the stock method."""
        if torch.is_grad_enabled() or not self._is_as_found():
            return self._stock(x)
        columns_TC = linear(x.flatten(0, -2), self.weight, self.bias)
        hidden: Tensor = self._gated(columns_TC, self._activation).unflatten(0, x.shape[:-1])
        out: Tensor = self._module.down_proj(hidden)
        return out

    def _is_as_found(self) -> bool:
        """Whether nobody has replaced a product, or watches one."""
        return all(
            self._module.get_submodule(name) is own
            and not (own._forward_hooks or own._forward_pre_hooks)
            for name, own in zip(PRODUCTS, self._products, strict=True)
        )


def fuse_mlps(
    model: nn.Module, device: torch.device
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The MLPs that kernels can compute, each with its new forward method."""
    gated = gated_kernel(device)
    for module in list(model.modules()):
        parts = dict(module.named_children())
        if all(type(parts.get(name)) is nn.Linear for name in PRODUCTS):
            activation = activation_of(module)
            if activation is not None:
                yield module, FusedMlp(module, activation, gated).forward


def gated_kernel(device: torch.device) -> Gated:
    """Triton's for a GPU, else the plain reference."""
    if device.type != "cuda" or not has_triton_kernels():
        return reference.gated
    from moe_infinity.experimental.gpu.kernels.gated import gated

    return gated


def activation_of(module: nn.Module) -> Activation | None:
    """None if the module does anything else than kernels do."""
    tried: Any = copy.copy(module)
    halves = {"gate_proj": _Half(0), "up_proj": _Half(1), "down_proj": nn.Identity()}
    tried._modules = {**module._modules, **halves}
    found = find_activation(lambda gate_up: tried.forward(gate_up), is_gated=True)
    return found.path[0] if isinstance(found, Found) and not found.path[1] else None


class _Half(nn.Module):
    """In place of a product: its input has what would come out."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self._which = which

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, -1)[self._which]
