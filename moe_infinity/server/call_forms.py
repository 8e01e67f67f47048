"""How models write calls of tools and constrained answers: grammars of what `messages` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_infinity.server.grammars import Lark, json_part
from moe_infinity.server.refusals import BadRequest

THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a kind of model writes calls. NAME stands for the tool, KEY for an argument."""

    begin: str = ""  # before the first call
    open: str  # before the arguments
    close: str  # behind them
    between: str | None = "\n"  # of two calls; None: a message has one call
    end: str = ""  # behind the last call
    around_value: tuple[str, str] | None = None  # None: the arguments are a JSON object


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How a kind of model begins the parts of a message."""

    calls: CallForm
    reasoning: tuple[str, str] | None = None  # around reasoning that the model begins by itself
    answer: str = ""  # before an answer without calls


IN_JSON = CallForm(open='<tool_call>\n{"name": "NAME", "arguments": ', close="}\n</tool_call>")
# By `model_type`, as their chat templates write messages.
ANSWER_FORMS: dict[tuple[str, ...], AnswerForm] = {
    (
        "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl",
        "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe",
    ): AnswerForm(calls=IN_JSON),
    ("qwen3_5", "qwen3_5_moe"): AnswerForm(
        calls=CallForm(
            open="<tool_call>\n<function=NAME>\n",
            around_value=("<parameter=KEY>\n", "\n</parameter>\n"),
            close="</function>\n</tool_call>",
        )
    ),
    ("gpt_oss",): AnswerForm(
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        answer="<|channel|>final<|message|>",
        calls=CallForm(
            open="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            close="", between=None,
        ),
    ),
    ("deepseek_v2", "deepseek_v3"): AnswerForm(
        calls=CallForm(
            begin="<｜tool▁calls▁begin｜>",
            open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            close="\n```<｜tool▁call▁end｜>",
            end="<｜tool▁calls▁end｜>",
        )
    ),
    ("glm4_moe",): AnswerForm(
        calls=CallForm(
            open="<tool_call>NAME\n",
            around_value=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
            close="</tool_call>",
        )
    ),
    ("mixtral", "mistral"): AnswerForm(
        calls=CallForm(
            begin="[TOOL_CALLS] [", open='{"name": "NAME", "arguments": ', close="}",
            between=", ", end="]",
        )
    ),
}  # fmt: skip


DEEPSEEK_V3_1 = AnswerForm(
    calls=CallForm(
        begin="<｜tool▁calls▁begin｜>",
        open="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        close="<｜tool▁call▁end｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
    )
)


def answer_form_of(model_type: str, chat_template: str) -> AnswerForm | None:
    """None for a kind of model that is not known."""
    form = next((form for kinds, form in ANSWER_FORMS.items() if model_type in kinds), None)
    is_v3_1 = "<｜tool▁sep｜>" in chat_template and "```json" not in chat_template
    return DEEPSEEK_V3_1 if model_type == "deepseek_v3" and is_v3_1 else form


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called."""

    name: str
    schema: dict[str, Any] = field(default_factory=dict)  # of an object of arguments
    param: str = ""  # the field that has the schema


def tools_of(tools: Sequence[dict[str, Any]], parameters: str) -> list[Tool]:
    """The tools of a request; `parameters` is what the client calls a tool's schema.

    Raises BadRequest for what is no function with a name.
    """
    found = []
    for idx, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not re.fullmatch(r"[\w.:/-]{1,128}", name):
            raise BadRequest(
                "a function needs a name of letters, digits, _ or -", param=f"tools.{idx}"
            )
        assert function is not None
        schema = function.get("parameters") or {}
        param = f"tools.{idx}.{parameters}"
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise BadRequest("this must be the JSON schema of an object", param=param)
        found.append(Tool(name, {"type": "object"} | schema, param))
    return found


def example_of(form: CallForm, name: str) -> str:
    """A message that calls a tool without arguments."""
    arguments = "{}" if form.around_value is None else ""
    call = f"{form.open.replace('NAME', name)}{arguments}{form.close}"
    return f"{form.begin}{call}{form.end}"


def calls_in(lark: Lark, form: CallForm, tools: Sequence[Tool], max_calls: int | None) -> str:
    """An expression for one call or more of these tools."""
    options = [
        lark.rule(
            f"{lark.literal(form.open.replace('NAME', tool.name))} "
            f"{_arguments(lark, form, tool)} {lark.literal(form.close)}"
        )
        for tool in tools
    ]
    call = lark.rule(" | ".join(options))
    more = ""
    if form.between is not None and max_calls != 1:
        more = f"({lark.literal(form.between)} {call})*"
    return f"{lark.literal(form.begin)} {call} {more} {lark.literal(form.end)}"


def _arguments(lark: Lark, form: CallForm, tool: Tool) -> str:
    if form.around_value is None:
        return lark.part(json_part(tool.schema, tool.param))
    before, behind = form.around_value
    properties = tool.schema.get("properties", {})
    required = tool.schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise BadRequest("this must be the JSON schema of an object", param=tool.param)
    written = []
    for key, schema in properties.items():
        value = _value(lark, schema, tool)
        one = f"{lark.literal(before.replace('KEY', key))} {value} {lark.literal(behind)}"
        written.append(one if key in required else f"({one})?")
    return " ".join(written)


def _value(lark: Lark, schema: Any, tool: Tool) -> str:
    """An expression for an argument that is written as it is if it is a string, else as JSON."""
    if not isinstance(schema, dict):
        raise BadRequest("a property must have a JSON schema", param=tool.param)
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(options, list) and options and all(isinstance(each, str) for each in options):
        return f"({' | '.join(map(json.dumps, options))})"
    kind = schema.get("type")
    if kind == "string":
        if unknown := {"pattern", "format", "allOf", "anyOf", "oneOf"} & schema.keys():
            message = f"not for strings in calls of this model: {min(unknown)}"
            raise BadRequest(message, param=tool.param)
        fewest = schema.get("minLength", 0)
        most = schema.get("maxLength", "")
        return lark.rule(f"/[^<]{{{fewest},{most}}}/")
    if kind not in ("integer", "number", "boolean", "object", "array", "null"):
        raise BadRequest("calls of this model need one type for each property", param=tool.param)
    definitions = {
        name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema
    }
    return lark.part(json_part(schema | definitions, tool.param))


def message_in(
    lark: Lark, form: AnswerForm | None, options: Sequence[str], *, is_thinking: bool
) -> str:
    """An expression for a message that is one of these, and may begin with reasoning.

    `is_thinking`: the prompt has begun the reasoning.
    """
    message = f"({' | '.join(options)})"
    if is_thinking:
        return f"{lark.until(THINK[1])} {message}"
    if form is not None and form.reasoning is not None:
        begin, end = form.reasoning
        return f"({lark.literal(begin)} {lark.until(end)})? {message}"
    return message
