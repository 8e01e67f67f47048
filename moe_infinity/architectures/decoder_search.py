"""Finds how a decoder layer computes, in the words of kernels/cpu/decoder.py. Each part is found by
trying (trial.py):

    attention_search.py    its attention; linear_attention.py if that is linear
    block_search.py        what follows: a router, experts, and perhaps a shared expert
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_infinity.architectures.attention_search import (
    Rotation,
    eps_of,
    find_attention,
    unusual_attention,
)
from moe_infinity.architectures.block_search import find_gate, find_shared_expert
from moe_infinity.architectures.linear_attention import (
    DeltaProducts,
    find_delta_rule,
    is_delta_rule,
)
from moe_infinity.architectures.model_parts import (
    ATTENTION,
    LINEAR_ATTENTION,
    NORM,
    RESIDUAL_NORM,
    attention_of,
    feed_forward,
    router_of,
)
from moe_infinity.architectures.trial import FellBack, Found, Verdict
from moe_infinity.kernels.cpu.decoder import Gate
from moe_infinity.kernels.reference import Activation


class LayerKind(NamedTuple):
    """The common ground of layers of one kind, as far as kernels know it."""

    attention: Rotation | DeltaProducts  # describes one of them
    gate: Verdict[Gate]  # how the router chooses
    shared_expert: Verdict[Activation | None]  # what is added to experts; None: nothing is


def find_kind(layer: nn.Module, rotations: Sequence[nn.Module]) -> Verdict[LayerKind]:
    """Find what layers of this kind compute."""
    attention: Verdict[Rotation] | Verdict[DeltaProducts]
    if is_delta_rule(attention_of(layer)):
        attention = find_delta_rule(layer)
    else:
        attention = find_attention(layer, rotations)
    if isinstance(attention, FellBack):
        return attention
    block = feed_forward(layer)
    gate = find_gate(router_of(block))
    shared: Verdict[Activation | None] = FellBack("kernels do not know its router")
    if isinstance(gate, Found):
        shared = find_shared_expert(block)
    return Found(LayerKind(attention.path, gate, shared))


# The parts of a layer


def unusual_part(layer: nn.Module) -> str | None:
    """Return what of a layer kernels do not know; None if it has the parts that they know."""
    children = dict(layer.named_children())
    attention = {ATTENTION, LINEAR_ATTENTION} & children.keys()
    if len(children) != 4 or not {NORM, RESIDUAL_NORM} < children.keys() or len(attention) != 1:
        return f"its modules are {', '.join(children) or 'none'}"
    if [*layer.parameters(recurse=False)]:
        return "it has weights of its own"
    module = attention_of(layer)
    return None if is_delta_rule(module) else unusual_attention(module)


def dtype_of(layer: nn.Module) -> torch.dtype:
    """Return the dtype in which a decoder layer is called."""
    dtype: torch.dtype = layer.get_submodule(NORM).get_parameter("weight").dtype
    return dtype


def key_of(layer: nn.Module) -> Any:
    """Return a key that layers of one kind share: they differ in nothing but their weights and
    their number.
    """
    described_modules = []
    last = feed_forward(layer)
    modules = [("", layer), *attention_of(layer).named_modules()]
    modules += [(name, m) for name, m in last.named_modules() if name.count(".") < 2]
    for name, module in modules:
        shapes = [(k, v.shape, v.dtype) for k, v in module.named_parameters(recurse=False)]
        # The numbers and texts that decide how a module computes, but for a layer's number.
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
        plain.pop("layer_idx", None)
        described_modules.append((name, type(module), repr(sorted(plain.items())), tuple(shapes)))
    norms = tuple(eps_of(layer.get_submodule(name)) for name in (NORM, RESIDUAL_NORM))
    return tuple(described_modules), norms
