"""Decoder layers whose attention one kernel computes: what comes out is what the layers' own code
gives, to rounding, and whatever the kernel does not know goes to that code.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from moe_infinity import MoE
from moe_infinity.architectures import attention_inputs
from tests.cache_name import CACHE
from tests.on_demand import ON_DEMAND

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(5)]

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "Qwen2Moe": {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    "Mixtral": {},
    "Olmoe": {},
    "GptOss": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Glm4Moe": {"n_routed_experts": 8, "first_k_dense_replace": 1, "use_qk_norm": True},
}
TOKENS = torch.arange(3, 3 + 2 * 40).view(2, 40) * 37 % 128


def saved(name: str, folder: Path, **more: Any) -> Path:
    """A tiny random model in float32."""
    config = getattr(transformers, f"{name}Config")(**SMALL | MODELS.get(name, {}) | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.15) if param.ndim > 1 else param.add_(torch.randn_like(param) / 9)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor, *, num_prompt: int = 5, mask: Tensor | None = None):
    """[B, T, vocabulary] of a prompt and then token by token, each given."""
    cache = DynamicCache(config=model.config)
    found = []
    for start, stop in [(0, num_prompt), *((t, t + 1) for t in range(num_prompt, tokens.shape[1]))]:
        kwargs = {} if mask is None else {"attention_mask": mask[:, :stop]}
        found.append(model(tokens[:, start:stop], **{CACHE: cache}, **kwargs).logits)
    return torch.cat(found, dim=1)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (found.roll(1, dims=1) - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("padding", [None, 3])
def test_logits_are_those_of_stock(checkpoint, calls, padding):
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    tokens = TOKENS[:1] if padding is None else TOKENS
    mask = None
    if padding is not None:
        mask = torch.ones_like(tokens)
        mask[0, :padding] = 0
    expected = logits_of(stock, tokens, mask=mask)
    with MoE(checkpoint, host_memory="50%") as moe:
        calls.clear()
        found = logits_of(moe.model, tokens, mask=mask)
    assert calls == [len(tokens)] * 35 * 3
    first = 0 if padding is None else padding
    assert_close(found[:, first:], expected[:, first:])


RUNS = {  # layers of each call of a step, when all experts are in memory
    "Qwen3Moe": [1, 1],  # between them is one without experts
    "Qwen2Moe": [3],  # has shared experts
    "Mixtral": [3],
    "Olmoe": [3],
    "GptOss": [],  # kernels do not read its experts, unless they are packed
    "Glm4Moe": [],
}


@pytest.mark.parametrize("padding", [None, 3])
def test_layers_in_one_call_give_the_bits_of_layers_one_by_one(checkpoint, runs, padding):
    tokens = TOKENS[:1] if padding is None else TOKENS
    mask = None
    if padding is not None:
        mask = torch.ones_like(tokens)
        mask[0, :padding] = 0
    with MoE(checkpoint, host_memory="50%") as moe:
        expected = logits_of(moe.model, tokens, mask=mask)
        few = moe.report()
    assert runs == []
    with MoE(checkpoint) as moe:
        moe.preload()
        found = logits_of(moe.model, tokens, mask=mask)
        all_in_memory = moe.report()
    first = 0 if padding is None else padding
    assert torch.equal(found[:, first:], expected[:, first:])
    name = type(moe.model).__name__.removesuffix("ForCausalLM")
    assert runs == RUNS[name] * 35
    assert all_in_memory.decode.lookups == few.decode.lookups
    assert all_in_memory.decode.misses == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_threads_that_come_late_do_no_harm(tmp_path, runs):
    """More threads than cores: some are still in a call of one layer while others are in the next,
    and each layer has another number of experts to compute.
    """
    before = torch.get_num_threads()
    tokens = torch.arange(8 * 60).view(8, 60) * 37 % 128
    folder = saved("Mixtral", tmp_path, num_hidden_layers=6)
    with MoE(folder, host_memory="50%") as moe:
        expected = logits_of(moe.model, tokens)
    with MoE(folder) as moe:
        moe.preload()
        torch.set_num_threads(8)
        try:
            for _ in range(6):
                assert torch.equal(logits_of(moe.model, tokens), expected)
        finally:
            torch.set_num_threads(before)
    assert runs == [6] * 55 * 6


def test_a_layer_that_gets_no_angles_runs_its_own_code(tmp_path, monkeypatch):
    """Lara-Mini's model gives them to the layers of one kind only."""
    attention = transformers.models.olmoe.modeling_olmoe.OlmoeAttention
    attend = attention.forward
    still = torch.ones(1, 1, 16), torch.zeros(1, 1, 16)

    def tolerant(self: nn.Module, hidden_states: Tensor, position_embeddings: Any, **more: Any):
        return attend(self, hidden_states, position_embeddings or still, **more)

    monkeypatch.setattr(attention, "forward", tolerant)
    folder = saved("Olmoe", tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    x = torch.randn(1, 6, 64)

    def last(model: Any) -> Tensor:
        cache = DynamicCache(config=model.config)
        given = {CACHE: cache, "attention_mask": None, "position_embeddings": None}
        layer = model.model.layers[0]
        with torch.no_grad():
            layer(x[:, :5], **given)
            return layer(x[:, 5:], **given)

    with MoE(folder, host_memory="50%") as moe:
        assert "kernel" in str(moe.report())
        torch.testing.assert_close(last(moe.model), last(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_history", [False, True])
def test_nothing_is_predicted_once_all_experts_are_in_memory(tmp_path, has_history):
    history = tmp_path / "history" if has_history else None
    with MoE(saved("Mixtral", tmp_path), history=history, **ON_DEMAND) as moe:
        assert moe.engine.predictor is not None
        moe.preload()
        assert (moe.engine.predictor is not None) == has_history


def test_what_was_computed_ahead_is_dropped_when_something_comes_between(tmp_path, runs):
    with MoE(saved("Mixtral", tmp_path)) as moe, torch.no_grad():
        model = moe.model
        moe.preload()

        def step() -> Tensor:
            cache = DynamicCache(config=model.config)
            model(TOKENS[:1, :7], **{CACHE: cache})
            return model(TOKENS[:1, 7:8], **{CACHE: cache}).logits

        expected = step()
        assert runs == [3]
        layers = model.model.layers
        double = layers[0].register_forward_hook(lambda module, args, out: out * 2)
        doubled = step()
        assert runs == [3, 1, 2]
        double.remove()
        in_place = layers[0].register_forward_hook(lambda module, args, out: out.mul_(2))
        assert torch.equal(step(), doubled)
        in_place.remove()
        assert not torch.equal(doubled, expected)
        runs.clear()
        assert torch.equal(step(), expected)
        assert runs == [3]
        seen = []
        spy = layers[1].self_attn.register_forward_hook(lambda module, args, out: seen.append(1))
        assert (step() - expected).abs().max() < 1e-4 * expected.abs().max()
        assert len(seen) == 2  # the prompt's, and the step's: by the layer's own code
        spy.remove()
        runs.clear()
        block = layers[1].mlp
        for module in (block, block.gate, block.experts):
            seen.clear()
            spy = module.register_forward_hook(lambda module, args, out: seen.append(1))
            assert torch.equal(step(), expected)
            assert len(seen) == 2
            spy.remove()
        assert runs == [1, 1] * 3  # the layers around it


def test_routers_choose_for_what_their_block_gives_them(tmp_path):
    """A block that changed its input in place got the choice for the input as it had been."""
    folder = saved("Mixtral", tmp_path)
    stock: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with MoE(folder, host_memory="50%") as moe:
        for model in (stock, moe.model):
            for layer in model.model.layers:
                block = layer.mlp
                vars(block)["forward"] = partial(_negated, block.forward)
        assert_close(logits_of(moe.model, TOKENS[:1]), logits_of(stock, TOKENS[:1]))


def _negated(forward: Any, x: Tensor) -> Any:
    return forward(x.neg_())


def test_inference_mode_takes_embeddings_from_outside_of_it(tmp_path, runs):
    """Its tensors count no versions, so nothing is computed ahead: this was a RuntimeError."""
    with MoE(saved("Mixtral", tmp_path)) as moe:
        moe.preload()
        embed = moe.model.get_input_embeddings()

        def step() -> Tensor:
            cache = DynamicCache(config=moe.model.config)
            moe.model(TOKENS[:1, :7], **{CACHE: cache})
            return moe.model(inputs_embeds=embedded, **{CACHE: cache}).logits

        with torch.no_grad():
            embedded = embed(TOKENS[:1, 7:8])
            expected = step()
        assert runs == [3]
        with torch.inference_mode():
            assert torch.equal(step(), expected)
        assert runs == [3]


def test_a_step_that_ended_early_leaves_nothing_behind(tmp_path, runs):
    with MoE(saved("Mixtral", tmp_path)) as moe, torch.no_grad():
        model = moe.model
        moe.preload()
        cache = DynamicCache(config=model.config)
        expected = logits_of(model, TOKENS[:1, :12])
        model(TOKENS[:1, :5], **{CACHE: cache})
        for t in range(5, 7):
            model(TOKENS[:1, t : t + 1], **{CACHE: cache})

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(TOKENS[:1, 7:8], **{CACHE: cache})
        hook.remove()
        for layer in cache.layers:  # the first has one token more
            layer.keys = layer.keys[:, :, :7]
            layer.values = layer.values[:, :, :7]
        for t in range(7, 12):
            logits = model(TOKENS[:1, t : t + 1], **{CACHE: cache}).logits[:, 0]
            assert torch.equal(logits, expected[:, t])


def test_what_the_kernel_does_not_know_goes_to_the_layers_own_code(tmp_path, calls):
    with MoE(saved("Qwen3Moe", tmp_path), host_memory="50%") as moe, torch.no_grad():
        model = moe.model
        expected = logits_of(model, TOKENS[:1, :8])
        calls.clear()

        def step(**kwargs: Any) -> tuple[int, Tensor]:
            cache = DynamicCache(config=model.config)
            model(TOKENS[:1, :7], **{CACHE: cache})
            calls.clear()
            logits = model(TOKENS[:1, 7:8], **{CACHE: cache} | kwargs).logits
            return len(calls), logits

        num_calls, logits = step()
        assert num_calls == 3
        assert (logits[0, 0] - expected[0, 7]).abs().max() < 1e-4  # after another prompt
        static = transformers.StaticCache(config=model.config, max_cache_len=20)
        model(TOKENS[:1, :7], **{CACHE: static})
        assert step(**{CACHE: static})[0] == 0
        with torch.enable_grad():
            assert step()[0] == 0
        layer = model.model.layers[1].self_attn
        layer.q_proj.weight = nn.Parameter(layer.q_proj.weight.clone())
        assert step()[0] == 2
        calls.clear()
        model(TOKENS[:1, :1], **{CACHE: DynamicCache(config=model.config)})  # nothing cached
        assert calls == []
        num_calls, logits = step(output_attentions=True)  # hooks on attention, which stay there
        assert num_calls == 0
        assert_close(torch.cat([expected[:, 6:7], logits], 1), expected[:, 6:8])


def test_caches_that_are_copied_cropped_or_reordered_stay_apart(checkpoint):
    with MoE(checkpoint, host_memory="50%") as moe, torch.no_grad():
        model = moe.model
        expected = logits_of(model, TOKENS[:, :12])
        other = TOKENS[:, 20:32].clone()
        other[:, :6] = TOKENS[:, :6]
        expected_other = logits_of(model, other)
        cache = DynamicCache(config=model.config)
        model(TOKENS[:, :5], **{CACHE: cache})
        model(TOKENS[:, 5:6], **{CACHE: cache})
        kept = copy.copy(cache)
        kept.layers = [copy.copy(layer) for layer in cache.layers]  # the same tensors
        for t in range(6, 12):  # in turn
            logits = model(TOKENS[:, t : t + 1], **{CACHE: cache}).logits[:, 0]
            assert torch.equal(logits, expected[:, t])
            logits = model(other[:, t : t + 1], **{CACHE: kept}).logits[:, 0]
            assert torch.equal(logits, expected_other[:, t])
        cache.crop(-2)
        logits = model(TOKENS[:, 10:11], **{CACHE: cache}).logits[:, 0]
        assert torch.equal(logits, expected[:, 10])
        cache.reorder_cache(torch.tensor([1, 0]))
        logits = model(TOKENS[:, 11:].flip(0), **{CACHE: cache}).logits[:, 0]
        assert (logits - expected[:, 11].flip(0)).abs().max() < 1e-4  # torch's bits are by place


def test_the_room_of_a_long_cache_is_an_eighth_of_it():
    """A larger one would be memory that nobody counts."""
    cache = DynamicCache()
    keys = torch.zeros(1, 1, 1024, 2)
    cache.update(keys, keys, 0)
    layer = cache.layers[0]
    attention_inputs.with_room(layer)
    assert layer.keys.untyped_storage().nbytes() == (1024 + 128) * 2 * 4


def test_a_cache_that_grows_is_not_copied_for_every_token():
    cache = DynamicCache()
    keys, values = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 8)
    cache.update(keys, values, 0)
    layer = cache.layers[0]
    addresses = set()
    for _ in range(attention_inputs.MIN_ROOM):
        new_keys, new_values = attention_inputs.with_room(layer)
        new_keys[:, :, -1] = layer.keys.shape[2]
        new_values[:, :, -1] = -layer.keys.shape[2]
        attention_inputs.add_token(layer)
        addresses.add(layer.keys.data_ptr())
    assert len(addresses) == 1
    assert torch.equal(layer.keys[:, :, :5], keys)
    assert torch.equal(layer.values[:, :, :5], values)
    assert layer.keys[0, 0, 5:, 0].tolist() == [*range(5, 5 + attention_inputs.MIN_ROOM)]
    assert cache.get_seq_length() == 5 + attention_inputs.MIN_ROOM
