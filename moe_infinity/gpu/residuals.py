"""RMSNorms and the sums before them on a GPU, each pair in one kernel.

    attention(norm(x))  ->  x, norm(x)    x += what attention gave
    block(norm(x))      ->  x, norm(x)    x += what routed experts gave + what shared ones gave

The second norm is that of the next layer, or of the model. Which modules are norms, which layers
compute so, and which blocks add two parts, is found by trying, whatever their classes are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from moe_infinity.architectures.adapters import CALL_ATTRIBUTE
from moe_infinity.architectures.answered_ahead import AnsweredAhead
from moe_infinity.architectures.attention_inputs import CACHE_NAMES
from moe_infinity.architectures.model_parts import (
    ATTENTION,
    NORM,
    RESIDUAL_NORM,
    feed_forward,
    router_of,
)
from moe_infinity.architectures.trial import (
    Differs,
    Found,
    Trial,
    Verdict,
    first_found,
    first_that,
    is_close,
    verdict,
)
from moe_infinity.gpu.kernels import Kernels
from moe_infinity.gpu.kernels.descriptions import FORMS
from moe_infinity.gpu.kernels.reference import rms_norm

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
TRIED_ROWS = 3
# Arguments of a layer that it hands on to attention, and does not look at; others only if they say
# nothing.
HANDED_ON = {
    "attention_mask", "position_embeddings", "position_ids", "use_cache", "cache_position",
    *CACHE_NAMES,
}  # fmt: skip
MODEL_NORM = "norm"  # beside the list of layers

Parts = Callable[[Tensor], tuple[Tensor, ...]]


# Norms


class FusedNorm:
    """In place of the forward method of one RMSNorm."""

    def __init__(self, module: Any, form: str, kernels: Kernels) -> None:
        self.module = module
        self._eps = eps_of(module) or 0.0
        self._form = form
        self._kernels = kernels
        self._stock: Callable[[Tensor], Tensor] = module.forward
        self._ahead: AnsweredAhead[nn.Module, Tensor] = AnsweredAhead()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute as the stock method does."""
        normed = self._ahead.take(self.module, hidden_states)
        if normed is not None:
            return normed
        if not self._is_for_kernels(hidden_states):
            return self._stock(hidden_states)
        return self._kernels.rms_norm(hidden_states, self.module.weight, self._eps, self._form)

    def add(self, x: Tensor, *added: Tensor) -> Tensor:
        """Return the sum, with which the module is called next: what it will give is computed, too.
        A tensor of inference mode does not tell whether it was changed meanwhile.
        """
        if not self._is_for_kernels(x) or torch.is_inference_mode_enabled():
            return added_up(x, added)
        weight_D = self.module.weight
        total, normed = self._kernels.add_rms_norm(x, added, weight_D, self._eps, self._form)
        self._ahead.put(self.module, total, normed)
        return total

    def _is_for_kernels(self, x: Tensor) -> bool:
        return not torch.is_grad_enabled() and x.dtype == self.module.weight.dtype


def added_up(x: Tensor, added: tuple[Tensor, ...]) -> Tensor:
    """Return x and the sum of the others."""
    return x + sum(added[1:], added[0])


def find_norms(model: nn.Module, kernels: Kernels) -> dict[nn.Module, FusedNorm]:
    """Return the RMSNorms of a model."""
    verdicts: dict[tuple[type, float | None], Verdict[str]] = {}
    norms: dict[nn.Module, FusedNorm] = {}
    for module in model.modules():
        if not _may_be_norm(module):
            continue
        kind = type(module), eps_of(module)
        if kind not in verdicts:
            verdicts[kind] = try_norm(module)
        form = verdicts[kind]
        if isinstance(form, Found):
            norms[module] = FusedNorm(module, form.path, kernels)
    return norms


def _may_be_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    return (
        set(parameters) == {"weight"}
        and parameters["weight"].ndim == 1
        and not list(module.children())
        and not has_hooks
        and len(signature(module.forward).parameters) == 1
        and eps_of(module) is not None
    )


def eps_of(module: nn.Module) -> float | None:
    """Return what is added to the mean square; None if nothing is known of one."""
    values = (vars(module).get(name) for name in EPS_NAMES)
    return next((float(value) for value in values if isinstance(value, float)), None)


def try_norm(module: nn.Module) -> Verdict[str]:
    """Find out which of FORMS has the bits of a module, in its own dtype."""

    def search() -> str:
        weight = module.get_parameter("weight")
        trial = Trial(module, seed=0)
        drawn = trial.random(len(weight)).to(weight.dtype)
        trial.module.weight = nn.Parameter(drawn, requires_grad=False)
        x = trial.random(TRIED_ROWS, len(weight)).to(weight.dtype)
        given = trial.module.forward(x)
        eps = eps_of(module)
        assert eps is not None, module
        return first_that(
            FORMS, lambda form: torch.equal(given, rms_norm(x, drawn, eps, form)), "is no RMSNorm"
        )

    return verdict(search)


# Layers


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
        """Compute as the stock method does."""
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
        if (
            self._block._forward_hooks or self._block._forward_pre_hooks
        ):  # by which outputs are kept
            return self._whole(x)
        router, experts, shared = (self._block.get_submodule(name) for name in self._names)
        x_TD = x.flatten(0, -2)
        _, weights_TK, index_TK = router(x_TD)
        return experts(x_TD, index_TK, weights_TK).view(x.shape), shared(x)


def fuse_layers(
    model: nn.Module, norms: Mapping[nn.Module, FusedNorm]
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield the decoder layers that compute so, each with its new forward method."""
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
                    if norm is not None and isinstance(try_layer(layer), Found):
                        parts = parts_of(feed_forward(layer))
                        next_norm = None if after is None else norms.get(after)
                        yield layer, FusedLayer(layer, parts, norm, next_norm).forward


def try_layer(layer: nn.Module) -> Verdict[nn.Module]:
    """Find out whether a layer gives the sums above, with other modules in place of attention and
    experts.
    """
    return first_found(verdict(partial(_adding, layer, block)) for block in (_Stub(), _Two()))


def _adding(layer: nn.Module, block: nn.Module) -> nn.Module:
    names = {module: name for name, module in layer.named_children()}
    attention = _Attention()
    stubs = {names[feed_forward(layer)]: block, ATTENTION: attention}
    trial = Trial(layer, seed=7, stubs=stubs)
    x = trial.random(1, TRIED_ROWS, len(layer.get_submodule(RESIDUAL_NORM).get_parameter("weight")))
    given = {"attention_mask": None, "position_embeddings": (x, x)}
    attention.given.update(given)
    stub = _Stub()
    middle = x + stub(trial.module.get_submodule(NORM)(x))
    wanted = middle + stub(trial.module.get_submodule(RESIDUAL_NORM)(middle))
    found = trial.module.forward(x, **given)
    if not isinstance(found, Tensor) or not is_close(found, wanted):
        raise Differs("it does not add attention and its block to the residual")
    return layer


def parts_of(block: nn.Module) -> Parts:
    """Return what gives the parts that a block adds up."""
    found = verdict(lambda: _with_shared(block))
    return found.path if isinstance(found, Found) else _Whole(block)


def _with_shared(block: nn.Module) -> Parts:
    children = dict(block.named_children())
    router = [name for name, each in children.items() if each is router_of(block)]
    experts = [name for name, each in children.items() if CALL_ATTRIBUTE in vars(each)]
    shared = children.keys() - {*router, *experts}
    if [len(router), len(experts), len(shared)] != [1, 1, 1]:
        raise Differs("it has other parts than a router, routed and shared experts")
    names = *router, *experts, *shared
    stubs = dict(zip(names, (_Router(), _Experts(), _Stub()), strict=True))
    trial = Trial(block, seed=7, stubs=stubs)
    x = trial.random(1, TRIED_ROWS, children[names[0]].get_parameter("weight").shape[1])
    found = _WithShared(trial.module, *names)(x)
    if not is_close(trial.module.forward(x), added_up(torch.zeros_like(x), found)):
        raise Differs("it does not add shared experts to routed ones")
    return _WithShared(block, *names)


class _Stub(nn.Module):
    """In place of what computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1) * 0.5


class _Two(_Stub):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class _Attention(nn.Module):
    """In place of attention, which has to be given what the layer was."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not value for name, value in self.given.items()):
            raise Differs("attention is given something else than the layer")
        return hidden_states.flip(-1) * 0.5, None


class _Router(nn.Module):
    def forward(self, x_TD: Tensor) -> Any:
        rows = x_TD.flatten(0, -2)
        return rows, rows[:, :2].softmax(1), rows[:, :2].long()


class _Experts(nn.Module):
    def forward(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return x_TD * (weights_TK * (1 + index_TK)).sum(1, keepdim=True)
