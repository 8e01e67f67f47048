"""Norms of a model on a GPU, each in one kernel, with the sum before it. Which modules are RMSNorms
is found by trying: a module that gives the bits of the plain definition is one, whatever its class
is called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_infinity.experimental.gpu.kernels import norms_reference
from moe_infinity.experimental.gpu.kernels.norms_reference import FORMS, plain_rms_norm
from moe_infinity.kernels import has_triton_kernels

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
NUM_TRIED_ROWS = 3


class NormKernels(NamedTuple):
    """Their signatures are those of experimental/gpu/kernels/norms.py."""

    rms_norm: Callable[[Tensor, Tensor, float, str], Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]


class _Ahead(NamedTuple):
    """What was computed for a norm that is not called yet."""

    x: Tensor  # what it is expected to be given
    version: int  # of the contents of x
    normed: Tensor

    def is_for(self, x: Tensor) -> bool:
        return self.x is x and self.version == x._version


class FusedNorm:
    """In place of the forward method of one RMSNorm."""

    def __init__(self, module: Any, form: str, kernels: NormKernels) -> None:
        self.module = module
        self._eps = eps_of(module) or 0.0
        self._form = form
        self._kernels = kernels
        self._stock: Callable[[Tensor], Tensor] = module.forward
        self._ahead: _Ahead | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As the stock method."""
        ahead = self._ahead
        self._ahead = None
        if ahead is not None and ahead.is_for(hidden_states):
            return ahead.normed
        if not self._is_for_kernels(hidden_states):
            return self._stock(hidden_states)
        return self._kernels.rms_norm(hidden_states, self.module.weight, self._eps, self._form)

    def add(self, x: Tensor, *added: Tensor) -> Tensor:
        """The sum, with which the module is called next: what it will give is computed, too. A
        tensor of inference mode does not tell whether it was changed meanwhile.
        """
        if not self._is_for_kernels(x) or torch.is_inference_mode_enabled():
            return added_up(x, added)
        total, normed = self._kernels.add_rms_norm(
            x, added, self.module.weight, self._eps, self._form
        )
        self._ahead = _Ahead(total, total._version, normed)
        return total

    def _is_for_kernels(self, x: Tensor) -> bool:
        return not torch.is_grad_enabled() and x.dtype == self.module.weight.dtype


def added_up(x: Tensor, added: tuple[Tensor, ...]) -> Tensor:
    """x and the sum of the others."""
    return x + sum(added[1:], added[0])


def find_norms(model: nn.Module, device: torch.device) -> dict[nn.Module, FusedNorm]:
    """The RMSNorms of a model."""
    found: dict[tuple[type, float | None], str | None] = {}
    kernels = norm_kernels(device)
    norms: dict[nn.Module, FusedNorm] = {}
    for module in model.modules():
        if not _may_be_norm(module):
            continue
        kind = type(module), eps_of(module)
        if kind not in found:
            found[kind] = form_of(module)
        form = found[kind]
        if form is not None:
            norms[module] = FusedNorm(module, form, kernels)
    return norms


def norm_kernels(device: torch.device) -> NormKernels:
    """Triton's for a GPU, else the plain reference."""
    if device.type != "cuda" or not has_triton_kernels():
        return NormKernels(norms_reference.plain_rms_norm, norms_reference.plain_add_rms_norm)
    from moe_infinity.experimental.gpu.kernels import norms

    return NormKernels(norms.rms_norm, norms.add_rms_norm)


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
    """What is added to the mean square; None if nothing is known of one."""
    values = (vars(module).get(name) for name in EPS_NAMES)
    return next((float(value) for value in values if isinstance(value, float)), None)


@torch.no_grad()
def form_of(module: nn.Module) -> str | None:
    """One of FORMS; None if it is no RMSNorm."""
    generator = torch.Generator().manual_seed(0)
    weight = module.get_parameter("weight")
    tried: Any = copy.copy(module)
    tried._parameters = {}
    shape = len(weight)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    tried.weight = nn.Parameter(drawn.to(weight.dtype), requires_grad=False)
    x = torch.randn(
        NUM_TRIED_ROWS, shape, generator=generator, dtype=torch.float32, device="cpu"
    ).to(weight.dtype)
    eps = eps_of(module)
    assert eps is not None, module
    try:
        given = tried.forward(x)
    except Exception:  # whatever a class wants beside x
        return None
    for form in FORMS:
        expected = plain_rms_norm(x, tried.weight, eps, form)
        if isinstance(given, Tensor) and torch.equal(given, expected):
            return form
    return None
