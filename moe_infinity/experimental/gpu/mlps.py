"""MLPs that every token uses, on a GPU: dense ones and shared experts. One product for gate and up,
one kernel for what is between the products, and the product of down.

Which modules these are is found by trying: with the products taken out, a module has to compute an
activation that kernels know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moe_infinity.architectures.adapters import find_activation
from moe_infinity.architectures.trial import Found
from moe_infinity.experimental.gpu.kernels import Kernels
from moe_infinity.kernels.activation import Activation

PRODUCTS = ("gate_proj", "up_proj", "down_proj")


class FusedMlp:
    """In place of the forward method of one MLP."""

    def __init__(self, module: Any, activation: Activation, kernels: Kernels) -> None:
        self._stock: Callable[[Tensor], Tensor] = module.forward
        self._activation = activation
        self._kernels = kernels
        self._module = module
        self._products = [module.get_submodule(name) for name in PRODUCTS]
        self.weight, self.bias = joined(self._products[:2])

    def forward(self, x: Tensor) -> Tensor:
        """Compute as the stock method does."""
        named = dict(zip(PRODUCTS, self._products, strict=True))
        if torch.is_grad_enabled() or not is_as_before(self._module, named):
            return self._stock(x)
        columns_TC = linear(x.flatten(0, -2), self.weight, self.bias)
        hidden = self._kernels.gated(columns_TC, self._activation).unflatten(0, x.shape[:-1])
        out: Tensor = self._module.down_proj(hidden)
        return out


def is_as_before(module: nn.Module, children: dict[str, nn.Module]) -> bool:
    """Return True if no child was replaced, and none has a hook."""
    return all(
        module.get_submodule(name) is child
        and not (child._forward_hooks or child._forward_pre_hooks)
        for name, child in children.items()
    )


def fuse_mlps(model: nn.Module, kernels: Kernels) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield the MLPs that kernels can compute, each with its new forward method."""
    for module in list(model.modules()):
        children = dict(module.named_children())
        if all(type(children.get(name)) is nn.Linear for name in PRODUCTS):
            activation = activation_of(module)
            if activation is not None:
                yield module, FusedMlp(module, activation, kernels).forward


def activation_of(module: nn.Module) -> Activation | None:
    """Return what a module computes between its products; None if kernels do not."""
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


def joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weights of layers with the same input as one, for one product in place of several.
    Each layer's own weight becomes a piece of it, and so its bias. Where only some have a bias the
    others' is 0.
    """
    sizes = [each.out_features for each in linears]
    with torch.no_grad():
        weight = torch.cat(tuple(each.weight for each in linears))
        bias = None
        if any(each.bias is not None for each in linears):
            biases = (_bias_of(each) for each in linears)
            bias = torch.cat(tuple(biases))
    for each, part in zip(linears, weight.split(sizes), strict=True):
        each.weight.data = part
    if bias is not None:
        for each, part in zip(linears, bias.split(sizes), strict=True):
            if each.bias is not None:
                each.bias.data = part
    return weight, bias


def _bias_of(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
