"""What a decoder layer is made of, and the block in it that has the experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_infinity.architectures.adapters import CALL_ATTRIBUTE
from moe_infinity.architectures.packed_linear import is_linear

NORM = "input_layernorm"
ATTENTION = "self_attn"
RESIDUAL_NORM = "post_attention_layernorm"


def feed_forward(layer: nn.Module) -> nn.Module:
    """What computes after attention."""
    names = {name for name, _ in layer.named_children()} - {NORM, ATTENTION, RESIDUAL_NORM}
    (name,) = names
    module: nn.Module = layer.get_submodule(name)
    return module


def router_of(feed_forward: nn.Module) -> nn.Module | None:
    """The child that has a weight [E, D] and its own way with it; None if there is not one."""
    found = [
        child
        for child in feed_forward.children()
        if not is_linear(child)
        and not list(child.children())
        and [name for name, param in child.named_parameters() if param.dim() == 2] == ["weight"]
    ]
    return found[0] if len(found) == 1 else None


def experts_of(block: nn.Module) -> Any | None:
    """What calls the engine for the only MoE layer in a block; None if there is not one."""
    found = [vars(child).get(CALL_ATTRIBUTE) for child in block.children()]
    called = [call for call in found if call is not None]
    return called[0] if len(called) == 1 else None
