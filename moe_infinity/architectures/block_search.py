"""Finds what follows the attention of a decoder layer, in the words of kernels/cpu/decoder.py: how
its router chooses experts, and what is added to their sum.

Each is found by trying (trial.py): copies of a router, and of a block with a stub in place of its
experts, run on random tokens.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from moe_infinity.architectures.adapters import CALL_ATTRIBUTE
from moe_infinity.architectures.model_parts import experts_of, is_linear, router_of, weight_of
from moe_infinity.architectures.trial import (
    Differs,
    Trial,
    Verdict,
    first_that,
    for_trial,
    in_float32,
    is_close,
    verdict,
)
from moe_infinity.kernels.cpu.decoder import OF_ALL, OF_CHOSEN, Gate, Router
from moe_infinity.kernels.cpu.shared_expert import SharedExpert
from moe_infinity.kernels.reference import FUNCTIONS, Activation

TRIED_TOKENS = 32


def find_gate(router: nn.Module | None) -> Verdict[Gate]:
    """Find how a router chooses. Kernels know those that choose the experts with the largest
    logits, and weigh each with its part of all experts' exponentials or of the chosen ones'.
    """
    return verdict(partial(_search_gate, router))


def _search_gate(router: nn.Module | None) -> Gate:
    if router is None:
        raise Differs("its block has no single router")
    trial = Trial(router, seed=2)
    own = trial.module
    x_TD = trial.random(TRIED_TOKENS, own.weight.shape[1])
    logits_TE, top_k_weights_TK, top_k_index_TK = own(x_TD)
    dtype = for_trial(router)(x_TD.to(router.get_parameter("weight").dtype))[1].dtype
    wanted_TE = nn.functional.linear(x_TD, own.weight, getattr(own, "bias", None))
    top_k = top_k_index_TK.shape[-1]
    if not is_close(logits_TE, wanted_TE):
        raise Differs("its logits are no product with its weight")
    if not torch.equal(top_k_index_TK, wanted_TE.topk(top_k).indices):
        raise Differs("it does not choose the experts with the largest logits")
    return first_that(
        (Gate(top_k, way, dtype) for way in (OF_ALL, OF_CHOSEN)),
        lambda gate: is_close(top_k_weights_TK, gate(wanted_TE)),
        "its weights are no softmax of all logits or of the chosen ones",
    )


def described_router(block: nn.Module, gate: Gate, activation: Activation | None) -> Router:
    """Describe the router of a block to the kernel, and with an activation its shared expert."""
    router: Any = router_of(block)
    shared = None if activation is None else shared_expert_of(block, activation)
    return Router(router.weight.detach(), getattr(router, "bias", None), gate, shared)


def shared_expert_of(block: nn.Module, activation: Activation) -> SharedExpert | None:
    """Return what a block has beside its router and experts; None unless it is an MLP."""
    router = router_of(block)
    others = [c for c in block.children() if c is not router and CALL_ATTRIBUTE not in vars(c)]
    return SharedExpert.of(others, activation, is_linear, weight_of)


def find_shared_expert(block: nn.Module) -> Verdict[Activation | None]:
    """Find what a block adds to what its experts give for its router's choice: nothing, or what an
    MLP with this activation gives.
    """
    return verdict(partial(_search_shared_expert, block))


def _search_shared_expert(block: nn.Module) -> Activation | None:
    router: Any = router_of(block)
    children = dict(block.named_children())
    if len(children) != 2 and shared_expert_of(block, Activation()) is None:
        raise Differs(f"more than a router and experts follows attention: {', '.join(children)}")
    if experts_of(block) is None:
        raise Differs("its experts are called in a way of their own")
    stub = _Experts()
    stubs = {name: stub for name, child in children.items() if CALL_ATTRIBUTE in vars(child)}
    trial = Trial(block, seed=3, stubs=stubs)
    x_TD = trial.random(TRIED_TOKENS, router.weight.shape[1])

    def agrees(expert: SharedExpert | None) -> bool:
        unit = 1 if expert is None else expert.unit(x_TD)
        for strength, stub.strength in product((1, 8), (0, 1)):  # large numbers show limits
            x = strength * unit * x_TD
            _, top_k_weights_TK, top_k_index_TK = in_float32(router)(x)
            out = trial.module(x[:, None])
            wanted = stub(x, top_k_index_TK, top_k_weights_TK)
            wanted += 0 if expert is None else expert(x)
            if not is_close(out[0] if isinstance(out, tuple) else out, wanted[:, None]):
                return False
        return True

    candidates = (shared_expert_of(block, Activation(name)) for name in FUNCTIONS)
    found = first_that(candidates, agrees, "its block gives something else than its experts' sum")
    return None if found is None else found.activation


class _Experts(nn.Module):
    """A stub for the experts that tells tokens, experts and weights apart."""

    strength = 1

    def forward(self, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        chosen = (top_k_index_TK * top_k_weights_TK).sum(-1, keepdim=True)
        return self.strength * (x_TD.flip(-1) * 0.5 + chosen)
