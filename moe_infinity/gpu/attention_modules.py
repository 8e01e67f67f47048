"""Attention modules on a GPU in few kernels: one product for queries, keys and values, one kernel
for norms and rotary positions of heads, attention, and the product of what was looked at.

Which modules these are is found by trying: a module is called with random numbers, in float32, and
what it hands to attention is compared with what the kernels would hand over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from moe_infinity.architectures.attention_inputs import CACHE_NAMES, Angles, cache_in
from moe_infinity.architectures.model_parts import rotations_of
from moe_infinity.architectures.module_state import eager_attention_of
from moe_infinity.architectures.trial import (
    Differs,
    Found,
    Trial,
    Verdict,
    first_found,
    first_that,
    in_float32,
    is_close,
    verdict,
)
from moe_infinity.gpu.cached_step import EXPAND, AttentionSwitch
from moe_infinity.gpu.kernels import Kernels
from moe_infinity.gpu.kernels.descriptions import PAIRS, Heads
from moe_infinity.gpu.kernels.reference import make_heads
from moe_infinity.gpu.residuals import eps_of, try_norm
from moe_infinity.gpu.routers import joined

PRODUCTS = ("q_proj", "k_proj", "v_proj")
HEAD_NORMS = ("q_norm", "k_norm")
LATENT_NORM = "kv_a_layernorm"
TRIED = "moe_infinity_trial"  # the name of an attention that only notes what it is given
TRIED_POSITIONS = (5, 9)
STRENGTHS = (1, 8)  # of numbers in a trial: what limits large ones is seen
SETTINGS = ("scaling", "sliding_window", "s_aux", "softcap")  # what a module may tell attention
# Arguments of a module that it does not hand on.
OF_MODULE = ("position_embeddings", "attention_mask", *CACHE_NAMES)

MakeHeads = Callable[..., tuple[Tensor, Tensor]]


class Handed(NamedTuple):
    """The inputs of attention for each token: [B, heads, width]."""

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
        self._is_query_latent = getattr(module, "q_a_proj", None) is not None
        first = module.q_a_proj if self._is_query_latent else module.q_proj
        self.weight, self.bias = joined([first, module.kv_a_proj_with_mqa])
        self._stop = first.out_features
        self._module = module
        self._heads = heads

    def make(self, x_BD: Tensor, angles: tuple[Tensor, Tensor], make_heads: MakeHeads) -> Handed:
        module = self._module
        columns_BC = linear(x_BD, self.weight, self.bias)
        query_BC = columns_BC[:, : self._stop]
        if self._is_query_latent:
            query_BC = module.q_b_proj(module.q_a_layernorm(query_BC))
        given = query_BC, columns_BC[:, self._stop :], None, module.kv_a_layernorm.weight
        query_BHd, key_B1C = make_heads(*given, *angles, self._heads)
        rank = self._heads.normed_key
        return Handed(query_BHd, key_B1C[..., :rank], key_B1C[..., rank:])


class AttentionPath(NamedTuple):
    """How modules of one kind compute."""

    heads: Heads
    settings: dict[str, Any]
    sinks: str | None  # the name of the parameter


class FusedAttention:
    """In place of the forward method of one attention module."""

    def __init__(self, module: Any, path: AttentionPath, angles: Angles, kernels: Kernels) -> None:
        self._module = module
        self._stock: Callable[..., Any] = module.forward
        self._path = path
        self._kernels = kernels
        self.products = _products_of(module, path.heads)
        self._angles = angles
        self._eager = eager_attention_of(module)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute as the stock method does."""
        given = kwargs.get("position_embeddings")
        attend = self._attention()
        if args or given is None or attend is None or torch.is_grad_enabled():
            return self._stock(hidden_states, *args, **kwargs)
        module = self._module
        shape = hidden_states.shape[:2]
        angles = self._angles.of(given, shape.numel())
        handed = self.products.make(hidden_states.flatten(0, 1), angles, self._kernels.make_heads)
        query, key, value = (x.unflatten(0, shape).transpose(1, 2) for x in handed)
        cache = cache_in(kwargs)
        if cache is not None:
            key, value = cache.update(key, value, module.layer_idx)
        if hasattr(module, EXPAND):
            key, value = module.expand_kv(key, value)
        settings = self._path.settings | {k: v for k, v in kwargs.items() if k not in OF_MODULE}
        if self._path.sinks is not None:
            settings["s_aux"] = module.get_parameter(self._path.sinks)
        mask = kwargs.get("attention_mask")
        out, weights = attend(module, query, key, value, mask, dropout=0.0, **settings)
        return module.o_proj(out.flatten(2)), weights

    def _attention(self) -> Callable[..., Any] | None:
        """Return the function that the model calls, which is ours in decode steps."""
        name = self._module.config._attn_implementation
        found: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get_interface(name, self._eager)
        return found


def fuse_attention(
    model: nn.Module, kernels: Kernels
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield the attention modules that kernels can compute, each with its new forward method."""
    rotations = rotations_of(model)
    verdicts: dict[Any, Verdict[AttentionPath]] = {}
    angles: dict[int, Angles] = {}
    for module in list(model.modules()):
        if not _has_parts(module) or not rotations:
            continue
        kind = _kind_of(module)
        if kind not in verdicts:
            verdicts[kind] = try_attention(module, rotations)
        found = verdicts[kind]
        if isinstance(found, Found):
            num_pairs = found.path.heads.rotated // 2
            of_step = angles.setdefault(num_pairs, Angles(num_pairs))
            yield module, FusedAttention(module, found.path, of_step, kernels).forward


def _products_of(module: Any, heads: Heads) -> _Usual | _Latent:
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


def try_attention(module: nn.Module, rotations: Sequence[nn.Module]) -> Verdict[AttentionPath]:
    """Find out how a module makes what it hands to attention."""
    return first_found(verdict(partial(_path_of, module, each)) for each in rotations)


def _path_of(module: nn.Module, rotation: nn.Module) -> AttentionPath:
    trials = [_HandedTrial(module, rotation, strength) for strength in STRENGTHS]
    heads = first_that(
        trials[0].candidates(),
        lambda each: all(trial.passes(each) for trial in trials),
        "it makes queries and keys otherwise",
    )
    return AttentionPath(heads, trials[0].settings, trials[0].sinks)


class _HandedTrial:
    """A module's own code on two random tokens."""

    def __init__(self, module: nn.Module, rotation: nn.Module, strength: float) -> None:
        self._trial = Trial(module, seed=4)
        self._module = self._trial.module
        self._stock = module
        width = next(p.shape[1] for p in self._module.parameters() if p.dim() == 2)
        self._x_TD = strength * self._trial.random(len(TRIED_POSITIONS), width)
        positions = torch.tensor([TRIED_POSITIONS], dtype=torch.long, device="cpu")
        angles = in_float32(rotation)(self._x_TD[None], positions)
        self._angles = angles
        self._given: Tensor
        with self._noting():
            out, *_ = self._module(
                self._x_TD[None],
                position_embeddings=angles,
                attention_mask=None,
            )
        last = self._module.o_proj
        if not is_close(linear(self._given.flatten(2), last.weight, last.bias), out):
            raise Differs("more than a product after attention")

    @contextmanager
    def _noting(self) -> Iterator[None]:
        AttentionInterface.register(TRIED, self._note)
        with AttentionSwitch(self._module).to(TRIED):
            yield

    def _note(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **more: Any
    ) -> Any:
        self.handed = Handed(*(x[0].transpose(0, 1) for x in (query, key, value)))
        if more.keys() - {*SETTINGS, "dropout"}:
            raise Differs(f"attention is told {sorted(more)}")
        self.settings = {name: more[name] for name in SETTINGS if more.get(name) is not None}
        own = dict(module.named_parameters(recurse=False))
        s_aux = self.settings.pop("s_aux", None)
        self.sinks = next((name for name, p in own.items() if p is s_aux), None)
        if s_aux is not None and self.sinks is None:
            raise Differs("sinks that are no parameter")
        wide = module.o_proj.in_features // query.shape[1]
        self._given = self._trial.random(1, query.shape[2], query.shape[1], wide)
        return self._given, None

    def candidates(self) -> Iterator[Heads]:
        query, key, _ = self.handed
        is_latent = hasattr(self._module, EXPAND)
        rank = key.shape[2] if is_latent else 0
        width = self.handed.value.shape[2] if is_latent else key.shape[2]
        names = [LATENT_NORM] if is_latent else HEAD_NORMS
        norm: dict[str, Any] = {"normed_key": rank}
        if hasattr(self._module, names[0]):
            own = [getattr(self._stock, name) for name in names]
            forms = [try_norm(each) for each in own]
            if not isinstance(forms[0], Found) or forms[0] != forms[-1]:
                raise Differs("norms that kernels do not know")
            eps = [eps_of(each) for each in own]
            norm |= {"norm_form": forms[0].path, "query_eps": eps[0], "key_eps": eps[-1]}
            norm["norms_all"] = not is_latent and len(own[0].weight) != query.shape[2]
        cos = self._angles.real if isinstance(self._angles, Tensor) else self._angles[0]
        for rotated, pairs in product((cos.shape[-1], 2 * cos.shape[-1]), PAIRS):
            if rotated <= width:
                yield Heads(
                    num_heads=query.shape[1],
                    num_groups=key.shape[1],
                    query_width=query.shape[2],
                    key_width=rank + width,
                    rotated=rotated,
                    first_rotated=query.shape[2] - rotated if is_latent else 0,
                    first_rotated_key=rank,
                    pairs=pairs,
                    **norm,
                )

    def passes(self, heads: Heads) -> bool:
        """Return True if kernels hand over the same."""
        angles = Angles(heads.rotated // 2).of(self._angles, len(self._x_TD))
        found = _products_of(self._module, heads).make(self._x_TD, angles, make_heads)
        return all(map(is_close, found, self.handed))
