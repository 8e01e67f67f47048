"""Decoder layers on a GPU whose sums are computed together with the norm that follows.

    attention(norm(x))  ->  x, norm(x)    x += what attention gave
    block(norm(x))      ->  x, norm(x)    x += what routed experts gave + what shared ones gave

The second norm is that of the next layer, or of the model. Which layers compute so is found by
trying: on random tokens, in float32, with other modules in place of attention and experts, a layer
has to give these sums. So are blocks whose two parts are added.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_infinity.architectures.adapters import CALL_ATTRIBUTE
from moe_infinity.architectures.cache_argument import CACHE_NAMES
from moe_infinity.architectures.model_parts import (
    ATTENTION,
    NORM,
    RESIDUAL_NORM,
    feed_forward,
    router_of,
)
from moe_infinity.architectures.trial import in_float32, is_close
from moe_infinity.experimental.gpu.norms import FusedNorm, added_up

TRIED_ROWS = 3
# Arguments of a layer that it hands on to attention, and does not look at; others only if they say
# nothing.
HANDED_ON = {
    "attention_mask", "position_embeddings", "position_ids", "use_cache", "cache_position",
    *CACHE_NAMES,
}  # fmt: skip
MODEL_NORM = "norm"  # beside the list of layers

logger = logging.getLogger(__name__)

Parts = Callable[[Tensor], tuple[Tensor, ...]]


class FusedLayer:
    """In place of the forward method of one decoder layer."""

    def __init__(
        self, layer: Any, parts: Parts, norm: FusedNorm, next_norm: FusedNorm | None
    ) -> None:
        self._stock: Callable[..., Any] = layer.forward
        self._layer = layer
        self._parts = parts
        self._norm = norm
        self._next_norm = next_norm

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the stock method."""
        others = (value for name, value in kwargs.items() if name not in HANDED_ON)
        if args or torch.is_grad_enabled() or not {*others} <= {None, False}:
            return self._stock(hidden_states, *args, **kwargs)
        layer = self._layer
        normed = layer.get_submodule(NORM)(hidden_states)
        out = layer.get_submodule(ATTENTION)(hidden_states=normed, **kwargs)
        hidden_states = self._norm.add(hidden_states, out[0])
        added = self._parts(layer.get_submodule(RESIDUAL_NORM)(hidden_states))
        if self._next_norm is None:
            return added_up(hidden_states, added)
        return self._next_norm.add(hidden_states, *added)


class _Whole:
    """A block as it is."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        out = self._block(x)
        only: Tensor = out[0] if isinstance(out, tuple) else out
        return (only.view(x.shape),)


class _WithShared:
    """A block that adds shared experts to routed ones."""

    def __init__(self, block: nn.Module, router: str, experts: str, shared: str) -> None:
        self._block = block
        self._names = router, experts, shared
        self._whole = _Whole(block)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self._block._forward_hooks or self._block._forward_pre_hooks:
            return self._whole(x)
        router, experts, shared = (self._block.get_submodule(name) for name in self._names)
        x_TD = x.flatten(0, -2)
        _, weights_TK, index_TK = router(x_TD)
        return experts(x_TD, index_TK, weights_TK).view(x.shape), shared(x)


def fuse_layers(
    model: nn.Module, norms: Mapping[nn.Module, FusedNorm]
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The decoder layers that compute so, each with its new forward method."""
    for parent in list(model.modules()):
        for children in parent.children():
            if not isinstance(children, nn.ModuleList):
                continue
            layers = list(children)
            last = dict(parent.named_children()).get(MODEL_NORM)
            following = [*(dict(each.named_children()).get(NORM) for each in layers[1:]), last]
            for layer, after in zip(layers, following, strict=True):
                own = dict(layer.named_children())
                if {NORM, ATTENTION, RESIDUAL_NORM} <= own.keys() and len(own) == 4:
                    norm = norms.get(own[RESIDUAL_NORM])
                    if norm is not None and _adds(layer):
                        parts = parts_of(feed_forward(layer))
                        next_norm = None if after is None else norms.get(after)
                        yield layer, FusedLayer(layer, parts, norm, next_norm).forward


@torch.no_grad()
def _adds(layer: nn.Module) -> bool:
    """Whether a layer gives the sums above."""
    for block in (_Stub(), _Two()):
        try:
            if _adds_with(layer, block):
                return True
        except Exception as error:  # whatever a layer does that wants or gives something else
            logger.debug("%s is computed by its own code: %s", type(layer).__name__, error)
    return False


def _adds_with(layer: nn.Module, block: nn.Module) -> bool:
    own = feed_forward(layer)
    x = _random(1, TRIED_ROWS, len(layer.get_submodule(RESIDUAL_NORM).get_parameter("weight")))
    given = {"attention_mask": None, "position_embeddings": (x, x)}
    stubs = {own: block, layer.get_submodule(ATTENTION): _Attention(given)}
    tried: Any = copy.copy(layer)
    tried._modules = {
        name: stubs[module] if module in stubs else in_float32(module).cpu()
        for name, module in layer.named_children()
    }
    stub = _Stub()
    middle = x + stub(tried.get_submodule(NORM)(x))
    wanted = middle + stub(tried.get_submodule(RESIDUAL_NORM)(middle))
    found = tried.forward(x, **given)
    return isinstance(found, Tensor) and is_close(found, wanted)


@torch.no_grad()
def parts_of(block: nn.Module) -> Parts:
    """What a block adds up to what it gives."""
    children = dict(block.named_children())
    router = [name for name, each in children.items() if each is router_of(block)]
    experts = [name for name, each in children.items() if CALL_ATTRIBUTE in vars(each)]
    shared = children.keys() - {*router, *experts}
    if [len(router), len(experts), len(shared)] != [1, 1, 1]:
        return _Whole(block)
    names = *router, *experts, *shared
    tried: Any = copy.copy(block)
    tried._modules = dict(zip(names, (_Router(), _Experts(), _Stub()), strict=True))
    x = _random(1, TRIED_ROWS, children[names[0]].get_parameter("weight").shape[1])
    found = _WithShared(tried, *names)
    try:
        if is_close(tried.forward(x), added_up(torch.zeros_like(x), found(x))):
            return _WithShared(block, *names)
    except Exception as error:  # whatever a block does beside
        logger.debug("%s is computed by its own code: %s", type(block).__name__, error)
    return _Whole(block)


def _random(*shape: int) -> Tensor:
    make = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=make, dtype=torch.float32, device="cpu")


class _Stub(nn.Module):
    """In place of what computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1) * 0.5


class _Two(_Stub):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class _Attention(nn.Module):
    """In place of attention, which has to be given what the layer was."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self._given = given

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not value for name, value in self._given.items()):
            raise ValueError("attention is given something else than the layer")
        return hidden_states.flip(-1) * 0.5, None


class _Router(nn.Module):
    def forward(self, x_TD: Tensor) -> Any:
        rows = x_TD.flatten(0, -2)
        return rows, rows[:, :2].softmax(1), rows[:, :2].long()


class _Experts(nn.Module):
    def forward(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return x_TD * (weights_TK * (1 + index_TK)).sum(1, keepdim=True)
