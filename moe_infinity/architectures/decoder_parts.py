"""The parts of a decoder layer, as kernels/cpu/decoder.py wants them described."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_infinity.architectures.layer_parts import (
    ATTENTION,
    NORM,
    RESIDUAL_NORM,
    feed_forward,
    router_of,
)
from moe_infinity.architectures.packed_linear import is_linear, weight_of
from moe_infinity.architectures.trial import in_float32
from moe_infinity.kernels.cpu.decoder import Attention, Gate, Router

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
SINKS = "sinks"
EPS = ("variance_epsilon", "eps")  # names of what a norm adds to the mean


def has_usual_parts(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    if len(children) != 4 or not {NORM, ATTENTION, RESIDUAL_NORM} <= children.keys():
        return False
    attention = children[ATTENTION]
    parts = dict(attention.named_children())
    own = dict(attention.named_parameters(recurse=False))
    return (
        all(is_linear(parts.get(name)) for name in PROJECTIONS)
        and parts.keys() - {*PROJECTIONS} in (set(), {*HEAD_NORMS})
        and own.keys() <= {SINKS}
        and not list(layer.parameters(recurse=False))
    )


def kind_of(layer: nn.Module) -> Any:
    """Layers of one kind differ in nothing but their weights and their place."""
    parts = []
    last = feed_forward(layer)
    own = [("", layer), *layer.get_submodule(ATTENTION).named_modules()]
    own += [(name, last.get_submodule(name)) for name in ("", *dict(last.named_children()))]
    for name, module in own:
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
        plain.pop("layer_idx", None)
        shapes = [(k, v.shape, v.dtype) for k, v in module.named_parameters(recurse=False)]
        parts.append((name, type(module), repr(sorted(plain.items())), tuple(shapes)))
    norms = tuple(_eps_of(layer.get_submodule(name)) for name in (NORM, RESIDUAL_NORM))
    return tuple(parts), norms


def _eps_of(norm: nn.Module) -> float | None:
    found = (getattr(norm, name, None) for name in EPS)
    return next((eps for eps in found if isinstance(eps, float)), None)


def _norm_of(norm: nn.Module) -> tuple[Tensor, float]:
    """What a root mean square norm multiplies with, in float32, and what it adds to the mean.
    Raises ValueError if it is something else.
    """
    eps = _eps_of(norm)
    weight = getattr(norm, "weight", None)
    if eps is None or not isinstance(weight, Tensor) or len([*norm.parameters()]) != 1:
        raise ValueError("a norm that kernels do not know")
    own = in_float32(norm)
    weight = weight.detach().float()
    ramp = torch.linspace(-1, 1, len(weight), dtype=torch.float32, device="cpu")
    x = ramp * eps**0.5  # small enough that eps is seen
    scaled = x * torch.rsqrt(x.square().mean() + eps)
    with torch.no_grad():
        found = own(x)
    for factor in (weight, 1 + weight):
        if torch.allclose(found, scaled * factor, rtol=1e-4, atol=1e-6):
            return factor, eps
    raise ValueError("a norm that kernels do not know")


def described(layer: nn.Module, rotated: int, pairs: int, gate: Gate | None = None) -> Attention:
    """Raises ValueError for norms that are none of ours."""
    attention: Any = layer.get_submodule(ATTENTION)
    q, k, v, out = (attention.get_submodule(name) for name in PROJECTIONS)
    head_width = attention.head_dim
    norm, norm_eps = _norm_of(layer.get_submodule(NORM))
    residual_norm, residual_norm_eps = _norm_of(layer.get_submodule(RESIDUAL_NORM))
    query_norm = key_norm = None
    query_norm_eps = key_norm_eps = 0.0
    if hasattr(attention, HEAD_NORMS[0]):
        query_norm, query_norm_eps = _norm_of(getattr(attention, HEAD_NORMS[0]))
        key_norm, key_norm_eps = _norm_of(getattr(attention, HEAD_NORMS[1]))
    sinks = getattr(attention, SINKS, None)
    router = None
    if gate is not None:
        chooses: Any = router_of(feed_forward(layer))
        router = Router(chooses.weight.detach(), getattr(chooses, "bias", None), gate)
    has_bias = [linear.bias is not None for linear in (q, k, v)]
    if any(has_bias) != all(has_bias):
        raise ValueError("biases that kernels do not know")
    return Attention(
        products=(weight_of(q), weight_of(k), weight_of(v)),
        biases=(q.bias, k.bias, v.bias) if all(has_bias) else None,
        out=weight_of(out),
        out_bias=out.bias,
        norm=norm,
        norm_eps=norm_eps,
        residual_norm=residual_norm,
        residual_norm_eps=residual_norm_eps,
        query_norm=query_norm,
        key_norm=key_norm,
        query_norm_eps=query_norm_eps,
        key_norm_eps=key_norm_eps,
        sinks=sinks,
        router=router,
        scale=float(attention.scaling),
        num_heads=q.out_features // head_width,
        num_groups=k.out_features // head_width,
        rotated=rotated,
        pairs=pairs,
    )
