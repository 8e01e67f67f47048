"""Decoder layers whose attention kernels/cpu/decoder.py computes in one call, in steps of one token
of each sequence.

Whether a layer is one of them is found by trying, not by the model's name: it has the usual parts,
and on random tokens, in float32, it gives what the kernel gives. One layer of each kind is tried
when the model is loaded. The others, and all longer inputs, go the usual way; so does a call with
arguments that are not known here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moe_infinity.architectures import growing_cache
from moe_infinity.kernels.cpu.decoder import HALVES, NEIGHBOURS, Attention, DecoderAttention

MOST_SEQUENCES = 64  # of a step
NORM = "input_layernorm"
ATTENTION = "self_attn"
RESIDUAL_NORM = "post_attention_layernorm"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
SINKS = "sinks"
EPS = ("variance_epsilon", "eps")  # names of what a norm adds to the mean
# Arguments of a layer that the kernel serves, or that say nothing to it; others only if not given.
SERVED = {"attention_mask", "past_key_values", "position_embeddings"}
KNOWN = SERVED | {"position_ids", "use_cache", "cache_position"}
TOLERANCE = 2e-5  # of the largest number: float32, summed in another order
STRONGER = 8  # the norm in a second trial, so that what limits large numbers is seen

logger = logging.getLogger(__name__)


class DecoderLayer:
    """In place of the forward method of one decoder layer."""

    def __init__(self, layer: nn.Module, attention: Attention, angles: Angles) -> None:
        self._layer = layer
        self._attention = getattr(layer, ATTENTION)
        self._feed_forward = feed_forward(layer)
        self._stock: Callable[..., Any] = layer.forward
        self._angles = angles
        self._norms = getattr(layer, NORM), getattr(layer, RESIDUAL_NORM)
        self._dtype = attention.out.dtype
        self._kernel = DecoderAttention(attention, self._dtype)
        self._weights = [*self._attention.parameters(), *(norm.weight for norm in self._norms)]
        self._addresses = [weight.data_ptr() for weight in self._weights]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the stock method."""
        cache_layer = None if args else self._cache_layer(hidden_states, kwargs)
        if cache_layer is None:
            return self._stock(hidden_states, *args, **kwargs)
        keys, values = growing_cache.with_room(cache_layer)
        mask = self._angles.mask_of(kwargs.get("attention_mask"), keys.shape[2])
        residual_BD, normed_BD = self._kernel(
            hidden_states[:, 0], self._angles.of(kwargs["position_embeddings"]), keys, values, mask
        )
        growing_cache.take(cache_layer)
        out = self._feed_forward(normed_BD[:, None])
        return residual_BD[:, None] + (out[0] if isinstance(out, tuple) else out)

    def _cache_layer(self, x: Tensor, kwargs: dict[str, Any]) -> Any | None:
        """None if this call is not the kernel's."""
        cache = kwargs.get("past_key_values")
        index = getattr(self._attention, "layer_idx", None)
        known = (
            x.shape[1] == 1
            and len(x) <= MOST_SEQUENCES
            and x.dtype == self._dtype
            and not torch.is_grad_enabled()
            and type(cache) is DynamicCache
            and index is not None
            and index < len(cache.layers)
            and all(kwargs[name] is None or kwargs[name] is False for name in kwargs.keys() - KNOWN)
            and not self._is_watched()
            and [weight.data_ptr() for weight in self._weights] == self._addresses
        )
        if not known:
            return None
        cache_layer = cache.layers[index]
        if not growing_cache.can_grow(cache_layer) or len(cache_layer.keys) != len(x):
            return None
        mask = kwargs.get("attention_mask")
        fits = mask is None or mask.shape == (len(x), 1, 1, cache_layer.keys.shape[2] + 1)
        return cache_layer if fits and cache_layer.keys.dtype == x.dtype else None

    def _is_watched(self) -> bool:
        """Whether somebody wants to see what the modules inside are called with."""
        return any(
            module._forward_hooks or module._forward_pre_hooks
            for module in (self._attention, *self._norms)
        )


class Angles:
    """Cosines, sines and masks as the kernel wants them: the layers of a step are given the same,
    so each is made once.
    """

    def __init__(self, num_pairs: int) -> None:
        self._num_pairs = num_pairs
        self._given: Any = None
        self._angles: tuple[Tensor, Tensor]
        self._mask: Tensor | None = None
        self._numbers: Tensor | None = None

    def of(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B or 1, 1, ...] -> float32 [B or 1, pairs]."""
        if given is not self._given:
            cos, sin = (
                angle[:, 0, : self._num_pairs].to(torch.float32).contiguous() for angle in given
            )
            self._angles = cos, sin
            self._given = given
        return self._angles

    def mask_of(self, mask: Tensor | None, num_tokens: int) -> Tensor | None:
        """[B, 1, 1, N], added or True where to look -> float32 [B, N]."""
        if mask is None:
            return None
        if mask is not self._mask:
            numbers = mask.view(len(mask), num_tokens)
            if numbers.dtype == torch.bool:
                numbers = torch.zeros_like(numbers, dtype=torch.float32).masked_fill_(
                    ~numbers, -torch.inf
                )
            self._numbers = numbers.to(torch.float32).contiguous()
            self._mask = mask
        return self._numbers


def use_kernels(model: nn.Module) -> None:
    """Replace the forward methods of the decoder layers of a model that the kernel can compute."""
    rotations = [m for m in model.modules() if hasattr(m, "inv_freq") and not list(m.children())]
    found: dict[Any, Attention | None] = {}
    angles: dict[int, Angles] = {}
    for layer in list(model.modules()):
        if not _has_usual_parts(layer):
            continue
        kind = _kind_of(layer)
        if kind not in found:
            tried = (_try(layer, rotation) for rotation in rotations)
            found[kind] = next((good for good in tried if good is not None), None)
        example = found[kind]
        if example is not None:
            num_pairs = example.rotated // 2
            own = _described(layer, example.rotated, example.pairs)
            of_step = angles.setdefault(num_pairs, Angles(num_pairs))
            vars(layer)["forward"] = DecoderLayer(layer, own, of_step).forward


def feed_forward(layer: nn.Module) -> nn.Module:
    """What computes after attention."""
    names = {name for name, _ in layer.named_children()} - {NORM, ATTENTION, RESIDUAL_NORM}
    (name,) = names
    module: nn.Module = layer.get_submodule(name)
    return module


def _has_usual_parts(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    if len(children) != 4 or not {NORM, ATTENTION, RESIDUAL_NORM} <= children.keys():
        return False
    attention = children[ATTENTION]
    parts = dict(attention.named_children())
    own = dict(attention.named_parameters(recurse=False))
    return (
        all(type(parts.get(name)) is nn.Linear for name in PROJECTIONS)
        and parts.keys() - {*PROJECTIONS} in (set(), {*HEAD_NORMS})
        and own.keys() <= {SINKS}
        and not list(layer.parameters(recurse=False))
    )


def _kind_of(layer: nn.Module) -> Any:
    """Layers of one kind differ in nothing but their weights and their place."""
    parts = []
    for name, module in (("", layer), *layer.get_submodule(ATTENTION).named_modules()):
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
        plain.pop("layer_idx", None)
        shapes = [(k, v.shape, v.dtype) for k, v in module.named_parameters(recurse=False)]
        parts.append((name, type(module), repr(sorted(plain.items())), tuple(shapes)))
    norms = tuple(_eps_of(layer.get_submodule(name)) for name in (NORM, RESIDUAL_NORM))
    return tuple(parts), norms


def _eps_of(norm: nn.Module) -> float | None:
    found = (getattr(norm, name, None) for name in EPS)
    return next((eps for eps in found if isinstance(eps, float)), None)


def _norm_weight(norm: nn.Module) -> Tensor | None:
    """What a root mean square norm multiplies with, float32; None if it is something else."""
    eps = _eps_of(norm)
    weight = getattr(norm, "weight", None)
    if eps is None or not isinstance(weight, Tensor) or [*norm.parameters()] != [weight]:
        return None
    own = copy.deepcopy(norm).float()
    weight = weight.detach().float()
    x = torch.linspace(-1, 1, len(weight)) * eps**0.5  # small enough that eps is seen
    scaled = x * torch.rsqrt(x.square().mean() + eps)
    with torch.no_grad():
        found = own(x)
    for factor in (weight, 1 + weight):
        if torch.allclose(found, scaled * factor, rtol=1e-4, atol=1e-6):
            return factor
    return None


def _described(layer: nn.Module, rotated: int, pairs: int) -> Attention:
    """Raises ValueError for norms that are none of ours."""
    attention: Any = layer.get_submodule(ATTENTION)
    q, k, v, out = (attention.get_submodule(name) for name in PROJECTIONS)
    head_width = attention.head_dim
    norms = {name: getattr(layer, name) for name in (NORM, RESIDUAL_NORM)}
    norms |= {name: getattr(attention, name, None) for name in HEAD_NORMS}
    weights = {name: norm and _norm_weight(norm) for name, norm in norms.items()}
    if any(norms[name] is not None and weights[name] is None for name in norms):
        raise ValueError("norms that kernels do not know")
    eps = {name: norm and _eps_of(norm) for name, norm in norms.items()}
    sinks = getattr(attention, SINKS, None)
    has_bias = [linear.bias is not None for linear in (q, k, v)]
    if any(has_bias) != all(has_bias):
        raise ValueError("biases that kernels do not know")
    return Attention(
        products=(q.weight.detach(), k.weight.detach(), v.weight.detach()),
        biases=(q.bias, k.bias, v.bias) if all(has_bias) else None,
        out=out.weight.detach(),
        out_bias=out.bias,
        norm=weights[NORM],
        norm_eps=eps[NORM],
        residual_norm=weights[RESIDUAL_NORM],
        residual_norm_eps=eps[RESIDUAL_NORM],
        query_norm=weights["q_norm"],
        key_norm=weights["k_norm"],
        query_norm_eps=eps["q_norm"] or 0.0,
        key_norm_eps=eps["k_norm"] or 0.0,
        sinks=sinks,
        scale=float(attention.scaling),
        num_heads=len(q.weight) // head_width,
        num_groups=len(k.weight) // head_width,
        rotated=rotated,
        pairs=pairs,
    )


def _try(layer: nn.Module, rotation: nn.Module) -> Attention | None:
    """The layer as the kernel has to see it, so that both give the same; None if they never do."""
    for gives_two in (False, True):
        try:
            with torch.no_grad():
                return _matching(layer, rotation, gives_two=gives_two)
        except Exception as error:  # a module that wants other arguments, shapes, attributes
            logger.debug("%s is computed by its own code: %s", type(layer).__name__, error)
    return None


def _matching(layer: nn.Module, rotation: nn.Module, *, gives_two: bool) -> Attention | None:
    trials = [
        _Trial(layer, rotation, strength=strength, gives_two=gives_two)
        for strength in (1, STRONGER)
    ]
    head_width: int = layer.get_submodule(ATTENTION).head_dim
    for rotated, pairs in _rotations(trials[0].cos.shape[-1], head_width):
        if all(trial.passes(rotated, pairs) for trial in trials):
            return _described(layer, rotated, pairs)
    return None


def _rotations(width: int, head_width: int) -> Iterator[tuple[int, int]]:
    for rotated, pairs in product((width, 2 * width), (HALVES, NEIGHBOURS)):
        if rotated <= head_width:
            yield rotated, pairs


class _Trial:
    """A layer's own code on random tokens, in float32: two of a prompt, then one more."""

    def __init__(
        self, layer: nn.Module, rotation: nn.Module, *, strength: float, gives_two: bool
    ) -> None:
        make = torch.Generator().manual_seed(1)
        self._layer = _in_float32(layer, gives_two=gives_two)
        norm: Any = getattr(self._layer, NORM)
        norm.weight.mul_(strength)
        width = len(norm.weight)
        x = torch.randn(1, 3, width, generator=make)
        positions = torch.tensor([[3, 4, 5]])
        cos, sin = copy.deepcopy(rotation).float()(x, positions)
        self.cos = cos
        self._x = x[:, 2:]
        self._angles = cos[:, 2], sin[:, 2]
        stub = feed_forward(self._layer)
        assert isinstance(stub, _FeedForward)
        cache = DynamicCache()
        mask = torch.ones(2, 2).tril().bool()[None, None]
        self._run(x[:, :2], (cos[:, :2], sin[:, :2]), cache, mask)
        (own,) = [kept for kept in cache.layers if kept.is_initialized]
        self._keys = own.keys.clone(), own.values.clone()
        self._wanted = self._run(x[:, 2:], (cos[:, 2:], sin[:, 2:]), cache, None)
        self._wanted_keys = own.keys, own.values
        self._normed = stub.given

    def _run(self, x: Tensor, angles: Any, cache: Any, mask: Tensor | None) -> Tensor:
        out = self._layer(
            x,
            attention_mask=mask,
            position_ids=None,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=angles,
        )
        if not isinstance(out, Tensor):
            raise TypeError(f"a decoder layer that returns {type(out).__name__}")
        return out

    def passes(self, rotated: int, pairs: int) -> bool:
        """Whether the kernel gives the same, with these columns rotated in such pairs."""
        described = _described(self._layer, rotated, pairs)
        kernel = DecoderAttention(described, torch.float32)
        cos, sin = (angle[:, : rotated // 2].contiguous() for angle in self._angles)
        keys, values = (torch.cat([kept, kept[:, :, :1]], dim=2) for kept in self._keys)
        residual, normed = kernel(self._x[:, 0], (cos, sin), keys, values, None)
        found = residual + _FeedForward.of(normed), normed, keys, values
        wanted = self._wanted[:, 0], self._normed[:, 0], *self._wanted_keys
        return all(_is_close(one, other) for one, other in zip(found, wanted, strict=True))


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


class _FeedForward(nn.Module):
    """In place of the experts: notes what it is given."""

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


def _in_float32(layer: nn.Module, *, gives_two: bool) -> Any:
    """A copy without what comes after attention."""
    own = copy.copy(layer)
    last = feed_forward(layer)
    own._modules = {
        name: _FeedForward(gives_two=gives_two) if module is last else copy.deepcopy(module).float()
        for name, module in layer.named_children()
    }
    return own
