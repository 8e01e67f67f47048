"""What tests of models on a fake device share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.cache.policies import ACTIVATION_AWARE, POLICIES

PROMPT = torch.tensor([[3, 17, 5, 9, 40, 2, 77, 31]])
LONG_PROMPT = (torch.arange(3, 99) * 7 % 125 + 3)[None]
# In the fast suite the default and the plainest: others change which expert leaves, not how.
SOME_POLICIES = [
    policy if policy in (ACTIVATION_AWARE, "lru") else pytest.param(policy, marks=pytest.mark.slow)
    for policy in POLICIES
]
BUDGETS = ["5%", "30%", "100%"]  # of 24 experts: 1, 7, 24 slots


def greedy(moe: Any, prompt: Tensor = PROMPT, num_tokens: int = 16, **kwargs: Any) -> Tensor:
    # A static cache is as long as the longest so far, and attention over another length is another
    # arithmetic: here each is as long as its request.
    vars(getattr(moe, "model", moe)).pop("_previous_max_cache_length", None)
    ids: Tensor = moe.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
        **kwargs,
    )
    return ids


def assert_same_tokens(moe: MoE, expected: tuple[Tensor, Tensor], rounds: int = 1) -> None:
    for _ in range(rounds):
        for prompt, tokens in zip((PROMPT, LONG_PROMPT), expected, strict=True):
            assert torch.equal(greedy(moe, prompt), tokens)
            moe.check_invariants()
