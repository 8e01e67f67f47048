"""Routers that kernels/cpu/routing.py knows, found by trying: they choose the experts with the
largest logits, and weigh each with its share of all experts' exponentials or the chosen ones'.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

from moe_infinity.architectures.layer_parts import experts_of, router_of
from moe_infinity.architectures.trials import for_trial, is_close
from moe_infinity.kernels.cpu.decoder import OF_ALL, OF_CHOSEN, Gate
from moe_infinity.kernels.cpu.decoder_steps import Attended

TOKENS = 32  # of a trial

logger = logging.getLogger(__name__)


def find_gate(router: nn.Module) -> Gate | None:
    """How it chooses; None if it does anything else than kernels do."""
    try:
        with torch.no_grad():
            return _matching_gate(router)
    except Exception as error:  # whatever a module does that wants or gives something else
        logger.debug("%s chooses by its own code: %s", type(router).__name__, error)
        return None


def _matching_gate(router: nn.Module) -> Gate | None:
    weight: Any = router.weight
    bias: Any = getattr(router, "bias", None)
    make = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, weight.shape[1], generator=make, dtype=torch.float32, device="cpu")
    logits, shares, chosen = for_trial(router).float()(x)
    dtype = for_trial(router)(x.to(weight.dtype))[1].dtype
    wanted = nn.functional.linear(x, weight.float(), None if bias is None else bias.float())
    top_k = chosen.shape[-1]
    largest = wanted.topk(top_k)
    ways = {
        OF_ALL: wanted.softmax(-1).gather(1, largest.indices),
        OF_CHOSEN: largest.values.softmax(-1),
    }
    if torch.equal(chosen, largest.indices) and is_close(logits, wanted):
        for way, expected in ways.items():
            if is_close(shares, expected):
                return Gate(top_k, way, dtype)
    return None


class KnownRouting:
    """Lets a router give what the kernel has chosen for its next input."""

    def __init__(self, router: nn.Module) -> None:
        self._stock = router.forward
        self._known: Attended | None = None
        vars(router)["forward"] = self._forward

    def expect(self, attended: Attended) -> None:
        """The next input, and what the router would make of it."""
        self._known = attended

    def _forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        known, self._known = self._known, None
        if known is None or x.data_ptr() != known.normed.data_ptr() or args or kwargs:
            return self._stock(x, *args, **kwargs)
        return known.logits.to(x.dtype), known.top_k_weights_BK, known.top_k_index_BK


class _Experts(nn.Module):
    """In place of the experts: something that tells tokens, experts and shares apart."""

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return x.flip(-1) * 0.5 + (chosen * shares).sum(-1, keepdim=True)


def gives_experts_alone(block: nn.Module) -> bool:
    """Whether what a block gives is what its experts give for its router's choice, and no more."""
    try:
        with torch.no_grad():
            return _is_experts_alone(block)
    except Exception as error:  # whatever a module does that wants or gives something else
        logger.debug("%s computes by its own code: %s", type(block).__name__, error)
        return False


def _is_experts_alone(block: nn.Module) -> bool:
    router = router_of(block)
    children = dict(block.named_children())
    if router is None or len(children) != 2 or experts_of(block) is None:
        return False
    own = copy.copy(block)
    stub = _Experts()
    known = for_trial(router).float()
    own._modules = {name: known if child is router else stub for name, child in children.items()}
    make = torch.Generator().manual_seed(3)
    weight: Any = router.weight
    x = torch.randn(2, 1, weight.shape[1], generator=make, dtype=torch.float32, device="cpu")
    _, shares, chosen = known(x[:, 0])
    found = own(x)
    found = found[0] if isinstance(found, tuple) else found
    return is_close(found, stub(x[:, 0], chosen, shares)[:, None])
