"""Finds how a decoder layer computes, in the words of kernels/cpu/decoder.py: its attention, its
router, and whether more than a router and experts follow the attention.

Each is found by trying (trial.py). A copy of the layer, with a stub in place of what follows the
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
    experts_of,
    feed_forward,
    is_linear,
    router_of,
    weight_of,
)
from moe_infinity.architectures.trial import (
    Differs,
    FellBack,
    Found,
    Trial,
    Verdict,
    first_found,
    first_that,
    for_trial,
    in_float32,
    is_close,
    verdict,
)
from moe_infinity.kernels.cpu.decoder import (
    HALVES,
    NEIGHBOURS,
    OF_ALL,
    OF_CHOSEN,
    Attention,
    DecoderKernel,
    Gate,
    Router,
)
from moe_infinity.kernels.cpu.decoder_steps import Cached, DecoderSteps

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
SINKS = "sinks"
EPS = ("variance_epsilon", "eps")  # names of what a norm adds to the mean
STRONGER = 8  # the norm in a second trial, so that what limits large numbers is seen
TRIED_TOKENS = 32  # of a router


class LayerKind(NamedTuple):
    """The common ground of layers of one kind, as far as kernels know it."""

    attention: Attention  # of one of them
    gate: Verdict[Gate]  # how the router chooses
    experts_alone: Verdict[None]  # Found: a router and experts follow the attention, no more


def find_kind(layer: nn.Module, rotations: Sequence[nn.Module]) -> Verdict[LayerKind]:
    """Find what layers of this kind compute."""
    attention = find_attention(layer, rotations)
    if isinstance(attention, FellBack):
        return attention
    block = feed_forward(layer)
    router = router_of(block)
    gate: Verdict[Gate] = FellBack("its block has no single router")
    if router is not None:
        gate = find_gate(router)
    alone: Verdict[None] = FellBack("kernels do not know its router")
    if isinstance(gate, Found):
        alone = find_experts_alone(block)
    return Found(LayerKind(attention.path, gate, alone))


# The parts of a layer


def unusual_part(layer: nn.Module) -> str | None:
    """Return what of a layer kernels do not know; None if it has the parts that they know."""
    children = dict(layer.named_children())
    if len(children) != 4 or not {NORM, ATTENTION, RESIDUAL_NORM} <= children.keys():
        return f"its modules are {', '.join(children) or 'none'}"
    attention = children[ATTENTION]
    modules = dict(attention.named_children())
    for name in PROJECTIONS:
        if not is_linear(modules.get(name)):
            return f"{ATTENTION} has no linear layer {name}"
    more = modules.keys() - {*PROJECTIONS}
    if more and more != {*HEAD_NORMS}:
        return f"{ATTENTION} also has {', '.join(sorted(more))}"
    weights = [*layer.parameters(recurse=False)]
    weights += [p for name, p in attention.named_parameters(recurse=False) if name != SINKS]
    return "it has weights of its own" if weights else None


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
    modules = [("", layer), *layer.get_submodule(ATTENTION).named_modules()]
    modules += [(name, last.get_submodule(name)) for name in ("", *dict(last.named_children()))]
    for name, module in modules:
        shapes = [(k, v.shape, v.dtype) for k, v in module.named_parameters(recurse=False)]
        described_modules.append((name, type(module), plain_attributes(module), tuple(shapes)))
    norms = tuple(_eps_of(layer.get_submodule(name)) for name in (NORM, RESIDUAL_NORM))
    return tuple(described_modules), norms


def plain_attributes(module: nn.Module) -> str:
    """Return the numbers and texts that decide how a module computes, but for a layer's number."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
    plain.pop("layer_idx", None)
    return repr(sorted(plain.items()))


def _eps_of(norm: nn.Module) -> float | None:
    values = (getattr(norm, name, None) for name in EPS)
    return next((eps for eps in values if isinstance(eps, float)), None)


def _norm_of(norm: nn.Module) -> tuple[Tensor, float]:
    """Return what a root mean square norm multiplies with, in float32, and what it adds to the
    mean. Raises Differs if the module is something else.
    """
    eps = _eps_of(norm)
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


def described(layer: nn.Module, rotated: int, pairs: int, gate: Gate | None = None) -> Attention:
    """Describe a layer to the kernel. Raises Differs for norms and biases that it does not know."""
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
    router = None
    if gate is not None:
        chooses: Any = router_of(feed_forward(layer))
        router = Router(chooses.weight.detach(), getattr(chooses, "bias", None), gate)
    has_bias = [linear.bias is not None for linear in (q, k, v)]
    if any(has_bias) != all(has_bias):
        raise Differs("some of its projections have a bias, others none")
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
        sinks=getattr(attention, SINKS, None),
        router=router,
        scale=float(attention.scaling),
        num_heads=q.out_features // head_width,
        num_groups=k.out_features // head_width,
        rotated=rotated,
        pairs=pairs,
    )


# Attention


def find_attention(layer: nn.Module, rotations: Sequence[nn.Module]) -> Verdict[Attention]:
    """Find how the kernel has to see a layer of the usual parts so that both give the same."""
    if not rotations:
        return FellBack("the model has no rotary embedding")
    return first_found(
        verdict(partial(_search_attention, layer, rotation, gives_two=gives_two))
        for rotation in rotations
        for gives_two in (False, True)
    )


def _search_attention(layer: nn.Module, rotation: nn.Module, *, gives_two: bool) -> Attention:
    runs = [
        _TrialRun(layer, rotation, strength=strength, gives_two=gives_two)
        for strength in (1, STRONGER)
    ]
    attention: Any = layer.get_submodule(ATTENTION)
    width = runs[0].cos.shape[-1]
    rotated, pairs = first_that(
        (
            way
            for way in product((width, 2 * width), (HALVES, NEIGHBOURS))
            if way[0] <= attention.head_dim
        ),
        lambda way: all(run.agrees(*way) for run in runs),
        "the kernel gives other numbers",
    )
    return described(layer, rotated, pairs)


class _TrialRun:
    """A run of a layer's own code on random tokens: two of a prompt, then one more."""

    def __init__(
        self, layer: nn.Module, rotation: nn.Module, *, strength: float, gives_two: bool
    ) -> None:
        self._stub = _FeedForward(gives_two=gives_two)
        last = feed_forward(layer)
        (name,) = (name for name, child in layer.named_children() if child is last)
        trial = Trial(layer, seed=1, stubs={name: self._stub})
        self._layer = trial.module
        takers = self._layer.forward, self._layer.get_submodule(ATTENTION).forward
        # A layer that takes any keyword hands the cache on by the name that attention has for it.
        names = (cache_name(signature(forward).parameters) for forward in takers)
        self._cache_name = next(filter(None, names), CACHE_NAMES[0])
        norm: Any = getattr(self._layer, NORM)
        norm.weight.mul_(strength)
        x = trial.random(1, 3, len(norm.weight))
        positions = torch.tensor([[3, 4, 5]], dtype=torch.long, device="cpu")
        cos, sin = in_float32(rotation)(x, positions)
        self.cos = cos
        self._x = x[:, 2:]
        self._angles = cos[:, 2], sin[:, 2]
        cache = DynamicCache()
        mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="cpu").tril()
        self._run(x[:, :2], (cos[:, :2], sin[:, :2]), cache, mask)
        (cached,) = [kept for kept in cache.layers if kept.is_initialized]
        self._keys_before = cached.keys.clone(), cached.values.clone()
        out = self._run(x[:, 2:], (cos[:, 2:], sin[:, 2:]), cache, None)
        self._wanted = out[:, 0], self._stub.given[:, 0], cached.keys, cached.values

    def _run(self, x: Tensor, angles: Any, cache: Any, mask: Tensor | None) -> Tensor:
        out = self._layer(
            x,
            attention_mask=mask,
            position_ids=None,
            use_cache=True,
            position_embeddings=angles,
            **{self._cache_name: cache},
        )
        if not isinstance(out, Tensor):
            raise Differs(f"it returns {type(out).__name__}, not a tensor")
        return out

    def agrees(self, rotated: int, pairs: int) -> bool:
        """Return True if the kernel gives the same, with these columns rotated in such pairs."""
        kernel = DecoderKernel(described(self._layer, rotated, pairs), torch.float32)
        cos, sin = (angle[:, : rotated // 2].contiguous() for angle in self._angles)
        keys, values = (torch.cat([kept, kept[:, :, :1]], dim=2) for kept in self._keys_before)
        given = DecoderSteps([kernel]).attend(
            0, self._x[:, 0], (cos, sin), Cached(keys, values), None
        )
        out = given.residual + self._stub.of(given.normed)
        return all(map(is_close, (out, given.normed, keys, values), self._wanted))


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


# Router and experts


def find_gate(router: nn.Module) -> Verdict[Gate]:
    """Find how a router chooses. Kernels know those that choose the experts with the largest
    logits, and weigh each with its part of all experts' exponentials or of the chosen ones'.
    """
    return verdict(partial(_search_gate, router))


def _search_gate(router: nn.Module) -> Gate:
    weight: Any = router.weight
    bias: Any = getattr(router, "bias", None)
    trial = Trial(router, seed=2)
    x_TD = trial.random(TRIED_TOKENS, weight.shape[1])
    logits_TE, top_k_weights_TK, top_k_index_TK = trial.module(x_TD)
    dtype = for_trial(router)(x_TD.to(weight.dtype))[1].dtype
    wanted_TE = nn.functional.linear(x_TD, weight.float(), None if bias is None else bias.float())
    top_k = top_k_index_TK.shape[-1]
    largest = wanted_TE.topk(top_k)
    if not is_close(logits_TE, wanted_TE):
        raise Differs("its logits are no product with its weight")
    if not torch.equal(top_k_index_TK, largest.indices):
        raise Differs("it does not choose the experts with the largest logits")
    weights = {
        OF_ALL: wanted_TE.softmax(-1).gather(1, largest.indices),
        OF_CHOSEN: largest.values.softmax(-1),
    }
    way = first_that(
        weights,
        lambda way: is_close(top_k_weights_TK, weights[way]),
        "its weights are no softmax of all logits or of the chosen ones",
    )
    return Gate(top_k, way, dtype)


def find_experts_alone(block: nn.Module) -> Verdict[None]:
    """Find out if a block gives what its experts give for its router's choice, and no more."""
    return verdict(partial(_search_experts_alone, block))


def _search_experts_alone(block: nn.Module) -> None:
    router = router_of(block)
    children = dict(block.named_children())
    if router is None or len(children) != 2:
        raise Differs(f"more than a router and experts follows attention: {', '.join(children)}")
    if experts_of(block) is None:
        raise Differs("its experts are called in a way of their own")
    (name,) = (name for name, child in children.items() if child is not router)
    stub = _Experts()
    trial = Trial(block, seed=3, stubs={name: stub})
    weight: Any = router.weight
    x = trial.random(2, 1, weight.shape[1])
    _, top_k_weights_TK, top_k_index_TK = in_float32(router)(x[:, 0])
    out = trial.module(x)
    out = out[0] if isinstance(out, tuple) else out
    if not is_close(out, stub(x[:, 0], top_k_index_TK, top_k_weights_TK)[:, None]):
        raise Differs("its block gives something else than its experts' sum")


class _Experts(nn.Module):
    """A stub for the experts that tells tokens, experts and weights apart."""

    def forward(self, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        return x_TD.flip(-1) * 0.5 + (top_k_index_TK * top_k_weights_TK).sum(-1, keepdim=True)
