"""What surrounds the experts in a decode step on a CPU, computed by what is made for few rows; part
of experts_implementation="fast", since the bits are not those of transformers.

    linear layers   kernels/linear_cpu.py
    attention       heads that share keys and values in one product: torch's CPU kernel takes them
                    one query at a time, at 1000 tokens 7.5 ms a layer instead of 0.35 (32 heads of
                    128, 4 of keys and values)
    threads         kernels have them all, torch has one; see kernels/threads.py

Longer inputs go the usual way. A shared registry of transformers, its "sdpa" function, is wrapped
once; other models pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_infinity.kernels.linear_cpu import FusedLinear, fused_linear
from moe_infinity.kernels.threads import give_torch_all, leave_torch_one
from moe_infinity.models.computing import FUSED_ROWS

MARK = "_moe_infinity_groups_heads"  # on attention modules of our models
Attention = Callable[..., tuple[Tensor, Tensor | None]]


class LeanSteps:
    """Makes steps of few tokens lean."""

    def __init__(self, model: nn.Module) -> None:
        for module in model.modules():
            if type(module) is nn.Linear and (fused := fused_linear(module.weight)) is not None:
                vars(module)["forward"] = LeanLinear(module, fused)
            if getattr(module, "num_key_value_groups", 1) > 1:
                vars(module)[MARK] = True
        _wrap_sdpa()
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*map(kwargs.get, ("decoder_input_ids", "input_ids", "inputs_embeds")), *args]
        inputs = next((value for value in given if isinstance(value, Tensor)), None)
        if inputs is not None and inputs.shape[:2].numel() <= FUSED_ROWS:
            leave_torch_one()

    def _end(self, *_: Any) -> None:
        give_torch_all()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class LeanLinear:
    """In place of the forward of a linear layer: by the kernel if there are few rows, nobody wants
    gradients, and the weight is still the one it was.
    """

    def __init__(self, linear: nn.Linear, fused: FusedLinear) -> None:
        self._linear = linear
        self._fused = fused

    def __call__(self, x: Tensor) -> Tensor:
        linear, rows = self._linear, x.shape[:-1]
        is_few = rows.numel() <= FUSED_ROWS and not torch.is_grad_enabled()
        if not is_few or linear.weight.data_ptr() != self._fused.weight_RC.data_ptr():
            return nn.functional.linear(x, linear.weight, linear.bias)
        return self._fused(x.reshape(-1, x.shape[-1]), linear.bias).view(*rows, -1)


def _wrap_sdpa() -> None:
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(stock, _GroupedSdpa):
        AttentionInterface.register("sdpa", _GroupedSdpa(stock))


class _GroupedSdpa:
    """Attention of one query per head: heads of one group are rows of one product."""

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
        """[B, H, 1, d], [B, G, N, d], [B, G, N, d] -> [B, 1, H, d]."""
        is_ours = MARK in vars(module) and query.shape[2] == 1 and not torch.is_grad_enabled()
        if not is_ours or kwargs.get("position_bias") is not None or kwargs.get("dropout"):
            return self._stock(module, query, key, value, attention_mask, **kwargs)
        batch, num_heads, _, _ = query.shape
        out = nn.functional.scaled_dot_product_attention(
            query.reshape(batch, key.shape[1], -1, query.shape[3]),
            key,
            value,
            attn_mask=attention_mask,
            scale=kwargs.get("scaling"),
        )
        return out.reshape(batch, 1, num_heads, -1), None
