"""The recipe "Add an architecture with a custom experts module" of CONTRIBUTING.md, followed.

The class of experts is not behind transformers' experts interface, and transformers does not know
the model. One adapter and one entry are enough: the logits are those of the plain model, bit for
bit, with one slot as with all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from moe_infinity import MoE, UnsupportedModelError
from moe_infinity.architectures.outside_interface import ADAPTERS, Outside

pytestmark = pytest.mark.arithmetic

VOCAB, WIDTH, INNER, LAYERS, EXPERTS = 64, 32, 16, 3, 8
TOP_K = 4  # of two outputs the order would not show in the sum
PROMPT = torch.arange(3, 3 + 18).view(2, 9) * 5 % VOCAB  # two sequences


class ToyExperts(nn.Module):
    """Computes expert by expert and adds the outputs in this order, so its adapter is eager."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.num_experts = EXPERTS
        self.act_fn = nn.SiLU()

    def forward(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        for expert_idx in index_TK.unique():
            k_R, token_R = torch.where((index_TK == expert_idx).T)
            gate_up_RF = nn.functional.linear(x_TD[token_R], self.gate_up[expert_idx])
            gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
            out_RD = nn.functional.linear(self.act_fn(gate_RF) * up_RF, self.down[expert_idx])
            out_TD.index_add_(0, token_R, out_RD * weights_TK[token_R, k_R, None])
        return out_TD


class ToyBlock(nn.Module):
    """Routes, calls the experts, adds the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = ToyExperts()

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.reshape(-1, WIDTH)
        top_k = self.router(x_TD).softmax(dim=-1).topk(TOP_K, dim=-1)
        out_TD: Tensor = self.experts(x_TD, top_k.indices, top_k.values)
        return x_BSD + out_TD.view(x_BSD.shape)


class ToyConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "toy_moe"


class ToyForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """No attention: the experts are the point."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(ToyBlock() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
        x_BSD = self.embed(input_ids)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return CausalLMOutput(logits=self.head(x_BSD))


class Toy(Outside):
    """The adapter: the names of the parameters. All else is what `Outside` expects of a class."""

    gate_up = "gate_up"
    down = "down"


@pytest.fixture(autouse=True)
def known_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {})
    AutoConfig.register("toy_moe", ToyConfig)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "ToyExperts", Toy())


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def plain(request) -> Any:
    torch.manual_seed(0)
    model = ToyForCausalLM(ToyConfig())
    with torch.no_grad():
        for param in model.parameters():  # wide: each expert shows in the logits
            param.normal_(std=0.3)
    return model.to(request.param).eval()


@pytest.fixture
def folder(plain, tmp_path) -> Path:
    plain.save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
@pytest.mark.parametrize("num_slots", [1, 3, LAYERS * EXPERTS])
def test_logits_are_those_of_the_plain_module_bit_for_bit(folder, plain, entry, num_slots):
    bytes_per_expert = 3 * INNER * WIDTH * plain.dtype.itemsize
    # The bits of a product of one float32 row depend on where in memory the weight lies: dense
    # weights lie as in the file's map, those of experts begin a cache line.
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    for layer in plain.layers:
        for param in layer.experts.parameters():
            param.data = param.data.clone()
    with MoE(folder, host_memory=num_slots * bytes_per_expert, exact=True) as moe:
        assert moe.report().tiers[0].capacity == num_slots
        for ids in (PROMPT, PROMPT[:1, :1]):
            assert torch.equal(moe.model(ids).logits, plain(ids).logits)
        assert not any("gate_up" in name for name, _ in moe.model.named_parameters())
        moe.check_invariants()


def test_without_the_entry_the_model_is_refused(folder):
    with pytest.raises(UnsupportedModelError, match="no routed experts that we know"):
        MoE(folder)
