"""A shared expert: the MLP of a decoder layer that every token uses, beside its router and experts.
decoder_call.py computes it in the calls that choose the experts.

    router     one product of the norm with the router's weight, gate, up and scale   reads all of x
    choice     activation(gate) * up, times the sigmoid of scale
    shared     its product with down                                                  float32

Legend: B sequences, D model width, E experts, F width of the shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from numba import types
from torch import Tensor, nn

from moe_infinity.kernels.cpu.activations import activate_lanes
from moe_infinity.kernels.cpu.arrangement import Arrangement, arrange
from moe_infinity.kernels.cpu.compiler import c_function, reader_of
from moe_infinity.kernels.cpu.linear import product_of
from moe_infinity.kernels.cpu.vectors import LANES, float_at, put_float, sigmoid
from moe_infinity.kernels.reference import Activation
from moe_infinity.layout import PackedWeight

Weight = Tensor | PackedWeight

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

_arrangement_at = reader_of(Arrangement)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The weights of a shared expert. Called with tensors it is the reference of the kernel."""

    gate: Weight  # [F, D]
    up: Weight  # [F, D]
    down: Weight  # [D, F]
    scale: Weight | None  # [1, D]: the sigmoid of its product scales the output
    activation: Activation

    @classmethod
    def of(
        cls,
        modules: Sequence[nn.Module],
        activation: Activation,
        is_linear: Callable[[Any], bool],
        weight_of: Callable[[Any], Weight],
    ) -> SharedExpert | None:
        """The expert that these modules are: an MLP, and perhaps a linear layer beside it. None for
        others, for those with biases or further weights, and unless kernels read the weights.
        """
        mlps = [module for module in modules if not is_linear(module)]
        scales = [module for module in modules if is_linear(module)]
        if len(mlps) != 1 or len(scales) > 1:
            return None
        linears = [*(getattr(mlps[0], name, None) for name in PROJECTIONS), *scales]
        if not all(map(is_linear, linears)):
            return None
        weights = [*map(weight_of, linears)]
        num_plain = sum(isinstance(weight, Tensor) for weight in weights)
        if num_plain != sum(len([*module.parameters()]) for module in modules):
            return None
        gate, up, down, *scale = weights
        expert = cls(gate, up, down, scale[0] if scale else None, activation)
        return expert if expert._is_read else None

    @property
    def _is_read(self) -> bool:
        first = product_of(self.weights)
        last = product_of([self.down])
        if first is None or last is None:
            return False
        shapes = [(len(self.gate), first.num_columns), (len(self.up), last.num_rows)]
        is_one = self.scale is None or len(self.scale) == 1
        return is_one and shapes == [(last.num_columns, last.num_rows)] * 2

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that multiply what the router's does."""
        return self.gate, self.up, *(() if self.scale is None else (self.scale,))

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]"""
        gate, up, *scales = (x_TD @ _plain(weight, x_TD.dtype).T for weight in self.weights)
        out = self.activation(gate, up) @ _plain(self.down, x_TD.dtype).T
        return out * torch.sigmoid(scales[0]) if scales else out

    def unit(self, x_TD: Tensor) -> float:
        """The number to multiply x with so that its products with gate have a deviation of 1."""
        return 1 / (x_TD @ _plain(self.gate, x_TD.dtype).T).std().item()


def _plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.unpacked(dtype)


@cache
def input_function() -> Any:
    """The C function that makes the input of down of one sequence, arranged, from its row of the
    first product, whose memory it changes and reads up to a vector beyond.
    """

    @c_function(types.void(*[types.int64] * 7), "shared_input")
    def run(
        row: int, width: int, is_scaled: int, function: int, numbers: int, arranged_by: int, to: int
    ) -> None:
        for f in range(0, width, LANES):
            activate_lanes(row, f, width - f, width, 1, function, numbers)
        if is_scaled:
            scale = sigmoid(float_at(row, 2 * width))
            for f in range(width):
                put_float(row, f, float_at(row, f) * scale)
        arrange(row, 0, to, 1, _arrangement_at(arranged_by))

    return run
