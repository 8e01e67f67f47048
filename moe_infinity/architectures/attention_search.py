"""Finds how a decoder layer attends, in the words of kernels/cpu/decoder.py.

It is found by trying (trial.py): a copy of the layer, with a stub in place of what follows the
attention, runs on random tokens; so does the kernel, with every way to rotate heads that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moe_infinity.architectures.attention_inputs import CACHE_NAMES, cache_name
from moe_infinity.architectures.model_parts import (
    ATTENTION,
    NORM,
    RESIDUAL_NORM,
    PackedLinear,
    ReorderedLinear,
    attention_of,
    feed_forward,
    is_linear,
    weight_of,
)
from moe_infinity.architectures.trial import (
    Differs,
    FellBack,
    Trial,
    Verdict,
    first_found,
    first_that,
    in_float32,
    is_close,
    verdict,
)
from moe_infinity.kernels.cpu.decoder import HALVES, NEIGHBOURS, Attention, DecoderKernel, Router
from moe_infinity.kernels.cpu.decoder_steps import Attended, Cached, DecoderSteps
from moe_infinity.layout import PackedWeight

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
SINKS = "sinks"  # of attention; None in a layer that has none
EPS = ("variance_epsilon", "eps")  # names of what a norm adds to the mean
STRONGER = 8  # the norm in a second trial, so that what limits large numbers is seen


def unusual_attention(attention: nn.Module) -> str | None:
    """Return what of an attention the kernel does not know; None if it has the usual parts."""
    modules = dict(attention.named_children())
    for name in PROJECTIONS:
        if not is_linear(modules.get(name)):
            return f"{ATTENTION} has no linear layer {name}"
    more = modules.keys() - {*PROJECTIONS}
    if more and more != {*HEAD_NORMS}:
        return f"{ATTENTION} also has {', '.join(sorted(more))}"
    own = [name for name, _ in attention.named_parameters(recurse=False)]
    return "it has weights of its own" if {*own} - {SINKS} else None


def eps_of(norm: nn.Module) -> float | None:
    """Return what a norm adds to the mean; None if it does not say."""
    values = (getattr(norm, name, None) for name in EPS)
    return next((eps for eps in values if isinstance(eps, float)), None)


def norm_of(norm: nn.Module) -> tuple[Tensor, float]:
    """Return what a root mean square norm multiplies with, in float32, and what it adds to the
    mean. Raises Differs if the module is something else.
    """
    eps = eps_of(norm)
    weight = getattr(norm, "weight", None)
    unknown = f"{type(norm).__name__} is no norm that kernels know"
    if eps is None or not isinstance(weight, Tensor) or len([*norm.parameters()]) != 1:
        raise Differs(unknown)
    weight = weight.detach().float()
    ramp = torch.linspace(-1, 1, len(weight), dtype=torch.float32, device="cpu")
    x = ramp * eps**0.5  # small enough that eps is seen
    scaled = x * torch.rsqrt(x.square().mean() + eps)
    with torch.no_grad():
        wanted = in_float32(norm)(x)

    def agrees(factor: Tensor) -> bool:
        return torch.allclose(wanted, scaled * factor, rtol=1e-4, atol=1e-6)

    return first_that((weight, 1 + weight), agrees, unknown), eps


def norms_of(layer: nn.Module) -> dict[str, Any]:
    """Return the norms of a layer, by their names in DecoderParts. Raises Differs for other kinds
    of norms.
    """
    norm, norm_eps = norm_of(layer.get_submodule(NORM))
    residual_norm, residual_norm_eps = norm_of(layer.get_submodule(RESIDUAL_NORM))
    return {
        "norm": norm,
        "norm_eps": norm_eps,
        "residual_norm": residual_norm,
        "residual_norm_eps": residual_norm_eps,
    }


class Rotation(NamedTuple):
    """How attention turns its heads."""

    rotated: int  # columns of a head
    pairs: int  # HALVES or NEIGHBOURS

    @property
    def num_pairs(self) -> int:
        return self.rotated // 2

    def describe(self, layer: nn.Module, router: Router | None = None) -> Attention:
        """Describe a layer to the kernel. Raises Differs for norms and biases that it does not
        know.
        """
        attention: Any = layer.get_submodule(ATTENTION)
        q, k, v, out = (attention.get_submodule(name) for name in PROJECTIONS)
        head_width = attention.head_dim
        num_groups = k.out_features // head_width
        query_norm = key_norm = None
        query_norm_eps = key_norm_eps = 0.0
        if hasattr(attention, HEAD_NORMS[0]):
            query_norm, query_norm_eps = norm_of(getattr(attention, HEAD_NORMS[0]))
            key_norm, key_norm_eps = norm_of(getattr(attention, HEAD_NORMS[1]))
        has_bias = [linear.bias is not None for linear in (q, k, v)]
        if any(has_bias) != all(has_bias):
            raise Differs("some of its projections have a bias, others none")
        return Attention(
            products=(weight_of(q), weight_of(k), weight_of(v)),
            biases=(q.bias, k.bias, v.bias) if all(has_bias) else None,
            out=weight_of(out),
            out_bias=out.bias,
            query_norm=query_norm,
            key_norm=key_norm,
            query_norm_eps=query_norm_eps,
            key_norm_eps=key_norm_eps,
            sinks=getattr(attention, SINKS, None),
            router=router,
            scale=float(attention.scaling),
            num_heads=out.in_features * num_groups // v.out_features,
            num_groups=num_groups,
            head_width=head_width,
            rotated=self.rotated,
            pairs=self.pairs,
            **norms_of(layer),
        )


def find_attention(layer: nn.Module, rotations: Sequence[nn.Module]) -> Verdict[Rotation]:
    """Find how the kernel has to see a layer of the usual parts so that both give the same."""
    if not rotations:
        return FellBack("the model has no rotary embedding")
    unpacked: dict[str, Tensor] = {}
    return first_found(
        verdict(partial(_search_attention, layer, rotation, unpacked, gives_two=gives_two))
        for rotation in rotations
        for gives_two in (False, True)
    )


def _search_attention(
    layer: nn.Module, rotation: nn.Module, unpacked: dict[str, Tensor], *, gives_two: bool
) -> Rotation:
    runs = [
        _TrialRun(layer, rotation, unpacked, strength=strength, gives_two=gives_two)
        for strength in (1, STRONGER)
    ]
    attention: Any = layer.get_submodule(ATTENTION)
    width = runs[0].cos.shape[-1]
    ways = [Rotation(*way) for way in product((width, 2 * width), (HALVES, NEIGHBOURS))]
    return first_that(
        (way for way in ways if way.rotated <= attention.head_dim),
        lambda way: all(run.agrees(way) for run in runs),
        "the kernel gives other numbers",
    )


def _angles_of(rotation: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the positions 3, 4 and 5. Where tokens may be those of
    images, a token has three: some classes want all, also of text.
    """
    positions = torch.tensor([[3, 4, 5]], dtype=torch.long, device="cpu")
    module = in_float32(rotation)
    try:
        angles: tuple[Tensor, Tensor] = module(x, positions)
    except IndexError:
        angles = module(x, positions.expand(3, 1, 3))
    return angles


class _TrialRun:
    """A run of a layer's own code on random tokens: two of a prompt, then one more."""

    def __init__(
        self,
        layer: nn.Module,
        rotation: nn.Module,
        unpacked: dict[str, Tensor],
        *,
        strength: float,
        gives_two: bool,
    ) -> None:
        trial = LayerTrial(layer, seed=1, gives_two=gives_two, unpacked=unpacked)
        self._trial = trial
        self._layer = trial.module
        norm: Any = getattr(self._layer, NORM)
        norm.weight.mul_(strength)
        x = trial.random(1, 3, len(norm.weight))
        cos, sin = _angles_of(rotation, x)
        self.cos = cos
        self._x = x[:, 2:]
        self._angles = cos[:, 2], sin[:, 2]
        cache = DynamicCache()
        mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="cpu").tril()
        trial.run(x[:, :2], cache, mask, (cos[:, :2], sin[:, :2]))
        (cached,) = [kept for kept in cache.layers if kept.is_initialized]
        self._keys_before = cached.keys.clone(), cached.values.clone()
        out = trial.run(x[:, 2:], cache, None, (cos[:, 2:], sin[:, 2:]))
        self._wanted = *out, cached.keys, cached.values

    def agrees(self, way: Rotation) -> bool:
        """Return True if the kernel gives the same, with heads turned this way."""
        kernel = DecoderKernel(way.describe(self._layer), torch.float32)
        cos, sin = (angle[:, : way.num_pairs].contiguous() for angle in self._angles)
        keys, values = (torch.cat([kept, kept[:, :, :1]], dim=2) for kept in self._keys_before)
        given = DecoderSteps([kernel]).attend(
            0, self._x[:, 0], (cos, sin), Cached(keys, values), None
        )
        found = *self._trial.outputs_of(given), keys, values
        return all(map(is_close, found, self._wanted))


def _multiply(
    weight: PackedWeight, bias: Tensor | None, name: str, unpacked: dict[str, Tensor], x: Tensor
) -> Tensor:
    if name not in unpacked:
        unpacked[name] = weight.unpacked(torch.float32)
    return nn.functional.linear(x, unpacked[name], bias)


class LayerTrial(Trial):
    """A copy of a layer with a stub in place of what follows its attention."""

    def __init__(
        self, layer: nn.Module, *, seed: int, gives_two: bool, unpacked: dict[str, Tensor]
    ) -> None:
        """`gives_two`: what follows returns a tuple. `unpacked` keeps the weights of packed linear
        layers, by name, for the next trial.
        """
        self._stub = _FeedForward(gives_two=gives_two)
        last = feed_forward(layer)
        (name,) = (name for name, child in layer.named_children() if child is last)
        super().__init__(layer, seed=seed, stubs={name: self._stub})
        for name, module in self.module.named_modules():
            linear = module.linear if isinstance(module, ReorderedLinear) else module
            if isinstance(linear, PackedLinear):  # which would unpack in every call
                vars(linear)["forward"] = partial(
                    _multiply, linear.packed, linear.bias, name, unpacked
                )
        takers = self.module.forward, attention_of(self.module).forward
        # A layer that takes any keyword hands the cache on by the name that attention has for it.
        names = (cache_name(signature(forward).parameters) for forward in takers)
        self._cache_name = next(filter(None, names), CACHE_NAMES[0])

    def run(self, x: Tensor, cache: Any, mask: Tensor | None, angles: Any) -> tuple[Tensor, Tensor]:
        """Return what the layer gives for the last token, and what its experts would get."""
        out = self.module(
            x,
            attention_mask=mask,
            position_ids=None,
            use_cache=True,
            position_embeddings=angles,
            **{self._cache_name: cache},
        )
        if not isinstance(out, Tensor):
            raise Differs(f"it returns {type(out).__name__}, not a tensor")
        return out[:, -1], self._stub.given[:, -1]

    def outputs_of(self, given: Attended) -> tuple[Tensor, Tensor]:
        """Return the same of what the kernel gives."""
        return given.residual + self._stub.of(given.normed), given.normed


class _FeedForward(nn.Module):
    """A stub for the experts, which keeps its input."""

    def __init__(self, *, gives_two: bool) -> None:
        super().__init__()
        self._gives_two = gives_two
        self.given: Any = None

    @staticmethod
    def of(x: Tensor) -> Tensor:
        return x.flip(-1) * 0.5

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given = x
        return (self.of(x), None) if self._gives_two else self.of(x)
