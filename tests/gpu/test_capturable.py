"""A decode step as it would be captured in a CUDA graph neither waits for the device nor copies
between host and device: seen without a GPU, on a device that is nowhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.gpu_models import deepseek_v2_lite, qwen3
from tests.gpu.fast_device import on_device
from tests.gpu.no_device import CannotBeCaptured, Captured, capturing
from tests.on_device import greedy
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_config

NAMED = {
    "qwen3-30b-a3b": qwen3(2, is_tiny=True),
    "deepseek-v2-lite": deepseek_v2_lite(1, is_tiny=True),
}
WINDOWS = "mixtral with sliding windows"
# Routers with groups and biases, shared experts, masks by type of layer.
OTHERS = ["deepseek_v3", "dots1", "glm4_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe"]
# Latents, convolutions and recurrent states, also beside a sliding window.
MIXED = [
    "deepseek_v2", "exaone_moe", "gpt_oss", "granitemoehybrid", "jamba", "kimi_linear",
    "longcat_flash", "qwen3_5_moe", "qwen3_next",
]  # fmt: skip


def model_of(name: str) -> Any:
    if name in NAMED:
        return AutoModelForCausalLM.from_config(NAMED[name], dtype=torch.bfloat16)
    architecture = architectures_in(name.split()[0])[-1]  # of text only, if there is one
    config = tiny_config(architecture)
    if name == WINDOWS:
        config.sliding_window = 6
    elif name in OTHERS and getattr(config, "sliding_window", None) is not None:
        config.sliding_window = None
    if name in OTHERS and getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    return architecture.model_class._from_config(config, dtype=torch.bfloat16)


@pytest.fixture
def step_of(tmp_path):
    """step_of(name) -> the step of a tiny model of that architecture. Everything but the experts'
    kernels runs as it would in a capture.
    """

    def captured(name: str) -> Captured:
        torch.manual_seed(0)
        model_of(name).save_pretrained(tmp_path)
        opened = on_device(tmp_path, "100%")
        with capturing(), opened as moe, pytest.raises(Captured) as found:
            greedy(moe, num_tokens=4)
        return found.value

    return captured


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*NAMED, *OTHERS, WINDOWS, *MIXED])
def test_a_step_neither_waits_nor_copies_between_host_and_device(step_of, name):
    step = step_of(name)
    assert step.run().shape == (1, 1, step.model.config.vocab_size)


class Waits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() else x + 1


class Selects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.index_fill(-1, (x[0, 0] > 0).nonzero().flatten(), 0)


class HasConstant(nn.Module):
    """Of the CPU: a copy in every replay."""

    def __init__(self) -> None:
        super().__init__()
        self.ones = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.ones


class MakesConstant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor(0.0, device=x.device, dtype=x.dtype)


class ChoosesByList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., [0, 1]].sum(-1, keepdim=True) + x


class GoesToHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cpu().to(x.device)


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (Waits, "waits for the device"),
        (Selects, "nonzero waits"),
        (HasConstant, "not on the device"),
        (MakesConstant, "tensor copies from the host"),
        (ChoosesByList, "__getitem__ copies from the host"),
        (GoesToHost, "_to_copy"),
    ],
)
def test_what_cannot_be_captured_is_found(step_of, planted, message):
    step = step_of("qwen3-30b-a3b")
    step.model.model.norm = planted()
    with pytest.raises(CannotBeCaptured, match=message):
        step.run()
