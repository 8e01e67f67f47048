"""Routers on a GPU: a product, and the choice among experts in one kernel. Which modules are
routers that the kernel knows is found by trying: on random tokens, in float32, a module has to
choose what an ExpertChoice chooses, whatever its class is called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moe_infinity.architectures.adapters import find_activation
from moe_infinity.architectures.trial import (
    Differs,
    Found,
    Trial,
    Verdict,
    first_that,
    for_trial,
    is_close,
    verdict,
)
from moe_infinity.gpu.kernels import Kernels, reference
from moe_infinity.gpu.kernels.descriptions import (
    GROUP_SCORES,
    SCORES,
    WEIGHTS,
    ExpertChoice,
)
from moe_infinity.kernels.reference import Activation

TRIED_TOKENS = 128
CORRECTIONS = (1.0, 0.05)
GROUPS = ("num_group", "n_group", "num_expert_groups")  # attributes: into how many groups,
KEPT_GROUPS = ("topk_group", "top_k_group")  # and how many of them are kept


class RouterPath(NamedTuple):
    """How modules of one kind choose."""

    dtype: torch.dtype  # of the logits
    choice: ExpertChoice
    correction: str | None  # the name of what is added to scores for choosing


def fuse_routers(
    model: nn.Module, kernels: Kernels
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield the routers that kernels know, each with its new forward method."""
    verdicts: dict[Any, Verdict[RouterPath]] = {}
    for module in list(model.modules()):
        if not _may_be_router(module):
            continue
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
        shape = module.get_parameter("weight").shape
        kind = type(module), repr(sorted(plain.items())), shape
        if kind not in verdicts:
            verdicts[kind] = try_router(module)
        found = verdicts[kind]
        if isinstance(found, Found):
            yield module, _forward(module, found.path, kernels)


def _forward(module: Any, path: RouterPath, kernels: Kernels) -> Callable[..., Any]:
    stock: Callable[..., Any] = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = module.weight
        x_TD = hidden_states.reshape(-1, weight.shape[1])
        if torch.is_grad_enabled() or args or kwargs:
            return stock(hidden_states, *args, **kwargs)
        bias = getattr(module, "bias", None)
        bias = None if bias is None else bias.to(path.dtype)
        logits_TE = linear(x_TD.to(path.dtype), weight.to(path.dtype), bias)
        correction = None if path.correction is None else getattr(module, path.correction)
        index_TK, weights_TK = kernels.choose(logits_TE, correction, path.choice)
        return logits_TE, weights_TK, index_TK

    return forward


def _may_be_router(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return (
        not isinstance(module, nn.Linear | nn.Embedding)
        and not list(module.children())
        and "weight" in parameters
        and parameters["weight"].ndim == 2
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def try_router(module: nn.Module) -> Verdict[RouterPath]:
    """Find out how a module chooses."""
    return verdict(lambda: _path_of(module))


def _path_of(module: nn.Module) -> RouterPath:
    trials = [_RouterTrial(module, size) for size in CORRECTIONS]
    first = trials[0]
    choices = _choices(module, first.top_k, first.num_experts, first.weights_dtype)
    choice = first_that(
        choices,
        lambda each: all(trial.factor_of(each) is not None for trial in trials),
        "it weighs otherwise",
    )
    factor = first.factor_of(choice)
    assert factor is not None
    choice = replace(choice, factor=_factor_of(module, factor))
    return RouterPath(first.logits_dtype, choice, first.correction)


class _RouterTrial:
    """A module's own code on random tokens, in float32. What is added to scores for choosing has
    about the given size: a large one hides how groups are scored, a small one that it is added.
    """

    def __init__(self, module: nn.Module, correction_size: float) -> None:
        trial = Trial(module, seed=6)
        tried = trial.module
        self.num_experts, width = tried.weight.shape
        x_TD = trial.random(TRIED_TOKENS, width)
        in_its_dtype = for_trial(module)
        logits_TE, weights_TK, _ = in_its_dtype(x_TD.to(in_its_dtype.weight.dtype))
        self.logits_dtype = logits_TE.dtype
        self.weights_dtype = weights_TK.dtype
        self.correction = _correction_of(tried, self.num_experts)
        self._added_E = None
        if self.correction is not None:
            self._added_E = getattr(tried, self.correction)
            self._added_E.copy_(correction_size * trial.random(self.num_experts).abs())
        logits_TE, weights_TK, index_TK = tried(x_TD)
        self.top_k = index_TK.shape[1]
        self._plain_TE = linear(x_TD, tried.weight, getattr(tried, "bias", None))
        if not is_close(logits_TE, self._plain_TE):
            raise Differs("its logits are no product")
        self._wanted_TE = _spread(index_TK, weights_TK, self.num_experts)

    def factor_of(self, choice: ExpertChoice) -> float | None:
        """Return the factor that the weights of a choice lack; None if it is another choice."""
        plain = replace(choice, dtype=torch.float32)
        chosen = reference.choose(self._plain_TE, self._added_E, plain)
        given_TE = _spread(*chosen, self.num_experts)
        factor = float(self._wanted_TE.sum() / given_TE.sum())
        is_same = torch.equal(given_TE != 0, self._wanted_TE != 0)
        return factor if is_same and is_close(given_TE * factor, self._wanted_TE) else None


def _factor_of(module: nn.Module, about: float) -> float:
    """The module's own number where one is so near that sums in float32 do not tell them apart."""
    own = [1.0, *(float(v) for v in vars(module).values() if type(v) in (int, float))]
    return next((value for value in own if abs(value - about) < 1e-5 * abs(about)), about)


def _spread(index_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Tensor:
    """[T, E]: weights by expert, whatever their order."""
    weights_TE = torch.zeros(len(index_TK), num_experts, dtype=torch.float32, device="cpu")
    return weights_TE.scatter_(1, index_TK, weights_TK.float())


def _correction_of(module: nn.Module, num_experts: int) -> str | None:
    """A number for each expert that is no bias of the product."""
    own = dict(module.named_buffers(recurse=False)) | dict(module.named_parameters(recurse=False))
    names = [name for name, t in own.items() if name != "bias" and t.shape == (num_experts,)]
    return names[0] if names else None


def _choices(
    module: nn.Module, top_k: int, num_experts: int, dtype: torch.dtype
) -> Iterator[ExpertChoice]:
    """All that could be meant."""
    num_groups = next((vars(module)[name] for name in GROUPS if vars(module).get(name)), 1)
    kept = next((vars(module)[name] for name in KEPT_GROUPS if vars(module).get(name)), 1)
    groups = [(1, 1, GROUP_SCORES[0])]
    if num_groups > 1:
        groups = [(num_groups, kept, score) for score in GROUP_SCORES] + groups
    for (count, kept, group_score), scores, weights in product(groups, SCORES, WEIGHTS):
        choice = ExpertChoice(
            top_k=top_k,
            scores=scores,
            weights=weights,
            dtype=dtype,
            num_groups=count,
            kept_groups=kept,
            group_score=group_score,
        )
        if choice.fits(num_experts):
            yield choice


PRODUCTS = ("gate_proj", "up_proj", "down_proj")


class FusedMlp:
    """In place of the forward method of one MLP."""

    def __init__(self, module: Any, activation: Activation, kernels: Kernels) -> None:
        self._stock: Callable[[Tensor], Tensor] = module.forward
        self._activation = activation
        self._kernels = kernels
        self._module = module
        products = [module.get_submodule(name) for name in PRODUCTS]
        self.weight, self.bias = joined(products[:2])

    def forward(self, x: Tensor) -> Tensor:
        """Compute as the stock method does."""
        if torch.is_grad_enabled():
            return self._stock(x)
        columns_TC = linear(x.flatten(0, -2), self.weight, self.bias)
        hidden = self._kernels.gated(columns_TC, self._activation).unflatten(0, x.shape[:-1])
        out: Tensor = self._module.down_proj(hidden)
        return out


def fuse_mlps(model: nn.Module, kernels: Kernels) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield the MLPs that kernels can compute, each with its new forward method."""
    for module in list(model.modules()):
        children = dict(module.named_children())
        if all(type(children.get(name)) is nn.Linear for name in PRODUCTS):
            activation = activation_of(module)
            if activation is not None:
                yield module, FusedMlp(module, activation, kernels).forward


def activation_of(module: nn.Module) -> Activation | None:
    """Return what a module computes between its products; None if kernels do not."""
    tried: Any = copy.copy(module)
    halves = {"gate_proj": _Half(0), "up_proj": _Half(1), "down_proj": nn.Identity()}
    tried._modules = {**module._modules, **halves}
    found = find_activation(lambda gate_up: tried.forward(gate_up), is_gated=True)
    return found.path[0] if isinstance(found, Found) and not found.path[1] else None


class _Half(nn.Module):
    """In place of a product: its input has what would come out."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self._which = which

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, -1)[self._which]


def joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weights of layers with the same input as one, for one product in place of several.
    Each layer's own weight becomes a piece of it, and so its bias. Where only some have a bias the
    others' is 0.
    """
    sizes = [each.out_features for each in linears]
    with torch.no_grad():
        weight = torch.cat(tuple(each.weight for each in linears))
        bias = None
        if any(each.bias is not None for each in linears):
            biases = (_bias_of(each) for each in linears)
            bias = torch.cat(tuple(biases))
    for each, part in zip(linears, weight.split(sizes), strict=True):
        each.weight.data = part
    if bias is not None:
        for each, part in zip(linears, bias.split(sizes), strict=True):
            if each.bias is not None:
                each.bias.data = part
    return weight, bias


def _bias_of(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
