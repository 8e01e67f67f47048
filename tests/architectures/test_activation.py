"""What kernels are told of an activation is what the architecture computes, found by trying it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

from moe_infinity.architectures.adapters import INTERFACE, LARGE, find_activation
from moe_infinity.architectures.trial import FellBack, Found
from moe_infinity.kernels.reference import Activation

pytestmark = pytest.mark.arithmetic

NAMES = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
SILU = F.silu


def gated(act: Any) -> Any:
    """As transformers does it unless a class says otherwise."""
    return lambda outputs: moe._default_apply_gate(SimpleNamespace(act_fn=act), outputs)


@pytest.mark.parametrize(("name", "function"), NAMES.items())
def test_activations_of_transformers_are_found(name, function):
    act = ACT2FN[name]
    assert find_activation(gated(act), is_gated=True) == Found((Activation(function), False))
    expected = Activation(function, is_gated=False)
    assert find_activation(act, is_gated=False) == Found((expected, False))


@pytest.mark.parametrize(
    ("experts", "attributes", "expected"),
    [
        (DeepseekV4Experts, {"limit": 10.0, "act_fn": SILU}, ({"limit": 10.0}, False)),
        (Glm5NextTextExperts, {"swiglu_limit": 7}, ({"limit": 7.0}, False)),
        (
            MiniMaxM3VLExperts,
            {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            ({"limit": 7.0, "alpha": 1.702, "shift": 1.0}, False),
        ),
        (
            GptOssExperts,
            {"limit": 6.5, "alpha": 1.25},
            ({"limit": 6.5, "alpha": 1.25, "shift": 1.0}, True),
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gates_of_classes_are_measured(experts, attributes, expected, dtype):
    module = SimpleNamespace(**attributes)
    numbers, is_interleaved = expected

    def gate(outputs: Tensor) -> Tensor:
        found: Tensor = experts._apply_gate(module, outputs.to(dtype))
        return found

    assert find_activation(gate, is_gated=True) == Found((Activation(**numbers), is_interleaved))


def clamped(outputs: Tensor, low: float = -7.0, high: float = 7.0, gate: float = 7.0) -> Tensor:
    x, up = outputs.chunk(2, -1)
    return SILU(x.clamp(max=gate)) * up.clamp(low, high)


WRONG = {
    "up in the place of gate": lambda outputs: gated(SILU)(
        outputs.roll(outputs.shape[-1] // 2, -1)
    ),
    "another function": gated(torch.tanh),
    "without a product": lambda outputs: SILU(outputs.chunk(2, -1)[0]),
    "a sum": lambda outputs: SILU(outputs.chunk(2, -1)[0]) + outputs.chunk(2, -1)[1],
    "one limit for gate, one for up": lambda outputs: clamped(outputs, gate=6.0),
    "one limit above, one below": lambda outputs: clamped(outputs, low=-6.0),
    "no limit below": lambda outputs: clamped(outputs, low=-math.inf),
    "a gate without a limit": lambda outputs: clamped(outputs, gate=math.inf),
    "a gate with one below": lambda outputs: gated(lambda x: SILU(x.clamp(min=-1.0)))(outputs),
    "a slightly other function": gated(lambda x: x * torch.sigmoid(x) * 1.00001),
    "of another number": lambda outputs: SILU(outputs.chunk(4, -1)[0]),
    "not a number": lambda outputs: outputs.chunk(2, -1)[0] * math.nan,
    "other numbers only": lambda outputs: gated(SILU)(outputs @ torch.ones(2, dtype=torch.int32)),
    "of more than one dimension": lambda outputs: SILU(outputs[:, :, 0]),
    "two results": lambda outputs: (outputs, outputs),
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_not_taken_for_it(name):
    assert isinstance(find_activation(WRONG[name], is_gated=True), FellBack)


def test_it_is_asked_for_rows_as_experts_ask_for_them():
    def gate(outputs: Tensor) -> Tensor:
        width = outputs.shape[1] // 2
        return SILU(outputs[:, :width]) * outputs[:, width:]

    assert find_activation(gate, is_gated=True) == Found((Activation(), False))


def test_without_a_gate_a_gate_is_not_found():
    assert isinstance(find_activation(gated(SILU), is_gated=False), FellBack)
    assert isinstance(find_activation(SILU, is_gated=True), FellBack)


@pytest.mark.parametrize("has_norm", [False, True])
def test_experts_with_a_norm_after_them_are_not_two_products(has_norm):
    """Since transformers 5.23."""
    module = SimpleNamespace(has_gate=True, _apply_gate=SILU, has_post_expert_norm=has_norm)
    assert (INTERFACE.hidden(module) is None) == has_norm


def test_limits_may_be_as_large_as_any_that_is_asked():
    found = find_activation(lambda outputs: clamped(outputs, -99, 99, 99), is_gated=True)
    assert found == Found((Activation(limit=99.0), False))
    beyond = 3 * LARGE  # that no output of a model reaches
    found = find_activation(
        lambda outputs: clamped(outputs, -beyond, beyond, beyond), is_gated=True
    )
    assert found == Found((Activation(), False))


@pytest.mark.parametrize("name", NAMES)
def test_any_of_them_may_have_limits(name):
    """As no class has it."""
    expected = Activation(NAMES[name], shift=0.25, limit=5.5)

    def gate(outputs: Tensor) -> Tensor:
        x, up = outputs.chunk(2, -1)
        found: Tensor = ACT2FN[name](x.clamp(max=5.5)) * (up.clamp(-5.5, 5.5) + 0.25)
        return found

    assert find_activation(gate, is_gated=True) == Found((expected, False))


@pytest.mark.parametrize("name", NAMES)
def test_the_definition_is_that_of_transformers(name):
    torch.manual_seed(0)
    gate, up = 5 * torch.randn(2, 500, dtype=torch.float64)
    expected = ACT2FN[name](gate)
    torch.testing.assert_close(Activation(NAMES[name], is_gated=False)(gate), expected)
    torch.testing.assert_close(Activation(NAMES[name])(gate, up), expected * up)


def test_the_definition_is_that_of_gpt_oss():
    torch.manual_seed(0)
    outputs = 9 * torch.randn(50, 64, dtype=torch.float64)
    expected = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), outputs)
    found = Activation(alpha=1.702, shift=1.0, limit=7.0)(outputs[:, 0::2], outputs[:, 1::2])
    torch.testing.assert_close(found, expected)
    assert (outputs.abs() > 7).any()
