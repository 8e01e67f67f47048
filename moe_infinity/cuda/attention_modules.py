"""Attention modules on a GPU in few kernels: one product for queries, keys and values, one kernel
for norms and rotary positions of heads, attention, and the product of what was looked at.

Which modules these are is found by trying: a module is called with random numbers, in float32, and
what it hands to attention is compared with what the kernels would hand over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_utils import AttentionInterface

from moe_infinity.architectures.layers_ahead import Angles
from moe_infinity.architectures.trials import in_float32, is_close
from moe_infinity.cuda.attention import EXPAND, AttentionSwitch, attend_cached
from moe_infinity.cuda.cached_step import NAME, Place
from moe_infinity.cuda.norms import eps_of, form_of
from moe_infinity.kernels.cuda.heads import PAIRS, Heads
from moe_infinity.kernels.cuda.rotary_reference import make_heads

PRODUCTS = ("q_proj", "k_proj", "v_proj")
HEAD_NORMS = ("q_norm", "k_norm")
TRIED = "moe_infinity_trial"  # the name of an attention that only notes what it is given
TRIED_POSITION = 5
STRENGTHS = (1, 8)  # of numbers in a trial: what limits large ones is seen
SETTINGS = ("scaling", "sliding_window", "s_aux", "softcap")  # what a module may tell attention

logger = logging.getLogger(__name__)

MakeHeads = Callable[..., tuple[Tensor, Tensor]]


class Handed(NamedTuple):
    """What a module hands to attention for a token of each sequence: [B, heads, width] each."""

    query: Tensor
    key: Tensor
    value: Tensor


class _Usual:
    """Queries, keys and values are products, with norms and rotary positions."""

    def __init__(self, module: Any, heads: Heads) -> None:
        linears = [module.get_submodule(name) for name in PRODUCTS]
        self.weight, self.bias = joined(linears)
        self._module = module
        self._heads = heads
        self._stops = linears[0].out_features, linears[0].out_features + linears[1].out_features

    def make(self, x_BD: Tensor, angles: tuple[Tensor, Tensor], make_heads: MakeHeads) -> Handed:
        module = self._module
        columns_BC = linear(x_BD, self.weight, self.bias)
        norms = [getattr(module, n).weight if self._heads.norm_form else None for n in HEAD_NORMS]
        queries, stop = self._stops
        made = make_heads(columns_BC, columns_BC[:, queries:], *norms, *angles, self._heads)
        return Handed(*made, columns_BC[:, stop:].unflatten(1, (self._heads.num_groups, -1)))


class _Latent:
    """Queries, and a latent in place of keys and values: DeepSeek-V2 and those like it."""

    def __init__(self, module: Any, heads: Heads) -> None:
        self._module = module
        self._heads = heads

    def make(self, x_BD: Tensor, angles: tuple[Tensor, Tensor], make_heads: MakeHeads) -> Handed:
        module = self._module
        if getattr(module, "q_a_proj", None) is not None:
            query_BC = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x_BD)))
        else:
            query_BC = module.q_proj(x_BD)
        compressed_BC = module.kv_a_proj_with_mqa(x_BD)
        rank = module.kv_lora_rank
        latent_Br = module.kv_a_layernorm(compressed_BC[:, :rank])
        given = query_BC, compressed_BC[:, rank:], None, None
        query_BHd, key_B1p = make_heads(*given, *angles, self._heads)
        return Handed(query_BHd, latent_Br[:, None], key_B1p)


class Found(NamedTuple):
    """How modules of one kind compute."""

    heads: Heads
    settings: dict[str, Any]
    sinks: str | None  # the name of the parameter


class FusedAttention:
    """In place of the forward method of one attention module."""

    def __init__(self, module: Any, found: Found, angles: Angles) -> None:
        self._module = module
        self._stock: Callable[..., Any] = module.forward
        self._found = found
        self.way = _way_of(module, found.heads)
        self._angles = angles
        self._children = dict(module.named_children())

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the stock method."""
        place = None if args else self._place(kwargs.get("past_key_values"))
        angles = kwargs.get("position_embeddings")
        if place is None or angles is None or not self._is_as_found():
            return self._stock(hidden_states, *args, **kwargs)
        handed = self.way.make(
            hidden_states[:, 0], self._angles.of(angles), place.kernels.make_heads
        )
        query, key, value = (x[:, :, None] for x in handed)
        setattr(key, NAME, place)
        settings = dict(self._found.settings)
        if self._found.sinks is not None:
            settings["s_aux"] = self._module.get_parameter(self._found.sinks)
        out, _ = attend_cached(self._module, query, key, value, None, **settings)
        last = self._module.o_proj
        return linear(out.flatten(2), last.weight, last.bias), None

    def _is_as_found(self) -> bool:
        """Whether nobody has replaced a part, or watches one."""
        return all(
            self._module.get_submodule(name) is own
            and not (own._forward_hooks or own._forward_pre_hooks)
            for name, own in self._children.items()
        )

    def _place(self, cache: Any) -> Place | None:
        """Of its layer, in a decode step over a cache that kernels know."""
        layers = getattr(cache, "layers", ())
        index = self._module.layer_idx
        return vars(layers[index]).get(NAME) if index < len(layers) else None


def fuse_attention(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The attention modules that kernels can compute, each with its new forward method."""
    rotations = [m for m in model.modules() if hasattr(m, "inv_freq") and not list(m.children())]
    known: dict[Any, Found | None] = {}
    angles: dict[int, Angles] = {}
    for module in list(model.modules()):
        if not _has_parts(module):
            continue
        kind = _kind_of(module)
        if kind not in known:
            known[kind] = _find(module, rotations)
        found = known[kind]
        if found is not None:
            num_pairs = found.heads.rotated // 2
            of_step = angles.setdefault(num_pairs, Angles(num_pairs))
            yield module, FusedAttention(module, found, of_step).forward


def joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of several layers as one, and so their biases. Each layer's own becomes a part of
    it. Raises ValueError if only some have a bias.
    """
    biases = [each.bias for each in linears if each.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise ValueError("only some have a bias")
    sizes = [each.out_features for each in linears]
    with torch.no_grad():
        weight = torch.cat(tuple(each.weight for each in linears))
        bias = torch.cat(tuple(biases)) if biases else None
    for each, part in zip(linears, weight.split(sizes), strict=True):
        each.weight.data = part
    if bias is not None:
        for each, part in zip(linears, bias.split(sizes), strict=True):
            each.bias.data = part
    return weight, bias


def _way_of(module: Any, heads: Heads) -> _Usual | _Latent:
    return _Latent(module, heads) if hasattr(module, EXPAND) else _Usual(module, heads)


def _has_parts(module: nn.Module) -> bool:
    names = ["o_proj", *(() if hasattr(module, EXPAND) else PRODUCTS)]
    parts = dict(module.named_children())
    return hasattr(module, "layer_idx") and all(type(parts.get(n)) is nn.Linear for n in names)


def _kind_of(module: nn.Module) -> Any:
    """Modules of one kind differ in nothing but their weights and their place."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
    plain.pop("layer_idx", None)
    shapes = [(name, p.shape, p.dtype) for name, p in module.named_parameters()]
    return type(module), repr(sorted(plain.items())), tuple(shapes)


@torch.no_grad()
def _find(module: nn.Module, rotations: Sequence[nn.Module]) -> Found | None:
    for rotation in rotations:
        try:
            trials = [_Trial(module, rotation, strength) for strength in STRENGTHS]
            for heads in trials[0].candidates():
                if all(trial.passes(heads) for trial in trials):
                    return Found(heads, trials[0].settings, trials[0].sinks)
        except Exception as error:  # whatever a module does that wants other arguments or shapes
            logger.debug("%s is computed by its own code: %s", type(module).__name__, error)
    return None


class _Trial:
    """A module's own code on one random token."""

    def __init__(self, module: nn.Module, rotation: nn.Module, strength: float) -> None:
        self._module = in_float32(module).cpu()
        self._stock = module
        make = torch.Generator().manual_seed(4)
        width = next(p.shape[1] for p in self._module.parameters() if p.dim() == 2)
        x_1D = torch.randn(1, width, generator=make, dtype=torch.float32, device="cpu")
        self._x_1D = strength * x_1D
        positions = torch.full((1, 1), TRIED_POSITION, dtype=torch.long, device="cpu")
        angles = in_float32(rotation).cpu()(self._x_1D[None], positions)
        self._angles = angles
        self._given: Tensor
        with self._noting():
            out, *_ = self._module(
                self._x_1D[None],
                position_embeddings=angles,
                attention_mask=None,
                past_key_values=None,
            )
        last = self._module.o_proj
        if not is_close(linear(self._given.flatten(2), last.weight, last.bias), out):
            raise ValueError("more than a product after attention")

    @contextmanager
    def _noting(self) -> Iterator[None]:
        AttentionInterface.register(TRIED, self._note)
        with AttentionSwitch(self._module).to(TRIED):
            yield

    def _note(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **more: Any
    ) -> Any:
        self.handed = Handed(query[:, :, 0], key[:, :, 0], value[:, :, 0])
        self.settings = {name: more[name] for name in SETTINGS if more.get(name) is not None}
        own = dict(module.named_parameters(recurse=False))
        s_aux = self.settings.pop("s_aux", None)
        self.sinks = next((name for name, p in own.items() if p is s_aux), None)
        if s_aux is not None and self.sinks is None:
            raise ValueError("sinks that are no parameter")
        wide = module.o_proj.in_features // query.shape[1]
        make = torch.Generator().manual_seed(5)
        shape = 1, 1, query.shape[1], wide
        self._given = torch.randn(shape, generator=make, dtype=torch.float32, device="cpu")
        return self._given, None

    def candidates(self) -> Iterator[Heads]:
        query, key, _ = self.handed
        is_latent = hasattr(self._module, EXPAND)
        if is_latent:
            key = self.handed.value
        norm: dict[str, Any] = {}
        if not is_latent and hasattr(self._module, HEAD_NORMS[0]):
            own = [getattr(self._stock, name) for name in HEAD_NORMS]
            forms = {form_of(each) for each in own}
            if len(forms) > 1 or None in forms:
                raise ValueError("norms that kernels do not know")
            eps = [eps_of(each) for each in own]
            norm = {"norm_form": forms.pop(), "query_eps": eps[0], "key_eps": eps[1]}
            norm["norms_all"] = len(own[0].weight) != query.shape[2]
        cos = self._angles.real if isinstance(self._angles, Tensor) else self._angles[0]
        for rotated, pairs in product((cos.shape[-1], 2 * cos.shape[-1]), PAIRS):
            if rotated <= key.shape[2]:
                yield Heads(
                    num_heads=query.shape[1],
                    num_groups=key.shape[1],
                    query_width=query.shape[2],
                    key_width=key.shape[2],
                    rotated=rotated,
                    first_rotated=query.shape[2] - rotated if is_latent else 0,
                    first_rotated_key=0,
                    pairs=pairs,
                    **norm,
                )

    def passes(self, heads: Heads) -> bool:
        """Whether our way hands over the same."""
        angles = Angles(heads.rotated // 2).of(self._angles)
        found = _way_of(self._module, heads).make(self._x_1D, angles, make_heads)
        return all(map(is_close, found, self.handed))
