"""When a model's products in half precision are computed in float32: in prompts, on processors that
have no such products, and while nobody else watches what torch computes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_infinity import MoE
from moe_infinity.architectures import small_batch
from moe_infinity.kernels.cpu.half_products import HalfProducts
from tests.architectures.test_decoder_layers import saved

PROMPT = torch.arange(3, 93)[None]


class Foreign(TorchFunctionMode):
    """Somebody who sees every function of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[HalfProducts]:
    seen: list[HalfProducts] = []

    class Noted(HalfProducts):
        def __enter__(self) -> Any:
            seen.append(self)
            return super().__enter__()

    monkeypatch.setattr(small_batch, "HalfProducts", Noted)
    monkeypatch.setattr(small_batch, "has_products_of_bfloat16", lambda: False)
    return seen


def test_prompts_that_nobody_watches_multiply_in_float32(tmp_path, entered, monkeypatch):
    with MoE(saved("Mixtral", tmp_path)) as moe, torch.no_grad():
        calls: list[tuple[AbstractContextManager[Any], Tensor, int]] = [
            (nullcontext(), PROMPT, 1),
            (nullcontext(), PROMPT[:, :64], 0),
            (Foreign(), PROMPT, 0),
            (torch.autocast("cpu", torch.bfloat16), PROMPT, 0),
        ]
        for context, tokens, count in calls:
            entered.clear()
            with context:
                moe.model(tokens)
            assert len(entered) == count
        monkeypatch.setattr(small_batch, "has_products_of_bfloat16", lambda: True)
        entered.clear()
        moe.model(PROMPT)
    assert entered == []


def test_exact_results_are_torchs(tmp_path, entered):
    with MoE(saved("Mixtral", tmp_path), exact=True) as moe, torch.no_grad():
        moe.model(PROMPT)
    assert entered == []
