"""A model that is changed after loading computes in every step what stock transformers computes
with the same change: whatever replaces a module's call sees what that module would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.qwen2_moe import modeling_qwen2_moe

from moe_infinity import MoE, UnsupportedModelError
from moe_infinity.architectures.decoder_layers import DecoderLayer, LayersAhead
from tests.architectures.changes import (
    CHANGES,
)
from tests.architectures.test_decoder_layers import MODELS, TOKENS, logits_of, saved
from tests.cache_name import CACHE

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(5)]


def modules_to_change(model: Any) -> dict[str, nn.Module]:
    """Modules inside the decoder layers, by name, but those inside experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if ".layers." in name and ".experts." not in name
    }


@torch.no_grad()
def steps(model: Any) -> Tensor:
    """[B, T, vocabulary]: of a prompt, and of a few tokens one by one."""
    return logits_of(model, TOKENS[:1, :9])


FAST = {"Qwen3Moe", "GptOss"}


@pytest.fixture(
    scope="module",
    params=[
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS
    ],
)
def models(request, tmp_path_factory) -> Iterator[tuple[Any, list[MoE]]]:
    """Stock's, and ours with half and all of the experts in memory."""
    folder = saved(request.param, tmp_path_factory.mktemp(request.param))
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with MoE(folder, host_memory="50%") as few, MoE(folder) as all_in_memory:
        all_in_memory.preload()
        yield stock, [few, all_in_memory]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_step_follows_a_change(models, change, seed):
    stock, ours = models
    chooses = random.Random(f"{change.__name__} {seed}")
    fitting = [n for n, module in modules_to_change(stock).items() if CHANGES[change](module)]
    if not fitting:
        pytest.skip("nothing to change")
    before = steps(stock)
    for name in chooses.sample(fitting, min(3 if seed else 1, len(fitting))):
        with ExitStack() as changed:
            for model in (stock, *(moe.model for moe in ours)):
                changed.enter_context(change(model.get_submodule(name)))
            expected = steps(stock)
            for moe in ours:
                found = steps(moe.model)
                scale = expected.abs().max()
                assert (found - expected).abs().max() <= 1e-4 * scale, (name, moe.config)
        assert torch.equal(steps(stock), before)  # the change is undone
        for moe in ours:
            assert (steps(moe.model) - before).abs().max() <= 1e-4 * before.abs().max()
            assert "was changed" not in str(moe.report()), name  # and kernels compute again


def test_a_change_after_the_first_layer_computed_all_is_seen_in_the_next_step(tmp_path):
    folder = saved("Mixtral", tmp_path)
    with MoE(folder) as moe, torch.no_grad():
        moe.preload()
        model = moe.model
        cache = DynamicCache(config=model.config)
        model(TOKENS[:1, :5], **{CACHE: cache})
        before = model(TOKENS[:1, 5:6], **{CACHE: cache}).logits
        model.model.layers[2].post_attention_layernorm.weight.data.mul_(2)
        cache.crop(-1)
        after = model(TOKENS[:1, 5:6], **{CACHE: cache}).logits
        assert (before - after).abs().max() > 1e-2 * before.abs().max()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("change", ["hook", "cache"])
def test_what_a_hook_changes_is_seen_in_the_same_step(tmp_path, change, number):
    """Tools that look into models install hooks while a step runs."""
    folder = saved("Mixtral", tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    installed: list[Any] = []

    def change_later_layers(layer: Any, args: Any, kwargs: Any, out: Any) -> None:
        keys = kwargs[CACHE].layers[2].keys
        if change == "cache":
            if keys is not None:
                keys[..., :2, :] = 0.5
            return
        later = model.model.layers[2].self_attn.o_proj
        installed.append(later.register_forward_hook(lambda module, args, out: out * 2))

    def undo(norm: Any, args: Any, out: Any) -> None:
        while installed:
            installed.pop().remove()

    found = []
    with MoE(folder) as moe:
        moe.preload()
        before = steps(moe.model)
        for model in (stock, moe.model):
            layers = model.model.layers
            hook = layers[number].register_forward_hook(change_later_layers, with_kwargs=True)
            with hook, model.model.norm.register_forward_hook(undo):
                found.append(steps(model))
        assert torch.equal(steps(moe.model), before)
    expected, ours = found
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (ours - before).abs().max() > 1e-2 * before.abs().max()


FUNCTIONS = [
    (modeling_qwen2_moe, "rotate_half"),  # `forward` calls what calls it
    (nn.functional, "softmax"),
    (nn.functional, "silu"),
    (torch, "topk"),
]


@pytest.mark.parametrize(("owner", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
def test_a_patched_function_is_followed(tmp_path, monkeypatch, owner, name):
    folder = saved("Qwen2Moe", tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    own = getattr(owner, name)
    with MoE(folder, host_memory="50%") as few, MoE(folder) as all_in_memory:
        all_in_memory.preload()
        before = steps(few.model)
        monkeypatch.setattr(owner, name, lambda x, *args, **kwargs: own(-2 * x, *args, **kwargs))
        expected = steps(stock)
        for moe in (few, all_in_memory):
            assert (steps(moe.model) - expected).abs().max() <= 1e-4 * expected.abs().max()
        monkeypatch.undo()
        assert torch.equal(steps(few.model), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_is_changed_in_place_is_read_again(tmp_path, mode):
    """Once a sliding window is full, masks of one shape serve every step."""
    folder = saved("Mixtral", tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with MoE(folder, host_memory="50%") as moe, mode():
        outs = []
        for model in (stock, moe.model):
            cache = DynamicCache(config=model.config)
            model(TOKENS[:1, :5], **{CACHE: cache})
            mask = torch.zeros(1, 1, 1, 6)
            model(TOKENS[:1, 5:6], attention_mask=mask, **{CACHE: cache})
            cache.crop(-1)
            mask[..., :3] = -torch.inf
            outs.append(model(TOKENS[:1, 5:6], attention_mask=mask, **{CACHE: cache}).logits)
    assert (outs[0] - outs[1]).abs().max() < 1e-4 * outs[0].abs().max()


def test_modes_of_torch_reach_every_step(models):
    stock, ours = models

    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is nn.functional.linear else out

    with Doubling():
        expected = steps(stock)
        for moe in ours:
            assert (steps(moe.model) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_autocast_reaches_every_step(tmp_path):
    """To the last bit: gate and up of gpt-oss are one tensor, multiplied at once by every path."""
    folder = saved("GptOss", tmp_path)
    found = []
    for options in ({"exact": True}, {"host_memory": "50%"}, {}):
        with MoE(folder, **options) as moe, torch.autocast("cpu", torch.bfloat16):
            found.append(steps(moe.model))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_another_attention_function_leaves_experts_to_kernels(tmp_path):
    folder = saved("Mixtral", tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()

    def own_code(moe: MoE) -> set[str]:
        paths = (count.taken for count in moe.report().paths)
        return {path.kind for path in paths if path.reason is not None}

    def without_attention(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register("without", without_attention)
    with MoE(folder, host_memory="50%") as moe:
        assert own_code(moe) == set()
        for model in (stock, moe.model):
            model.config._attn_implementation = "without"
        expected = steps(stock)
        assert (steps(moe.model) - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert own_code(moe) == {"layer"}


def test_a_function_that_is_registered_anew_is_followed(tmp_path):
    """The config names it as before."""
    folder = saved("Mixtral", tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    registry = transformers.AttentionInterface()
    for host_memory in ("50%", "100%"):
        with MoE(folder, host_memory=host_memory) as moe:
            if host_memory == "100%":
                moe.preload()
            before = steps(moe.model)
            own = registry["sdpa"]
            transformers.AttentionInterface.register(
                "sdpa", lambda module, query, *args, **kwargs: (query.transpose(1, 2), None)
            )
            try:
                expected = steps(stock)
                found = steps(moe.model)
            finally:
                transformers.AttentionInterface.register("sdpa", own)
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
            assert torch.equal(steps(moe.model), before)


def test_changed_experts_are_an_error_and_their_activation_is_followed(tmp_path):
    folder = saved("Mixtral", tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    for host_memory in ("50%", "100%"):
        with MoE(folder, host_memory=host_memory) as moe:
            if host_memory == "100%":
                moe.preload()
            for model in (stock, moe.model):
                model.model.layers[1].mlp.experts.act_fn = nn.GELU()
            expected = steps(stock)
            assert (steps(moe.model) - expected).abs().max() <= 1e-4 * expected.abs().max()
            experts = moe.model.model.layers[0].mlp.experts
            experts.down_proj = nn.Parameter(torch.zeros(8, 64, 48))
            with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.experts"):
                steps(moe.model)


def test_capturing_outputs_once_makes_no_later_step_slower(tmp_path, monkeypatch):
    """transformers leaves its hooks on the modules, and they do nothing from then on."""
    calls: list[str] = []
    for kind in (DecoderLayer, LayersAhead):
        name = "_with_block" if kind is DecoderLayer else "run"
        own = getattr(kind, name)

        def counted(self: Any, *args: Any, own: Any = own, name: str = name) -> Any:
            out = own(self, *args)
            if out is not None:
                calls.append(name)
            return out

        monkeypatch.setattr(kind, name, counted)
    with MoE(saved("Mixtral", tmp_path)) as moe:
        moe.preload()
        steps(moe.model)
        expected = calls.copy()
        kept = moe.generate(
            TOKENS[:1, :5],
            max_new_tokens=3,
            output_hidden_states=True,
            output_attentions=True,
            return_dict_in_generate=True,
        )
        assert len(kept.hidden_states) == 3
        calls.clear()
        steps(moe.model)
        assert calls == expected
