"""Arguments of `generate()`, and calls of parts of a model, mean what they do in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from moe_infinity import MoE, UnsupportedModelError
from moe_infinity.long_prompts import in_passes
from moe_infinity.streaming import streamed_arguments
from tests.conftest import make_model


@pytest.fixture
def moe(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="25%") as moe:
        yield moe


def test_each_answer_to_a_prompt_takes_memory_of_its_own(moe, monkeypatch):
    """transformers repeats the prompt for each before it reads it."""
    asked: dict[str, Any] = {"input_ids": torch.zeros(1, 600, dtype=torch.int64)}
    planned = []

    def at_once(num_new: int, *args: Any, **kwargs: Any) -> int:
        planned.append(num_new)
        return 2400

    monkeypatch.setattr(moe.engine.room, "tokens_at_once", at_once)
    for more in ({}, {"num_return_sequences": 8}, {"num_beams": 4, "num_return_sequences": 2}):
        in_passes(moe.model, moe.engine.room, asked | more, is_begun=False)
    assert planned == [600, 4800, 2400]


def test_a_model_with_a_generate_of_its_own_gets_what_it_was_given(moe, monkeypatch):
    """The settings of DiffusionGemma are of another class, which has not all names."""
    room = moe.engine.room
    monkeypatch.setattr(room, "tokens_at_once", lambda *args, **kwargs: 512)
    settings = GenerationConfig()
    del settings.prefill_chunk_size, settings.num_beams
    monkeypatch.setattr(moe.model, "generation_config", settings)
    monkeypatch.setitem(vars(moe.model), "generate", lambda **given: sorted(given))
    asked: dict[str, Any] = {"input_ids": torch.zeros(1, 600, dtype=torch.int64)}
    assert moe.generate(**asked) == ["input_ids"]
    assert streamed_arguments(moe.model, moe.tokenizer, asked) == asked


def test_a_model_is_cast_but_not_moved(tiny_checkpoint):
    """Its experts would be read by the processor where the others are not."""
    with MoE(tiny_checkpoint) as moe:
        assert moe.model.to("cpu").float().dtype == torch.float32
        for part in (moe.model, moe.model.model):
            with pytest.raises(UnsupportedModelError, match="cannot be moved; choose the device"):
                part.to("meta")
        assert {param.device.type for param in moe.model.parameters()} == {"cpu"}


def test_modules_take_their_argument_by_its_name(moe):
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(moe.model.lm_head(input=x), moe.model.lm_head(x))
        router = moe.model.model.layers[1].mlp.gate
        by_name = router(hidden_states=x)
        assert all(map(torch.equal, by_name, router(x)))


def test_a_linear_layer_takes_no_rows(moe):
    with torch.no_grad():
        for shape in ((0, 32), (1, 0, 32)):
            out = moe.model.lm_head(torch.zeros(shape, dtype=torch.bfloat16))
            assert out.shape == (*shape[:-1], 128)


def test_weights_in_float64_are_computed_by_modules(tmp_path):
    make_model().double().save_pretrained(tmp_path)
    stock: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", experts_implementation="eager"
    )
    prompt = torch.tensor([[5, 6, 9, 100, 31]])
    expected = stock.generate(prompt, max_new_tokens=8, do_sample=False)
    with MoE(tmp_path) as moe:
        assert torch.equal(moe.generate(prompt, max_new_tokens=8, do_sample=False), expected)
