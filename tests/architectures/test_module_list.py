"""Blocks that call a list of experts in ways of their own: the right answer, or a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe_infinity import UnsupportedModelError
from moe_infinity.architectures.module_list import LIST
from moe_infinity.experts import Routing

NUM_EXPERTS, WIDTH = 4, 16


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu()


class Block(nn.Module):
    """Top-1; `loop` is what differs."""

    def __init__(self, loop: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.loop = loop

    def forward(self, x_TD: Tensor) -> Tensor:
        index_T = self.gate(x_TD).topk(1).indices[:, 0]
        out_TD = torch.zeros_like(x_TD)
        for expert_idx, expert in enumerate(self.experts):
            t = (index_T == expert_idx).nonzero()[:, 0]
            if len(t):
                out_TD[t] = self.loop(self, expert, x_TD[t])
        return out_TD

    def delegated(self, x_TD: Tensor) -> Tensor:
        return Block.forward(self, x_TD)


class AtOnce:
    """An engine that has every expert in memory."""

    def __init__(self, experts: Any, weights: list[dict[str, Tensor]]) -> None:
        self.experts = experts
        self.weights = weights
        self.routed: list[Any] = []

    def answer_calls(self, calls: Any, routing: Routing) -> None:
        self.routed.append(routing.top_k_index_TK)
        for expert_idx in routing.activated:
            calls.answer(expert_idx, self.experts.compute, self.weights[expert_idx])


def connected(loop: Any) -> tuple[Any, Any, Any]:
    """The block served by us, and a call of it as it was."""
    torch.manual_seed(0)
    model: Any = nn.Module()
    block: Any = Block(loop)
    model.block = block
    torch.manual_seed(0)
    stock: Any = Block(loop)
    experts = LIST.describe("block.experts", block.experts)
    weights: list[Any] = [dict(expert.named_parameters()) for expert in stock.experts]
    layer: Any = AtOnce(experts, weights)
    experts.adapter.connect(experts, model, layer)
    return block, stock, layer


def plainly(block: Any, expert: Any, x: Tensor) -> Tensor:
    return expert(x)


def into_one_buffer(block: Any, expert: Any, x: Tensor) -> Tensor:
    if not hasattr(block, "buffer"):
        block.buffer = torch.zeros(64, WIDTH)
    block.buffer[: len(x)] = x
    return expert(block.buffer[: len(x)])


def without_a_row(block: Any, expert: Any, x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, torch.arange(0), expert(x[:0]))


def under_autocast(block: Any, expert: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return expert(x).float()


X_TD = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("loop", [plainly, into_one_buffer])
@torch.no_grad()
def test_the_answer_is_that_of_stock_and_nothing_is_kept(loop):
    block, stock, _ = connected(loop)
    assert torch.equal(block(X_TD), stock(X_TD))
    served = block.forward
    assert not served._calls
    assert next(served._answers, None) is None


@torch.no_grad()
def test_a_row_without_numbers_is_that_row_alone():
    """NaN was taken for a block that calls its experts otherwise."""
    block, stock, _ = connected(plainly)
    x_TD = X_TD.clone()
    x_TD[0] = torch.nan
    found = block(x_TD)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], stock(x_TD)[1:])


@torch.no_grad()
def test_another_pass_may_go_through_the_block_between_its_two_runs():
    """Answers of other sequences go on between the layers of a long prompt."""
    block, stock, layer = connected(plainly)
    answer = layer.answer_calls
    inside: list[Tensor] = []

    def after_others(calls: Any, routing: Routing) -> None:
        layer.answer_calls = answer
        inside.append(block(X_TD[:3]))
        answer(calls, routing)

    layer.answer_calls = after_others
    assert torch.equal(block(X_TD), stock(X_TD))
    assert torch.equal(inside[0], stock(X_TD[:3]))
    assert not block.forward._calls


@torch.no_grad()
def test_a_lone_token_without_an_expert_is_routed_nowhere():
    block, _, layer = connected(without_a_row)
    assert not block(X_TD[:1]).any()
    assert layer.routed[-1].dtype == np.int64
    assert layer.routed[-1].size == 0


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (lambda block, expert, x: expert(x=x), "with a tensor"),
        (under_autocast, "autocast"),
        (lambda block, expert, x: expert.up(x).to(x), "does not call its experts"),
    ],
)
@torch.no_grad()
def test_what_cannot_be_served_is_refused(loop, said):
    block, _, _ = connected(loop)
    for weight in [p for e in block.experts for p in e.parameters()]:
        weight.data = weight.data.clone()  # there, unlike in a loaded model: nothing else may fail
    with pytest.raises(UnsupportedModelError, match=said):
        block(X_TD)


@torch.no_grad()
def test_experts_called_from_outside_the_block_are_refused():
    block, _, _ = connected(plainly)
    with pytest.raises(UnsupportedModelError, match="from outside"):
        block.delegated(X_TD)
