"""What a grammar makes any model write is what `messages` reads back, for each kind of model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from moe_infinity.server.formats import family_of
from moe_infinity.server.grammars import (
    GrammarCompiler,
    Structure,
    calls_in,
    message_in,
    part_of,
    tools_of,
)
from moe_infinity.server.messages import MessageFormat, is_readable
from moe_infinity.server.refusals import BadRequest
from moe_infinity.server.sampling import Constraint, Sampler
from tests.server.conftest import DEMO
from tests.server.test_messages import Plain
from tests.server.test_recorded_answers import MARKS

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
                    "hour": {"$ref": "#/$defs/hour"},
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
ODD: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "until": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
                    "level": {"enum": ["low", 2, None]},
                    "at": {"anyOf": [{"$ref": "#/$defs/at"}, {"type": "array", "maxItems": 0}]},
                    "times": {"type": ["integer", "null"], "maximum": 9, "minimum": 0},
                },
                "required": ["level"],
                "additionalProperties": False,
                "$defs": {"at": {"type": "object", "additionalProperties": False}},
            },
        },
    }
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
    "qwen3_moe, Coder": ("<|im_start|>assistant\n", "<tool_call>\n<function="),
    "nemotron_h": ("<|im_start|>assistant\n<think>\n", ""),
    "nemotron_h, Nano 2": ("<SPECIAL_11>Assistant\n<think>\n", "<TOOLCALL>"),
    "kimi_k25": ("<|im_assistant|>assistant<|im_middle|><think>", ""),
    "minimax_m2": ("]~b]ai\n<think>\n", ""),
    "glm_moe_dsa": ("<|assistant|><think>", ""),
    "gemma4": ("<|turn>model\n", ""),
}
if is_readable(family_of("lfm2_moe", "")):  # not by transformers 5.17
    PROMPTS["lfm2_moe"] = ("<|im_start|>assistant\n", "")


@cache
def vocabulary(marks: tuple[str, ...] = ()) -> tuple[Any, GrammarCompiler]:
    """The demo model's tokenizer with these marks as tokens, and what compiles grammars for it."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens(list(marks), special_tokens=True)
    return tokenizer, GrammarCompiler(tokenizer, len(tokenizer), [0])


class Kind:
    """What the server knows of a kind of model, and the demo model's vocabulary."""

    def __init__(self, name: str, *, has_tokens: bool = False) -> None:
        """`has_tokens`: marks are tokens, as in the vocabulary of such a model."""
        self.prompt, template = PROMPTS[name]
        plain: Any = Plain(name)
        plain.chat_template = template
        self.format = MessageFormat(plain, plain)
        form = family_of(plain.model_type, template)
        assert form is not None
        self.form = form.written
        self.ids = list(map(ord, self.prompt))
        marks = MARKS.findall(f"{self.prompt} {self.form} </think>") if has_tokens else []
        self.tokenizer, self.compiler = vocabulary(tuple(sorted(set(marks))))

    def write(
        self,
        seed: int,
        *,
        max_calls: int | None = 1,
        has_calls: bool = True,
        offered: list[Any] = TOOLS,
    ) -> str:
        """A message of tokens that the grammar allows: reasoning, then random ones."""
        lark = self.compiler.lark("tools")
        if has_calls:
            tools = tools_of(offered, "parameters")
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
            reasoning = "hm".join(self.form.reasoning) if seed % 2 else ""
            opening = (self.form.calls.begin + self.form.calls.open).partition("NAME")[0]
            reasoning += opening if has_calls else self.form.answer or "yes"
        wanted: list[int] = self.tokenizer(reasoning)["input_ids"]
        form = self.form.calls
        end = '"' if form.around_value is None or form.quotes else form.around_value[1]
        ends = self.tokenizer(end)["input_ids"]
        at = 0
        ids: list[int] = []
        while not constraint.is_complete and ids[-1:] != [0]:
            logits_V = torch.zeros(len(self.tokenizer))
            if len(ids) < len(wanted):
                logits_V[wanted[len(ids)]] = 100.0
            elif offered is ODD and len(ids) > 60:  # any text comes to its end
                logits_V[ends[at % len(ends)]] = 12.0
                at += 1
            ids.append(sampler.choose(logits_V).token_id)
            assert len(ids) < 2000
        assert ids[: len(wanted)] == wanted
        text: str = self.tokenizer.decode(ids)
        return text.replace(self.tokenizer.decode([0]), "")


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_call_is_read_back(name, has_tokens, seed):
    kind = Kind(name, has_tokens=has_tokens)
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


@pytest.mark.parametrize("seeds", [(1, 6, 8), pytest.param(range(12), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROMPTS)
def test_of_several_calls_all_are_read_back(name, seeds):
    kind = Kind(name)
    counts = set()
    for seed in seeds:
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
    lark = kind.compiler.lark("x")
    odd = {"type": "string", "pattern": "a+"}
    parameters = {"properties": {"a": odd}}
    tools = tools_of([{"function": {"name": "f", "parameters": parameters}}], "parameters")
    with pytest.raises(BadRequest, match="tools.0.parameters: .*pattern"):
        calls_in(lark, kind.form.calls, tools, None)


@pytest.mark.parametrize("name", ["qwen3_moe, Coder", "glm4_moe", "minimax_m2"])
def test_a_pattern_is_taken_beside_a_format_which_says_the_same(name):
    """As zod writes an address, for models that write calls in tags."""
    kind = Kind(name)
    lark = kind.compiler.lark("x")
    properties = {"to": {"type": "string", "format": "email", "pattern": "^(?!a)[a-z]+@[a-z.]+$"}}
    function = {"name": "send", "parameters": {"properties": properties}}
    tools = tools_of([{"function": function}], "parameters")
    kind.compiler.compiled(lark, calls_in(lark, kind.form.calls, tools, 1), "x")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PROMPTS)
def test_schemas_as_libraries_write_them_are_kept(name):
    """What may be null, references, lists of types, and values of several types."""
    kind = Kind(name, has_tokens=True)
    found = []
    for seed in range(6):
        text = kind.write(seed, offered=ODD)
        reader = kind.format.reader(kind.ids, ODD, max_calls=None)
        reader.add(text, is_last=True)
        (call,) = reader.message.calls
        found.append(json.loads(call.arguments))
    for arguments in found:
        assert arguments["level"] in ("low", 2, "2", None)
        assert arguments.get("at", {}) in ({}, [])
        assert arguments.get("times") in (None, *range(10))
        assert isinstance(arguments.get("text", ""), str)
        assert len(arguments.get("until") or "") <= 4  # null, as a string
    assert len({tuple(each) for each in found}) > 1
