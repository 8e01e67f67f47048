"""What surrounds the experts in a decode step on a CPU, computed by kernels made for few tokens.
Not with exact=True, since the bits are not those of transformers.

    linear layers   kernels/cpu/linear.py
    attention       kernels/cpu/attention.py
    threads         kernels have them all, torch has one; see kernels/cpu/threads.py

Longer inputs are computed by torch, as ever. The "sdpa" function in transformers' registry is
shared by all models, so it is wrapped once, and calls it for modules of other models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_infinity.architectures.decoder_layers import use_kernels
from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.architectures.packed_linear import Linear, PackedLinear, is_linear, weight_of
from moe_infinity.kernels.cpu.attention import attend
from moe_infinity.kernels.cpu.linear import fused_linear
from moe_infinity.kernels.cpu.team import give_torch_all, leave_torch_one
from moe_infinity.kernels.many_rows import MOST_TOKENS, is_for_torch
from moe_infinity.layout import PackedWeight

MARK = "_moe_infinity_takes_small_batches"  # set on every module of a model that we run
Attention = Callable[..., tuple[Tensor, Tensor | None]]


class SmallBatchSteps:
    """Lets kernels of ours compute the steps of few tokens of a model."""

    def __init__(self, model: nn.Module, early_router: EarlyRouter | None) -> None:
        use_kernels(model, early_router)
        for module in model.modules():
            siblings = Siblings()
            for child in module.children():
                if is_linear(child):
                    vars(child)["forward"] = partial(siblings.forward, child)
            vars(module)[MARK] = True
        _wrap_sdpa()
        self._model = model
        stock = model.forward

        @wraps(stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = [*map(kwargs.get, ("decoder_input_ids", "input_ids", "inputs_embeds")), *args]
            inputs = next((value for value in given if isinstance(value, Tensor)), None)
            try:
                if inputs is not None and inputs.shape[:2].numel() <= MOST_TOKENS:
                    leave_torch_one()
                return stock(*args, **kwargs)
            finally:  # also after Ctrl-C, for which torch calls no hook
                give_torch_all()

        vars(model)["forward"] = forward

    def close(self) -> None:
        vars(self._model).pop("forward", None)


class Siblings:
    """The linear layers of one module. Some are given the very same tensor one after the other, as
    those of queries, keys and values are. From then on they are computed together, when the first
    of them is called. Not under torch.inference_mode, where a tensor has no version, so that a
    change of it in place between two calls would not be noticed.
    """

    def __init__(self) -> None:
        self._x: Tensor | None = None  # the last input, and which layer it was given to first
        self._version: int | None = None  # of its contents
        self._first: Linear | None = None
        self._groups: dict[Linear, LinearGroup] = {}  # by their first
        self._waiting: dict[Linear, Tensor] = {}  # products with x not yet returned

    def forward(self, linear: Linear, x: Tensor) -> Tensor:
        """By the kernel for few tokens without gradients, else by torch."""
        rows = x.shape[:-1]
        is_packed = isinstance(linear, PackedLinear)
        is_long = is_for_torch(rows.numel(), x.dtype, is_packed=is_packed)
        if is_long or torch.is_grad_enabled():
            return nn.functional.linear(x, linear.weight, linear.bias)
        version = None if x.is_inference() else x._version
        is_same = x is self._x and version is not None and version == self._version
        if not is_same or linear is self._first:
            self._x = x
            self._version = version
            self._first = linear
            self._waiting = self._multiply(linear, x)
        elif linear not in self._waiting:
            self._waiting |= self._multiply(linear, x)
            self._join(linear)
        if linear not in self._waiting:
            return nn.functional.linear(x, linear.weight, linear.bias)
        out = self._waiting.pop(linear)
        if linear.bias is not None:
            out = out + linear.bias
        # Without gaps, whether computed alone or together: torch's activations round by that.
        return out.to(x.dtype).contiguous().view(*rows, -1)

    def _multiply(self, linear: Linear, x: Tensor) -> dict[Linear, Tensor]:
        """The products of x with each layer of the group that `linear` is in, float32. Empty if
        kernels do not read the weight.
        """
        group = self._groups.get(linear)
        if group is None or not group.is_current:
            group = self._groups[linear] = LinearGroup([linear])
        return group.multiply(x)

    def _join(self, linear: Linear) -> None:
        """Next time, compute this layer with the first."""
        assert self._first is not None
        group = LinearGroup([*self._groups[self._first].linears, linear])
        if group.fused is not None:
            self._groups[self._first] = group


class LinearGroup:
    """Layers that are computed together."""

    def __init__(self, linears: list[Linear]) -> None:
        self.linears = linears
        weights = [weight_of(linear) for linear in linears]
        self._made_for = list(map(_identity, weights))
        self.fused = fused_linear(weights)

    @property
    def is_current(self) -> bool:
        """Whether the weights are still those that it was made for: not moved, not cast."""
        return all(
            _identity(weight_of(linear)) == made_for
            for linear, made_for in zip(self.linears, self._made_for, strict=True)
        )

    def multiply(self, x: Tensor) -> dict[Linear, Tensor]:
        """[..., C] -> [T, R] of each layer."""
        if self.fused is None:
            return {}
        out_TR = self.fused(x.reshape(-1, x.shape[-1]))
        outs = out_TR.split([len(weight) for weight in self.fused.weights], dim=1)
        return dict(zip(self.linears, outs, strict=True))


def _identity(weight: Tensor | PackedWeight) -> tuple[int, torch.dtype]:
    memory = weight.memory if isinstance(weight, PackedWeight) else weight
    return memory.data_ptr(), memory.dtype


def _wrap_sdpa() -> None:
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(stock, _SmallBatchSdpa):
        AttentionInterface.register("sdpa", _SmallBatchSdpa(stock))


class _SmallBatchSdpa:
    """In place of transformers' function: by the kernel where a head has one query."""

    def __init__(self, stock: Attention) -> None:
        self._stock = stock

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, H, 1, d], [B, G, N, d], [B, G, N, dv] -> [B, 1, H, dv]."""
        is_ours = MARK in vars(module) and query.shape[2] == 1 and not torch.is_grad_enabled()
        if is_ours and kwargs.get("position_bias") is None and not kwargs.get("dropout"):
            scale = kwargs.get("scaling") or query.shape[3] ** -0.5
            out = attend(query, key, value, attention_mask, scale)
            if out is not None:
                return out[:, None], None
        return self._stock(module, query, key, value, attention_mask, **kwargs)
