"""Grammars of answers: a schema, a regular expression, a choice, a grammar, or calls of tools.

llguidance compiles them, within its limits. It takes Lark, in which named parts may be JSON schemas
or further Lark.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance.hf
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from moe_infinity.server.refusals import BadRequest

# Without `verbose_errors` a message has no state of the parser.
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# Between the tokens of JSON. Where any is allowed, a weak model may write nothing else.
WHITESPACE = " ?"


@dataclass(frozen=True, slots=True)
class Structure:
    """What a request wants of an answer's text."""

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
    try:
        if structure.kind == "json":
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

    def part(self, part: GrammarPart) -> str:
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
