"""An architecture whose experts are not behind transformers' experts interface needs one entry: an
adapter of two lines, if its experts are gate and up, an activation, and down.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from moe_infinity import MoE
from moe_infinity.architectures.adapters import ADAPTERS, Outside

NUM_EXPERTS = 6
TOP_K = 2
WIDTH = 32
EXPERT_WIDTH = 16
IDS = torch.arange(3, 15)[None]


class ToyConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "toy_moe_of_a_test"


class ToyExperts(nn.Module):
    """As a model's author writes it: nothing of ours in it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.gate_up_proj = nn.Parameter(torch.empty(NUM_EXPERTS, 2 * EXPERT_WIDTH, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, EXPERT_WIDTH))
        self.act_fn = nn.SiLU()

    def forward(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        for expert_idx in index_TK.unique().tolist():
            k, t = torch.where(expert_idx == index_TK.T)
            gate, up = F.linear(x_TD[t], self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            out_RD = F.linear(self.act_fn(gate) * up, self.down_proj[expert_idx])
            out_TD.index_add_(0, t, out_RD * weights_TK[t, k, None])
        return out_TD


class ToyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = ToyExperts()

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, index_TK = self.router(x_TD).softmax(dim=-1).topk(TOP_K, dim=-1)
        out_TD: Tensor = self.experts(x_TD, index_TK, weights_TK)
        return out_TD


class ToyForCausalLM(PreTrainedModel):  # type: ignore[misc]
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([ToyBlock(), ToyBlock()])
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.post_init()

    @classmethod
    def can_generate(cls) -> bool:
        return True

    def _init_weights(self, module: Any) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param, std=0.3)

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        x_TD = self.embed(input_ids)[0]
        for block in self.blocks:
            x_TD = x_TD + block(x_TD)
        return CausalLMOutput(logits=self.head(x_TD)[None])


class Toy(Outside):
    """Called with what the engine wants: rows, expert ids and weights."""


@pytest.fixture
def stock(tmp_path, monkeypatch):
    AutoConfig.register(ToyConfig.model_type, ToyConfig, exist_ok=True)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
    monkeypatch.setitem(ADAPTERS, "ToyExperts", Toy())
    torch.manual_seed(0)
    model = ToyForCausalLM(ToyConfig()).eval()
    model.save_pretrained(tmp_path)
    return model


@torch.no_grad()
def test_one_entry_gives_the_bits_of_the_plain_module_with_few_slots(stock, tmp_path):
    expected = stock(IDS).logits
    with MoE(tmp_path, host_memory="20%") as moe:  # 2 of 12 experts
        assert torch.equal(moe.model(IDS).logits, expected)
        assert moe.report().evictions > 0
        moe.check_invariants()


@torch.no_grad()
def test_without_the_entry_the_model_is_refused(stock, tmp_path, monkeypatch):
    monkeypatch.delitem(ADAPTERS, "ToyExperts")
    with pytest.raises(Exception, match="no routed experts that we know"):
        MoE(tmp_path, host_memory="20%")
