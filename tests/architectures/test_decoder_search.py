"""Layers, routers and blocks that kernels can compute are found by trying. The report says which
fell back, and why.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers
from torch import Tensor, nn

from moe_infinity import MoE
from moe_infinity.architectures.adapters import CALL_ATTRIBUTE
from moe_infinity.architectures.attention_search import find_attention
from moe_infinity.architectures.block_search import find_gate, find_shared_expert
from moe_infinity.architectures.small_batch import KernelLayers
from moe_infinity.architectures.trial import FellBack, Found
from tests.architectures.test_decoder_layers import saved

pytestmark = pytest.mark.arithmetic


class Scaled(nn.Module):
    """Adds less of the attention than others do."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = x + 0.999 * self.self_attn(self.input_layernorm(x), **kwargs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def test_a_layer_that_computes_a_little_otherwise_is_left_alone(tmp_path):
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(saved("Qwen3Moe", tmp_path))
    layer = model.model.layers[0]
    rotations = [model.model.rotary_emb]
    others = FellBack("the kernel gives other numbers", has_run=True)
    assert isinstance(find_attention(layer, rotations), Found)
    assert find_attention(Scaled(layer), rotations) == others
    assert find_attention(layer, []) == FellBack("the model has no rotary embedding")
    layer.self_attn.scaling *= 1.01
    assert isinstance(find_attention(layer, rotations), Found)
    other = copy.deepcopy(layer)
    other.self_attn.q_norm.forward = lambda x: x
    assert isinstance(find_attention(other, rotations), FellBack)
    KernelLayers(Scaled(layer), None, "auto")


@pytest.mark.parametrize("part", ["block", "router"])
def test_modules_that_fail_in_a_trial_compute_by_their_own_code(tmp_path, part):
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(saved("Mixtral", tmp_path))
    block = model.model.layers[0].mlp
    setattr(block.experts, CALL_ATTRIBUTE, object())
    assert isinstance(find_gate(block.gate), Found)
    assert find_shared_expert(block) == Found(None)

    def fail(*_: Any) -> None:
        raise ValueError("wants something else")

    vars(block if part == "block" else block.gate)["forward"] = fail
    error = FellBack("on trial it raised ValueError: wants something else")
    assert find_shared_expert(block) == error
    if part == "router":
        assert find_gate(block.gate) == error
    else:
        assert isinstance(find_gate(block.gate), Found)


def test_report_says_which_path_each_module_takes_and_why(tmp_path):
    with MoE(saved("Mixtral", tmp_path / "usual"), exact=True) as moe:
        (path,) = moe.report().paths
        assert str(path) == (
            "3 x MixtralExperts: the module's own code (transformers' bits were asked for)"
        )
    with MoE(tmp_path / "usual") as moe:
        experts, *around = moe.report().paths
        assert str(experts) == "3 x MixtralExperts: kernel"
        assert [(p.taken.kind, p.count, p.taken.reason) for p in around] == [
            ("layer", 3, None),
            ("router", 3, None),
            ("block", 3, None),
        ]
        hook = moe.model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
        report = moe.report()
        assert (
            "1 x MixtralDecoderLayer: the module's own code (a hook on MixtralAttention)\n"
            in str(report)
        )
        assert "2 x MixtralDecoderLayer: kernel\n" in str(report)
        hook.remove()
        norm = moe.model.model.layers[0].input_layernorm
        norm.weight = nn.Parameter(norm.weight.clone())
        assert {
            "kind": "layer",
            "class_name": "MixtralDecoderLayer",
            "count": 1,
            "path": "own code",
            "reason": "it was changed after loading",
        } in moe.report().as_dict()["paths"]


@pytest.mark.parametrize(
    ("name", "class_name", "reason"),
    [
        ("Glm4Moe", "Glm4MoeTopkRouter", "it does not choose the experts with the largest logits"),
        ("GptOss", "GptOssExperts", "kernels do not read its weights"),
        ("DeepseekV2", "DeepseekV2DecoderLayer", "self_attn has no linear layer q_proj"),
    ],
)
def test_report_says_why_modules_fell_back(tmp_path, name, class_name, reason):
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    more = latent | {"v_head_dim": 16, "n_routed_experts": 8} if name == "DeepseekV2" else {}
    with MoE(saved(name, tmp_path, **more)) as moe:
        paths = [count.taken for count in moe.report().paths]
    (fell_back,) = [path.reason for path in paths if path.class_name == class_name]
    assert fell_back is not None
    assert fell_back.startswith(reason)
