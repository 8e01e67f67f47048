"""How near two arithmetics come, and how far a choice was from a tie.

Tokens, routing and EAMs are compared between runs that promise the same bits, and with no others:
a near tie would be decided by the machine's matrix library (CONTRIBUTING, habit 11).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tests.cache_name import CACHE


@torch.no_grad()
def logits_of_steps(model: Any, ids: Tensor, num_prompt: int = 1, cache: Any = None) -> Tensor:
    """[N, sequences, vocabulary]: after a prompt and after each of the tokens that follow it, which
    are given, so that no choice is made of what is near."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    steps = [ids[:, :num_prompt], *ids[:, num_prompt:].split(1, dim=1)]
    found = [model(step, **{CACHE: cache}, use_cache=True).logits[:, -1] for step in steps]
    return torch.stack(found)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest number."""
    found, expected = found.double(), expected.double()
    return float((found - expected).abs().max() / expected.abs().max())


def margin(scores: Tensor, num_chosen: int = 1) -> float:
    """By how much the last that was chosen beats the first that was not, where it is least."""
    best = scores.float().topk(num_chosen + 1).values
    return float((best[..., -2] - best[..., -1]).min())


@contextmanager
def routing_margins(model: Any) -> Iterator[list[float]]:
    """Of the logits of every router call meanwhile; for Qwen3-MoE."""
    found: list[float] = []

    def note(router: Any, args: Any, output: Any) -> None:
        found.append(margin(output[0], router.top_k))

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in model.model.layers]
    yield found
    for hook in hooks:
        hook.remove()
