"""What is changed before a model is loaded, in a copy of a module, in torch.inference_mode, or in
the shape of a weight is followed, as it is in stock transformers."""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from moe_infinity import MoE
from moe_infinity.architectures import attention_inputs, module_state, small_batch
from moe_infinity.architectures.model_parts import PackedLinear
from moe_infinity.architectures.module_state import is_stock
from tests.architectures.test_changed_modules import steps
from tests.architectures.test_decoder_layers import TOKENS, logits_of, saved
from tests.cache_name import CACHE
from tests.prefixes.tiny_models import save_tiny

pytestmark = pytest.mark.arithmetic
CLOSE = 1e-4  # of the largest logit


def stock_of(folder: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= CLOSE * expected.abs().max()


# before a model is loaded


def test_functions_of_the_installed_packages_are_stock():
    """If one were not, everything would run its own code."""
    assert module_state.ARE_STOCK
    assert attention_inputs.ARE_STOCK
    assert small_batch.PLAIN.keys() == {nn.Linear, PackedLinear}


def test_a_patch_is_known_even_if_it_calls_itself_as_what_it_patches():
    @wraps(nn.Linear.forward)
    def forward(self: Any, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.weight, self.bias)

    assert is_stock(nn.Linear.forward)
    assert not is_stock(forward)


def test_an_attention_function_that_was_registered_before_is_followed(tmp_path):
    folder = saved("Mixtral", tmp_path)
    own = transformers.AttentionInterface()["sdpa"]
    transformers.AttentionInterface.register(
        "sdpa", lambda module, query, *args, **kwargs: (query.transpose(1, 2), None)
    )
    try:
        with MoE(folder, host_memory="50%") as moe:
            assert_same(steps(moe.model), steps(stock_of(folder)))
    finally:
        transformers.AttentionInterface.register("sdpa", own)


# copies


@pytest.mark.parametrize(
    "name", ["lm_head", "model.norm", "model.layers.0.linear_attn", "model.layers.0.mlp.gate"]
)
def test_a_copy_of_a_module_computes_with_its_own_weights(tmp_path, name):
    folder = save_tiny("qwen3_next", tmp_path / "model")
    with MoE(folder, host_memory="50%", dtype="float32") as moe, torch.no_grad():
        before = steps(moe.model)
        module = moe.model.get_submodule(name)
        copied = copy.deepcopy(module)
        x = torch.randn(1, 3, moe.model.config.hidden_size)
        x = x[0] if "gate" in name else x
        expected = output_of(copied(x)).clone()
        for weight in module.parameters():
            weight.data.fill_(0.5)
        assert_same(output_of(copied(x)), expected)
        assert not torch.equal(output_of(module(x)), expected)
        assert not torch.equal(steps(moe.model), before)


def output_of(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


# weights that become shorter


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp.gate"])
def test_a_weight_that_is_cut_to_a_part_of_itself_is_followed(tmp_path, name):
    """A part of a tensor begins where the whole does."""
    folder = saved("Mixtral", tmp_path)
    stock = stock_of(folder)
    for host_memory in ("50%", "100%"):
        with MoE(folder, host_memory=host_memory) as moe:
            if host_memory == "100%":
                moe.preload()
            steps(moe.model)
            for model in (stock, moe.model):
                weight = model.get_submodule(name).weight
                weight.data = weight.data[: len(weight) // 2]
            assert_same(steps(moe.model), steps(stock))
            stock = stock_of(folder)


# torch.inference_mode


def test_what_a_hook_changes_in_place_is_seen_in_inference_mode(tmp_path):
    folder = saved("Mixtral", tmp_path)
    found = []

    def negate(module: nn.Module, args: Any) -> None:
        args[0].neg_()

    with MoE(folder, host_memory="50%") as moe:
        for model in (stock_of(folder), moe.model):
            model.model.layers[0].mlp.register_forward_pre_hook(negate)
            with torch.inference_mode():
                found.append(logits_of(model, TOKENS[:1, :9]))
    assert_same(found[1], found[0])


# calls that the model does not make


def test_a_hook_sees_no_call_of_the_early_router(tmp_path):
    folder = saved("Mixtral", tmp_path)
    calls: list[str] = []
    with MoE(folder, host_memory="50%", early_router=True, prefetch=True) as moe, torch.no_grad():
        steps(moe.model)
        num_layers = len(moe.model.model.layers)
        for layer in moe.model.model.layers:
            for module in (layer.mlp, layer.mlp.gate, layer.post_attention_layernorm):
                kind = type(module).__name__
                module.register_forward_hook(lambda *given, kind=kind: calls.append(kind))
        cache = transformers.DynamicCache(config=moe.model.config)
        moe.model(TOKENS[:1, :5], **{CACHE: cache})
        calls.clear()
        out = moe.model(TOKENS[:1, 5:6], output_router_logits=True, **{CACHE: cache})
    assert len(calls) == 3 * num_layers
    assert len(out.router_logits) == num_layers
