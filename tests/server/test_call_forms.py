"""What a grammar makes any model write is what `messages` reads back, for each kind of model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from moe_infinity.server.grammars import (
    GrammarCompiler,
    Structure,
    answer_form_of,
    calls_in,
    message_in,
    part_of,
    tools_of,
)
from moe_infinity.server.messages import MessageFormat
from moe_infinity.server.refusals import BadRequest
from moe_infinity.server.sampling import Constraint, Sampler
from tests.server.conftest import DEMO
from tests.server.test_messages import Plain

SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "minLength": 1, "maxLength": 5},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "days": {"type": "array", "items": SMALL, "maxItems": 2},
                    "hour": {"$ref": "#/$defs/hour", "type": "integer"},
                },
                "required": ["city", "unit", "days"],
                "additionalProperties": False,
                "$defs": {"hour": SMALL},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "wait",
            "parameters": {"type": "object", "additionalProperties": False},
        },
    },
]
V3_1 = "{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}"
# By model type: the end of a prompt, and a chat template where it decides.
PROMPTS = {
    "qwen3_moe": ("<|im_start|>assistant\n", ""),
    "qwen3_moe, thinking begun": ("<|im_start|>assistant\n<think>\n", ""),
    "qwen3_5_moe": ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
    "gpt_oss": ("<|start|>assistant", ""),
    "deepseek_v3": ("<｜Assistant｜>", ""),
    "deepseek_v3, of version 3.1": ("<｜Assistant｜></think>", V3_1),
    "glm4_moe": ("<|assistant|>", ""),
    "mixtral": ("[INST] hi [/INST]", ""),
}


@cache
def vocabulary() -> tuple[Any, GrammarCompiler]:
    """The demo model's tokenizer, and what compiles grammars for it."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    return tokenizer, GrammarCompiler(tokenizer, len(tokenizer), [0])


class Kind:
    """What the server knows of a kind of model, and the demo model's vocabulary."""

    def __init__(self, name: str) -> None:
        self.prompt, template = PROMPTS[name]
        plain: Any = Plain(name)
        plain.chat_template = template
        self.format = MessageFormat(plain, plain)
        self.form = answer_form_of(plain.model_type, template)
        assert self.form is not None
        self.ids = list(map(ord, self.prompt))
        self.tokenizer, self.compiler = vocabulary()

    def write(self, seed: int, *, max_calls: int | None = 1, has_calls: bool = True) -> str:
        """A message of tokens that the grammar allows: reasoning, then random ones."""
        lark = self.compiler.lark("tools")
        assert self.form is not None
        if has_calls:
            tools = tools_of(TOOLS, "parameters")
            message = calls_in(lark, self.form.calls, tools, max_calls)
        else:
            structure = Structure("choice", ["yes", "no"], "structured_outputs.choice")
            message = f"{lark.literal(self.form.answer)} {lark.add(part_of(structure, 'x'))}"
        is_thinking = self.format.has_begun_reasoning(self.ids)
        start = message_in(lark, self.form, [message], is_thinking=is_thinking)
        constraint = Constraint(self.compiler.compiled(lark, start, "tools"))
        sampler = Sampler([constraint], seed=seed, constraint=constraint)
        reasoning = "hm</think>" if is_thinking else ""
        if self.form.reasoning is not None:
            none = "<|channel|>commentary" if has_calls else "<|channel|>final"
            reasoning = "hm".join(self.form.reasoning) if seed % 2 else ""
            reasoning += none
        wanted: list[int] = self.tokenizer(reasoning)["input_ids"]
        ids: list[int] = []
        while not constraint.is_complete and ids[-1:] != [0]:
            logits_V = torch.zeros(len(self.tokenizer))
            if len(ids) < len(wanted):
                logits_V[wanted[len(ids)]] = 100.0
            ids.append(sampler.choose(logits_V).token_id)
            assert len(ids) < 2000
        assert ids[: len(wanted)] == wanted
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROMPTS)
def test_a_call_is_read_back(name, seed):
    kind = Kind(name)
    assert kind.format.reads_calls(kind.ids, "weather")
    reader = kind.format.reader(kind.ids, TOOLS, max_calls=None)
    reader.add(kind.write(seed), is_last=True)
    (call,) = reader.message.calls
    arguments = json.loads(call.arguments)
    if call.name == "wait":
        assert arguments == {}
        return
    assert call.name == "weather"
    assert set(arguments) - {"hour"} == {"city", "unit", "days"}
    assert 1 <= len(arguments["city"]) <= 5
    assert arguments["unit"] in ("C", "F")
    assert len(arguments["days"]) <= 2
    assert all(day in range(10) for day in [*arguments["days"], arguments.get("hour", 0)])


@pytest.mark.parametrize("name", PROMPTS)
def test_of_several_calls_all_are_read_back(name):
    kind = Kind(name)
    counts = set()
    for seed in range(12):
        text = kind.write(seed, max_calls=None)
        reader = kind.format.reader(kind.ids, TOOLS, max_calls=None)
        reader.add(text, is_last=True)
        assert not reader.message.content.strip()
        counts.add(len(reader.message.calls))
    assert 1 in counts
    assert name == "gpt_oss" or max(counts) > 1


@pytest.mark.parametrize("name", PROMPTS)
def test_a_constrained_text_is_all_of_the_content(name):
    kind = Kind(name)
    reader = kind.format.reader(kind.ids, None, max_calls=None)
    reader.add(kind.write(0, has_calls=False), is_last=True)
    assert reader.message.content in ("yes", "no")
    assert not reader.message.calls


def test_special_tokens_are_written_as_tokens():
    kind = Kind("mixtral")
    special = {"[TOOL_CALLS]": 1}
    lark = kind.compiler.lark("x")
    lark._special_ids = special
    assert lark.literal("[TOOL_CALLS] [") == '<[1]> " ["'


def test_what_a_kind_cannot_write_is_refused_by_name():
    kind = Kind("glm4_moe")
    assert kind.form is not None
    lark = kind.compiler.lark("x")
    odd = {"type": "string", "pattern": "a+"}
    parameters = {"properties": {"a": odd}}
    tools = tools_of([{"function": {"name": "f", "parameters": parameters}}], "parameters")
    with pytest.raises(BadRequest, match="tools.0.parameters: .*pattern"):
        calls_in(lark, kind.form.calls, tools, None)
