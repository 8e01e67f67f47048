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
from moe_infinity.server.formats import THINK, AnswerForm, CallForm
from moe_infinity.server.refusals import BadRequest, require_within
from moe_infinity.server.schemas import FORMATS, alternatives_of, for_grammar

# Without `verbose_errors` a message has no state of the parser.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# Between the tokens of JSON. Where any is allowed, a weak model may write nothing else.
WHITESPACE = " ?"


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
    kind = structure.kind
    value = structure.value
    if kind == "choice":
        require_within(limits.CHOICE, len(value), param)
        require_within(limits.CHOICE_CHARACTERS, sum(map(len, value)), param)
    elif kind == "regex":
        require_within(limits.REGEX, len(value), param)
    elif kind == "grammar":
        # Converting GBNF takes time that grows with the square of its length.
        most = limits.GBNF if "::=" in value else limits.GRAMMAR
        require_within(most, len(value), param)
        # llguidance would take Lark for GBNF where its first rule is `?start`.
        kind = "grammar" if "::=" in value else "lark"
    try:
        if kind == "json":
            if isinstance(value, str):
                require_within(limits.SCHEMA, len(value), param)
            schema = json.loads(value) if isinstance(value, str) else value
            return json_part(schema, param)
        if kind == "regex":
            made = json.loads(LLMatcher.grammar_from_regex(value))
            return GrammarPart({"lark_grammar": made["grammars"][0]["lark_grammar"]}, param)
        if kind == "choice":
            value = json.dumps(value)
        return GrammarPart({"lark_grammar": grammar_from(kind, value)}, param)  # type: ignore[arg-type]
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
    require_within(limits.SCHEMA, len(json.dumps(schema)), param)
    # Of a `oneOf` whose alternatives overlap, a value that fits two is let through.
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}}
    return GrammarPart({"json_schema": for_grammar(schema, schema) | options}, param)


class Lark:
    """A grammar in the making: rules, and the parts that they name."""

    def __init__(self, special_ids: dict[str, int]) -> None:
        self.parts: list[GrammarPart] = []
        self._num_characters = 0  # of these
        self._special_ids = special_ids
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """An expression for a text. A special token in it is a token, not its letters.

        A newline that it begins with is apart, because the lexer takes the longest of all texts
        that may come: it would never take a newline alone.
        """
        if text.startswith("\n") and text != "\n":
            return f"{self._piece(text[0])} {self.literal(text[1:])}"
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
        """Return an expression for a part. Raises Refused if all are too long."""
        self._num_characters += len(json.dumps(part.grammar))
        require_within(limits.SCHEMA, self._num_characters, part.param)
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
        if not isinstance(schema, dict) or (schema.get("type") or "object") != "object":
            raise BadRequest("this must be the JSON schema of an object", param=param)
        given = {key: value for key, value in schema.items() if value is not None}
        found.append(Tool(name, {"type": "object"} | given, param))
    return found


def calls_in(lark: Lark, form: CallForm, tools: Sequence[Tool], max_calls: int | None) -> str:
    """An expression for one call or more of these tools."""
    options = [
        lark.rule(
            f"{_opening(lark, form, tool)} {_arguments(lark, form, tool)} "
            f"{lark.literal(form.close)}"
        )
        for tool in tools
    ]
    call = lark.rule(" | ".join(options))
    more = ""
    if form.between is not None and max_calls != 1:
        more = f"({lark.literal(form.between)} {call})*"
    return f"{lark.literal(form.begin)} {call} {more} {lark.literal(form.end)}"


def _opening(lark: Lark, form: CallForm, tool: Tool) -> str:
    parts = [part.replace("NAME", tool.name) for part in form.open.split("NUMBER")]
    return " /[0-9]{1,3}/ ".join(map(lark.literal, parts))


def _arguments(lark: Lark, form: CallForm, tool: Tool) -> str:
    if form.around_value is None:
        return lark.add(json_part(tool.schema, tool.param))
    properties = tool.schema.get("properties", {})
    required = tool.schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise BadRequest("this must be the JSON schema of an object", param=tool.param)
    write = _quoted_argument if form.quotes else _plain_argument
    written = {
        key: lark.rule(write(lark, form.around_value, key, schema, tool))
        for key, schema in properties.items()
    }
    if not form.between_values:
        return " ".join(one if key in required else f"({one})?" for key, one in written.items())
    needed = [one for key, one in written.items() if key in required]
    others = [one for key, one in written.items() if key not in required]
    return _separated(lark.literal(form.between_values), needed, others)


def _separated(between: str, needed: Sequence[str], others: Sequence[str]) -> str:
    """An expression for all that are needed and any of the others, with something between two."""
    rest = [f"({between} {one})?" for one in others]
    if needed:
        return " ".join([f" {between} ".join(needed), *rest])
    begun = [" ".join([one, *rest[at + 1 :]]) for at, one in enumerate(others)]
    return f"({' | '.join(begun)})?" if begun else ""


def _quoted_argument(lark: Lark, around: tuple[str, str], key: str, schema: Any, tool: Tool) -> str:
    """An expression for an argument whose value is JSON."""
    if not re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII):
        message = f"in calls of this model no argument can be called {key!r}"
        raise BadRequest(message, param=tool.param)
    before, behind = around
    value = lark.add(_part_of_tool(schema, tool))
    return f"{lark.literal(before.replace('KEY', key))} {value} {lark.literal(behind)}"


def _plain_argument(lark: Lark, around: tuple[str, str], key: str, schema: Any, tool: Tool) -> str:
    """An expression for an argument that is written as it is if it is a string, else as JSON."""
    before, behind = around
    end = lark.literal(behind)
    alternatives = alternatives_of(schema, tool.schema)
    found = []
    for each in alternatives:
        values = [each["const"]] if "const" in each else each.get("enum")
        if isinstance(values, list) and values:
            texts = [one if isinstance(one, str) else json.dumps(one) for one in values]
            found.append(f"({' | '.join(map(json.dumps, texts))}) {end}")
        elif each.get("type", "string") == "string":
            found.append(_string(lark, behind, each, tool))
        else:
            found.append(f"{lark.add(_part_of_tool(each, tool))} {end}")
    return f"{lark.literal(before.replace('KEY', key))} ({' | '.join(found)})"


def _string(lark: Lark, behind: str, schema: dict[str, Any], tool: Tool) -> str:
    """An expression for a string without quotes, and what is behind it."""
    unknown = {"pattern", "not"} & schema.keys()
    if schema.get("format") in FORMATS:  # neither is checked here
        unknown.discard("pattern")
    if unknown:
        message = f"not for strings in calls of this model: {min(unknown)}"
        raise BadRequest(message, param=tool.param)
    if not {"minLength", "maxLength"} & schema.keys():
        mark = behind.strip("\n")
        return f"{lark.until(mark)} {lark.literal(behind[behind.index(mark) + len(mark) :])}"
    fewest = schema.get("minLength", 0)
    most = schema.get("maxLength", "")
    return f"{lark.rule(f'/[^<]{{{fewest},{most}}}/')} {lark.literal(behind)}"


def _part_of_tool(schema: Any, tool: Tool) -> GrammarPart:
    """JSON that a part of a tool's schema allows."""
    names = tool.schema.keys() & {"$defs", "definitions"}
    definitions = {name: tool.schema[name] for name in names}
    return json_part(schema | definitions if isinstance(schema, dict) else {}, tool.param)


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
