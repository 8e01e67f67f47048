"""Routers on a GPU in two kernels: the logits, and the choice among experts. Which modules are
routers that kernels know is found by trying: on random tokens, in float32, a module has to choose
what an ExpertChoice chooses, whatever its class is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_infinity.architectures.trial import for_trial, is_close
from moe_infinity.experimental.gpu.kernels import routing_reference
from moe_infinity.experimental.gpu.kernels.choice import GROUP_SCORES, SCORES, SHARES, ExpertChoice
from moe_infinity.kernels import has_triton_kernels

TRIED_TOKENS = 32
GROUPS = ("num_group", "n_group", "num_expert_groups")  # attributes: into how many groups,
KEPT_GROUPS = ("topk_group", "top_k_group")  # and how many of them are kept

logger = logging.getLogger(__name__)


class RouterKernels(NamedTuple):
    """Their signatures are those of experimental/gpu/kernels/routing.py."""

    router_logits: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    choose: Callable[[Tensor, Tensor | None, ExpertChoice], tuple[Tensor, Tensor]]


class FoundRouter(NamedTuple):
    """How modules of one kind choose."""

    choice: ExpertChoice
    correction: str | None  # the name of what is added to scores for choosing


def fuse_routers(
    model: nn.Module, device: torch.device
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The routers that kernels know, each with its new forward method."""
    kernels = router_kernels(device)
    known: dict[Any, FoundRouter | None] = {}
    for module in list(model.modules()):
        if not _may_be_router(module):
            continue
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
        shape = module.get_parameter("weight").shape
        kind = type(module), repr(sorted(plain.items())), shape
        if kind not in known:
            known[kind] = find_router(module)
        found = known[kind]
        if found is not None:
            yield module, _forward(module, found, kernels)


def router_kernels(device: torch.device) -> RouterKernels:
    """Triton's for a GPU, else the plain reference."""
    if device.type != "cuda" or not has_triton_kernels():
        return RouterKernels(routing_reference.router_logits, routing_reference.choose)
    from moe_infinity.experimental.gpu.kernels import routing

    return RouterKernels(routing.router_logits, routing.choose)


def _forward(module: Any, found: FoundRouter, kernels: RouterKernels) -> Callable[..., Any]:
    stock: Callable[..., Any] = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = module.weight
        x_TD = hidden_states.reshape(-1, weight.shape[1])
        if torch.is_grad_enabled() or args or kwargs:
            return stock(hidden_states, *args, **kwargs)
        logits_TE = kernels.router_logits(x_TD, weight, getattr(module, "bias", None))
        correction = None if found.correction is None else getattr(module, found.correction)
        index_TK, shares_TK = kernels.choose(logits_TE, correction, found.choice)
        return logits_TE, shares_TK, index_TK

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


@torch.no_grad()
def find_router(module: nn.Module) -> FoundRouter | None:
    """None if it does anything else than kernels do."""
    try:
        return _matching(module)
    except Exception as error:  # whatever a module does that wants or gives something else
        logger.debug("%s chooses by its own code: %s", type(module).__name__, error)
        return None


def _matching(module: nn.Module) -> FoundRouter | None:
    make = torch.Generator().manual_seed(6)
    tried: Any = for_trial(module).cpu()
    dtype = tried.weight.dtype
    num_experts, width = tried.weight.shape
    x_TD = torch.randn(TRIED_TOKENS, width, generator=make, dtype=torch.float32, device="cpu")
    share_dtype = tried(x_TD.to(dtype))[1].dtype
    tried = tried.float()
    correction = _correction_of(tried, num_experts)
    if correction is not None:
        drawn = torch.rand(num_experts, generator=make, dtype=torch.float32, device="cpu")
        getattr(tried, correction).copy_(drawn)
    logits_TE, shares_TK, index_TK = tried(x_TD)
    plain_TE = routing_reference.router_logits(x_TD, tried.weight, getattr(tried, "bias", None))
    if not is_close(logits_TE, plain_TE):
        return None
    wanted = _spread(index_TK, shares_TK, num_experts)
    added = None if correction is None else getattr(tried, correction)
    for choice in _choices(tried, index_TK.shape[1], num_experts, share_dtype):
        plain = replace(choice, dtype=torch.float32)
        index, shares = routing_reference.choose(plain_TE, added, plain)
        found = _spread(index, shares, num_experts)
        factor = float(wanted.sum() / found.sum())
        if torch.equal(found != 0, wanted != 0) and is_close(found * factor, wanted):
            return FoundRouter(replace(choice, factor=_factor_of(tried, factor)), correction)
    return None


def _factor_of(module: nn.Module, about: float) -> float:
    """The module's own number where one is so near that sums in float32 do not tell them apart."""
    own = [1.0, *(float(v) for v in vars(module).values() if type(v) in (int, float))]
    return next((value for value in own if abs(value - about) < 1e-5 * abs(about)), about)


def _spread(index_TK: Tensor, shares_TK: Tensor, num_experts: int) -> Tensor:
    """[T, E]: shares by expert, whatever their order."""
    shares_TE = torch.zeros(len(index_TK), num_experts, dtype=torch.float32, device="cpu")
    return shares_TE.scatter_(1, index_TK, shares_TK.float())


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
    for (count, kept, group_score), scores, shares in product(groups, SCORES, SHARES):
        choice = ExpertChoice(
            top_k=top_k,
            scores=scores,
            shares=shares,
            dtype=dtype,
            num_groups=count,
            kept_groups=kept,
            group_score=group_score,
        )
        if choice.fits(num_experts):
            yield choice
