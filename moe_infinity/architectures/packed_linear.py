"""Linear layers whose weights stay packed as the checkpoint has them. A decode step reads every
dense weight, so its speed is that of reading them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from moe_infinity.layout import PackedWeight


class PackedLinear(nn.Module):
    """In the place of an `nn.Linear`. Kernels read `packed`; whoever else asks for `weight` gets it
    unpacked, anew each time.
    """

    def __init__(self, linear: nn.Linear, packed: PackedWeight, dtype: torch.dtype) -> None:
        """`dtype` is what the weight is unpacked to."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.packed = packed
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """[R, C]"""
        return self.packed.unpacked(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Also what casts a module, as `float()`: the weight stays as it is stored."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


Linear = nn.Linear | PackedLinear


def is_linear(module: object) -> TypeGuard[Linear]:
    """Whether it multiplies with a weight and adds a bias, no more: no class made of `nn.Linear`
    is known to.
    """
    return type(module) in (nn.Linear, PackedLinear)


def weight_of(linear: Linear) -> Tensor | PackedWeight:
    """What kernels read."""
    return linear.packed if isinstance(linear, PackedLinear) else linear.weight.detach()


def bytes_by_type(model: nn.Module) -> dict[str, int]:
    """Of the weights in memory that are no experts', the most first; packed ones by their kind."""
    sizes: Counter[str] = Counter()
    for param in model.parameters():
        sizes[str(param.dtype).removeprefix("torch.")] += param.nbytes
    for module in model.modules():
        if isinstance(module, PackedLinear):
            sizes[module.packed.layout.kind] += module.packed.nbytes
    return dict(sizes.most_common())
