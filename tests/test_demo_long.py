"""The config, tokenizer and template with which agents are tried on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from moe_infinity.cli.inspection import inspect_checkpoint

MODELS = Path(__file__).resolve().parents[1] / "models"
RENAMED = {"<|endoftext|>": "<|im_end|>", "<|pad|>": "<|im_start|>"}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODELS / "demo-long")


def test_it_is_the_bundled_model_but_for_context_padding_and_two_names():
    own, other = (
        json.loads((MODELS / n / "config.json").read_text()) for n in ("demo", "demo-long")
    )
    assert other == own | {"max_position_embeddings": 65536, "pad_token_id": 0}
    own, other = ((MODELS / n / "tokenizer.json").read_text() for n in ("demo", "demo-long"))
    for old, new in RENAMED.items():
        own = own.replace(old, new)
    assert other == own
    assert inspect_checkpoint(str(MODELS / "demo"), config_from=str(MODELS / "demo-long"))


def test_turns_are_chatml_and_end_where_the_model_ends_its_texts(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("arguments", [{"path": "ä"}, '{"path": "ä"}'])
def test_tools_calls_and_their_results_are_json_between_tags(tokenizer, arguments):
    call = {"type": "function", "function": {"name": "read", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    written = '<tool_call>\n{"name": "read", "arguments": {"path": "ä"}}\n</tool_call>'
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert f"<think>\nHm\n</think>\n\n{written}\n{written}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


def test_thinking_can_be_turned_off(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
