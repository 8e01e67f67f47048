"""Attention with sinks by torch's kernel: the numbers are those of transformers' own code."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gpt_oss import modeling_gpt_oss

from moe_infinity import MoE
from moe_infinity.architectures import sinks
from moe_infinity.kernels.cpu.attention import attend_grouped
from tests.architectures.test_decoder_layers import assert_close, saved

pytestmark = pytest.mark.arithmetic

PROMPT = torch.arange(3, 3 + 2 * 90).view(2, 90) * 37 % 128


@pytest.fixture
def attended(monkeypatch) -> list[int]:
    """The number of queries of every call of attention with sinks that torch's kernel takes."""
    seen: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        out = attend_grouped(*args, **kwargs)
        if out is not None and kwargs.get("sinks_H") is not None:
            seen.append(args[0].shape[2])
        return out

    monkeypatch.setattr(sinks, "attend_grouped", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_that_of_float64(dtype):
    """Two sequences, groups of heads, a window; one query that sees nothing but its sink."""
    torch.manual_seed(0)
    shapes = (6, 700), (2, 900), (2, 900)
    query, key, value = (torch.randn(2, *shape, 16).to(dtype) for shape in shapes)
    mask = torch.full((2, 1, 700, 900), torch.finfo(dtype).min, dtype=dtype).triu_(201)
    mask[1, :, :, :40] = torch.finfo(dtype).min
    mask[1, :, 3] = torch.finfo(dtype).min
    sinks_H = 3 * torch.randn(6)
    wide = [x.double().repeat_interleave(6 // x.shape[1], 1) for x in (query, key, value)]
    scores = wide[0] @ wide[1].transpose(2, 3) * 0.3 + mask.double()
    whole = torch.cat([scores, sinks_H.double().view(1, 6, 1, 1).expand(2, 6, 700, 1)], 3)
    exact = (whole.softmax(3)[..., :-1] @ wide[2]).transpose(1, 2)
    found = attend_grouped(query, key, value, mask, 0.3, sinks_H=sinks_H)
    assert found is not None
    eps = torch.finfo(dtype).eps
    assert (found.double() - exact).abs().max() < 8 * eps * exact.abs().max()
    assert found[1, 3].abs().max() == 0
    without = attend_grouped(query, key, value, mask, 0.3)
    assert without is not None
    assert (without.double() - exact).abs().max() > 1e-2


@pytest.mark.parametrize("padding", [None, 3])
def test_prompts_have_the_logits_of_stock(tmp_path, attended, padding):
    folder = saved("GptOss", tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    mask = torch.ones_like(PROMPT)
    mask[0, : padding or 0] = 0
    with torch.no_grad():
        expected = stock(PROMPT, attention_mask=mask).logits
        with MoE(folder) as moe:
            attended.clear()  # of a trial
            found = moe.model(PROMPT, attention_mask=mask).logits
    assert attended == [90] * 3
    first = padding or 0
    assert_close(found[:, first:], expected[:, first:])


def test_gradients_weights_of_attention_and_exact_come_from_the_models_own_code(tmp_path, attended):
    folder = saved("GptOss", tmp_path)
    with MoE(folder) as moe:
        attended.clear()  # of a trial
        moe.model(PROMPT)
        with torch.no_grad():
            out = moe.model(PROMPT, output_attentions=True)
            assert out.attentions[0].shape == (2, 4, 90, 90)
            assert attended == []
            moe.model.set_attn_implementation("eager")
            moe.model(PROMPT)
    with MoE(folder, exact=True) as moe, torch.no_grad():
        moe.model(PROMPT)
    assert attended == []


def test_a_class_that_attends_in_another_way_keeps_its_own_code(tmp_path, attended, monkeypatch):
    stock = modeling_gpt_oss.eager_attention_forward

    @wraps(stock)
    def other(*args: Any, **kwargs: Any) -> Any:
        out, weights = stock(*args, **kwargs)
        return 2 * out, weights

    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", other)
    with MoE(saved("GptOss", tmp_path)) as moe, torch.no_grad():
        attended.clear()
        moe.model(PROMPT)
        assert moe.model.config._attn_implementation == "eager"
    assert attended == []


def test_a_function_that_was_replaced_later_is_called(tmp_path, attended, monkeypatch):
    stock = modeling_gpt_oss.eager_attention_forward
    with MoE(saved("GptOss", tmp_path)) as moe, torch.no_grad():
        expected = moe.model(PROMPT).logits
        attended.clear()
        seen = []

        def other(*args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["scaling"])
            return stock(*args, **kwargs)

        monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", other)
        assert_close(moe.model(PROMPT).logits, expected)
    assert (len(seen), attended) == (3, [])


def test_a_class_whose_attention_takes_more_keeps_its_own_code(tmp_path, attended, monkeypatch):
    stock = modeling_gpt_oss.eager_attention_forward

    def other(module, query, key, value, attention_mask, scaling, softcap=None, **kwargs):
        return stock(module, query, key, value, attention_mask, scaling, **kwargs)

    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", other)
    with MoE(saved("GptOss", tmp_path)) as moe:
        assert moe.model.config._attn_implementation == "eager"
    assert attended == []


def test_another_model_in_the_process_is_not_touched(tmp_path: Path, attended):
    folder = saved("GptOss", tmp_path)
    with MoE(folder):
        attended.clear()
        stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        with torch.no_grad():
            stock(PROMPT)
    assert stock.config._attn_implementation == "eager"
    assert attended == []
