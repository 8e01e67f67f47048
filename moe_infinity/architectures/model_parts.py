"""The modules of a model that kernels can compute: linear layers, whose weights may stay packed as
the checkpoint stores them, and the children of a decoder layer.

A decode step reads every dense weight, so packed ones make it faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from moe_infinity.architectures.adapters import CALL_ATTRIBUTE, MoeLayer
from moe_infinity.architectures.stored_embedding import KeepsStoredWeight, StoredWeight
from moe_infinity.layout import PackedWeight

NORM = "input_layernorm"
ATTENTION = "self_attn"
LINEAR_ATTENTION = "linear_attn"
RESIDUAL_NORM = "post_attention_layernorm"


class PackedLinear(KeepsStoredWeight, nn.Linear):
    """A linear layer in the place of an `nn.Linear`. Kernels read `packed`; whoever computes with
    `weight` gets it unpacked, anew each time, and an error for a change of it.
    """

    def __init__(self, linear: nn.Linear, packed: PackedWeight, dtype: torch.dtype) -> None:
        """`dtype` is what the weight is unpacked to."""
        nn.Module.__init__(self)  # without a weight
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.register_parameter("bias", linear.bias)
        self.packed = packed
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[R, C]"""
        shape = self.out_features, self.in_features
        return StoredWeight.of(shape, self.dtype, self.packed.unpacked)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.packed.unpacked(self.dtype), self.bias)


class ReorderedLinear(PackedLinear):
    """A linear layer whose packed weight has its columns in another order. A block of packed
    numbers has columns of several heads, so the input is brought into that order for `linear`. That
    is no child: an adapter around all linear layers is around this one.
    """

    linear: PackedLinear

    def __init__(self, linear: PackedLinear, columns: Tensor) -> None:
        """`columns` [C] says which of the packed weight's columns belongs to each input."""
        super().__init__(linear, linear.packed, linear.dtype)
        linear.register_parameter("bias", None)  # it is this layer's
        vars(self)["linear"] = linear
        self._columns = columns
        self.inputs = columns.argsort()  # which input belongs to each packed column

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[R, C]"""
        own = self.linear.weight
        return StoredWeight.of(own.shape, own.dtype, lambda dtype: own.to(dtype)[:, self._columns])

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.linear(input[..., self.inputs])
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.linear._apply(fn, recurse)
        return super()._apply(fn, recurse)


Linear = nn.Linear | PackedLinear
PLAIN_TENSORS = {nn.Parameter, Tensor, type(None)}


def is_linear(module: object) -> TypeGuard[Linear]:
    """Return True for modules that multiply with a weight, add a bias, and do no more. A class
    derived from `nn.Linear` may do anything, and so may one derived from `Tensor`, as those of
    torchao are.
    """
    return type(module) in (nn.Linear, PackedLinear) and PLAIN_TENSORS.issuperset(
        map(type, vars(module)["_parameters"].values())
    )


def weight_of(linear: Linear) -> Tensor | PackedWeight:
    """Return the weight as kernels read it."""
    return linear.packed if isinstance(linear, PackedLinear) else linear.weight.detach()


def bytes_by_type(model: nn.Module) -> dict[str, int]:
    """Return the bytes of all weights in memory except experts', by dtype or kind of packing, the
    largest first.
    """
    sizes: Counter[str] = Counter()
    for param in model.parameters():
        sizes[str(param.dtype).removeprefix("torch.")] += param.nbytes
    for module in model.modules():
        if isinstance(module, PackedLinear):
            sizes[module.packed.layout.kind] += module.packed.nbytes
    return dict(sizes.most_common())


def rotations_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute the cosines and sines of positions."""
    return [m for m in model.modules() if hasattr(m, "inv_freq") and not list(m.children())]


def attention_of(layer: nn.Module) -> nn.Module:
    """Return the child of a decoder layer that looks at earlier tokens."""
    children = dict(layer.named_children())
    return children[ATTENTION if ATTENTION in children else LINEAR_ATTENTION]


def feed_forward(layer: nn.Module) -> nn.Module:
    """Return the child of a decoder layer that computes after attention."""
    others = {NORM, ATTENTION, LINEAR_ATTENTION, RESIDUAL_NORM}
    (name,) = {name for name, _ in layer.named_children()} - others
    module: nn.Module = layer.get_submodule(name)
    return module


def router_of(block: nn.Module) -> nn.Module | None:
    """Return the child that has a weight [E, D] and code of its own; None if there is not one."""
    routers = [
        child
        for child in block.children()
        if not is_linear(child)
        and not list(child.children())
        and [name for name, param in child.named_parameters() if param.dim() == 2] == ["weight"]
    ]
    return routers[0] if len(routers) == 1 else None


def experts_of(block: nn.Module) -> MoeLayer | None:
    """Return what calls the engine for the only MoE layer in a block; None if there is not one."""
    calls = [vars(child).get(CALL_ATTRIBUTE) for child in block.children()]
    layers = [call for call in calls if call is not None]
    return layers[0] if len(layers) == 1 else None
