"""What a part of a layer allocates is found without numbers, and bounds what it really takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, JambaConfig, Qwen3MoeConfig, Qwen3NextConfig

from moe_infinity.checkpoint.plan import find_experts
from moe_infinity.memory.needs import SAFETY
from moe_infinity.memory.part_bytes import MANY_TOKENS, PartBytes, part_bytes_of
from moe_infinity.system.memory import return_free_memory
from tests.memory.conftest import ELSEWHERE_BYTES

PEAK = Path("/proc/self/clear_refs")  # 5 written into it begins a new one
STATUS = Path("/proc/self/status")
NUM_TOKENS = 2000
HIDDEN = 64


def linear_attention() -> Qwen3NextConfig:
    return Qwen3NextConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=32, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        linear_num_value_heads=32, linear_num_key_heads=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


def mamba() -> JambaConfig:
    return JambaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        mamba_expand=16, mamba_d_state=16, use_mamba_kernels=False,
    )  # fmt: skip


def attention() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=32, moe_intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip


def found(config) -> PartBytes:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return part_bytes_of(model, [layer.name for layer in find_experts(model)])


def kept_bytes(name: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def mixer_of(config) -> nn.Module:
    layer = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().model.layers[0]
    return layer.linear_attn if isinstance(config, Qwen3NextConfig) else layer.mamba


@pytest.mark.usefixtures("pages_for_each_block")
@pytest.mark.skipif(not PEAK.exists(), reason="this system does not tell the peak of a part")
@pytest.mark.parametrize("config_of", [linear_attention, mamba])
@torch.inference_mode()
def test_a_part_takes_what_was_found(config_of):
    config = config_of()
    mixer = mixer_of(config)
    x = torch.randn(1, NUM_TOKENS, HIDDEN)
    mixer(x[:, :100])
    return_free_memory()
    PEAK.write_text("5")
    before = kept_bytes("VmRSS")
    mixer(x)
    taken = kept_bytes("VmHWM") - before
    told = found(config).per_token * NUM_TOKENS
    assert taken < SAFETY * told + ELSEWHERE_BYTES
    assert taken > told / 2, "else it is no test"


def test_attention_that_needs_positions_is_left_to_the_formula():
    norm_bytes = 4 * 4 * HIDDEN  # a few copies of the hidden states
    assert found(attention()).per_token < norm_bytes


def test_parts_that_fill_up_a_chunk_need_as_much_for_one_token():
    class Chunked(nn.Module):
        def forward(self, x):
            return nn.functional.pad(x, (0, 0, 0, 256 - x.shape[1] % 256))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = Chunked()
            self.experts = nn.Linear(1, 1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer()])
            self.config = attention()

    few, per_token = part_bytes_of(Model(), ["layers.0.experts"])
    assert few == 256 * HIDDEN * 4
    assert per_token == (MANY_TOKENS + 256) * HIDDEN * 4 // MANY_TOKENS
