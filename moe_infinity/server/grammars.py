"""Grammars of answers: a schema, a regular expression, a choice, a grammar, or calls of tools.

llguidance compiles them, within its limits. It takes Lark, in which named parts may be JSON schemas
or further Lark. The forms of calls and of constrained answers are those that `messages` reads.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import llguidance.hf
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from moe_infinity.server import limits
from moe_infinity.server.refusals import BadRequest, require_within

# Without `verbose_errors` a message has no state of the parser.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# Between the tokens of JSON. Where any is allowed, a weak model may write nothing else.
WHITESPACE = " ?"
THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure that a request asks of an answer's text."""

    kind: str  # json, regex, choice or grammar
    value: Any
    param: str  # the field that says so


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A part of a grammar, as llguidance takes it."""

    grammar: dict[str, Any]
    param: str  # the field that it came from


def part_of(structure: Structure, param: str) -> GrammarPart:
    """The grammar of a structure. Raises BadRequest for what is neither JSON nor a grammar."""
    value = structure.value
    if structure.kind == "choice":
        require_within(limits.CHOICE, len(value), param)
        require_within(limits.CHOICE_CHARACTERS, sum(map(len, value)), param)
    elif structure.kind == "regex":
        require_within(limits.REGEX, len(value), param)
    elif structure.kind == "grammar":
        # Converting GBNF takes time that grows with the square of its length.
        most = limits.GBNF if "::=" in value else limits.GRAMMAR
        require_within(most, len(value), param)
    try:
        if structure.kind == "json":
            if isinstance(value, str):
                require_within(limits.SCHEMA, len(value), param)
            schema = json.loads(value) if isinstance(value, str) else value
            return json_part(schema, param)
        if structure.kind == "regex":
            made = json.loads(LLMatcher.grammar_from_regex(value))
            return GrammarPart({"lark_grammar": made["grammars"][0]["lark_grammar"]}, param)
        if structure.kind == "choice":
            value = json.dumps(value)
        return GrammarPart({"lark_grammar": grammar_from(structure.kind, value)}, param)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise BadRequest(str(error), param=param) from error


def require_begun(matcher: LLMatcher, text: str, ids: Sequence[int], param: str) -> None:
    """Let a grammar take the beginning of an answer. Raises BadRequest if it does not."""
    if matcher.validate_tokens(list(ids)) < len(ids) or not matcher.consume_tokens(list(ids)):
        message = f"the answer's beginning does not fit the structure that is asked for: {text!r}"
        raise BadRequest(message, param=param)


def tight(text: str) -> str:
    """JSON, or its beginning, with the spaces that the grammars here allow."""
    return re.sub(r'("(?:[^"\\]|\\.)*"?)|\s+', lambda found: found[1] or " ", text, flags=re.DOTALL)


def json_part(schema: Any, param: str) -> GrammarPart:
    """JSON that a schema allows. Raises BadRequest for a schema that is no object."""
    if not isinstance(schema, dict):
        raise BadRequest("a JSON schema must be an object", param=param)
    return GrammarPart(
        {"json_schema": schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}}, param
    )


class Lark:
    """A grammar in the making: rules, and the parts that they name."""

    def __init__(self, special_ids: dict[str, int]) -> None:
        self.parts: list[GrammarPart] = []
        self._special_ids = special_ids
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """An expression for a text. A special token in it is a token, not its letters."""
        return " ".join(map(self._piece, self._pieces(text)))

    def until(self, end: str) -> str:
        """An expression for any text up to and with `end`."""
        anything = r"/(.|\n)*/"
        first, *rest = self._pieces(end)
        if first in self._special_ids:
            return f"{self.rule(anything)} {self.literal(end)}"
        lazy = self.rule(f"{anything} {self._piece(first)}", attribute="[lazy]")
        return f"{lazy} {self.literal(''.join(rest))}"

    def add(self, part: GrammarPart) -> str:
        self.parts.append(part)
        return f"@part_{len(self.parts) - 1}"

    def rule(self, expression: str, *, attribute: str = "") -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {expression}")
        return name

    def source(self, start: str) -> str:
        """All of it, for llguidance."""
        lark = "\n".join([f"start: {start}", *self._rules])
        named = [{**part.grammar, "name": f"part_{idx}"} for idx, part in enumerate(self.parts)]
        return json.dumps({"grammars": [{"name": "message", "lark_grammar": lark}, *named]})

    def _pieces(self, text: str) -> list[str]:
        """Special tokens, and what is between them."""
        if not self._special_ids:
            return [text] if text else []
        special = "|".join(map(re.escape, self._special_ids))
        return [piece for piece in re.split(f"({special})", text) if piece]

    def _piece(self, piece: str) -> str:
        token_id = self._special_ids.get(piece)
        return json.dumps(piece) if token_id is None else f"<[{token_id}]>"


class GrammarCompiler:
    """Compiles grammars for one model. Its vocabulary is prepared once, for the first of them.

    Safe to call from several threads.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._end_ids = list(end_ids)
        self._lock = threading.Lock()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return llguidance.hf.from_tokenizer(
            self._tokenizer, n_vocab=self._vocab_size, eos_token=self._end_ids or None
        )

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        """Ids of the tokens whose letters are not text."""
        return {
            str(token): token_id
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if self._vocabulary.is_special_token(token_id)
        }

    def lark(self, param: str) -> Lark:
        """An empty grammar. Raises BadRequest, which names `param`, for a vocabulary that
        llguidance does not take.
        """
        try:
            with self._lock:
                return Lark(self._special_ids)
        except ValueError as error:
            message = f"this model's tokenizer cannot be constrained: {error}"
            raise BadRequest(message, param=param) from error

    def compiled(self, lark: Lark, start: str, param: str) -> LLMatcher:
        """A grammar at its beginning. Raises BadRequest, which names the part that llguidance does
        not take, or else `param`.
        """
        try:
            source = lark.source(start)
        except RecursionError as error:
            raise BadRequest("this is nested too deeply", param=param) from error
        require_within(limits.SCHEMA, len(source), param)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # here rather than in the engine's thread, in which all wait
        if matcher.is_error():
            self._refuse_part(lark.parts)
            raise BadRequest(matcher.get_error().strip(), param=param)
        return matcher

    def _refuse_part(self, parts: Sequence[GrammarPart]) -> None:
        for part in parts:
            source = json.dumps({"grammars": [part.grammar]})
            is_wrong, messages = LLMatcher.validate_grammar_with_warnings(
                source, self._vocabulary, limits=LIMITS
            )
            if is_wrong:
                raise BadRequest(messages[0].strip(), param=part.param)


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
        return lark.add(json_part(tool.schema, tool.param))
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
    return lark.add(json_part(schema | definitions, tool.param))


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
