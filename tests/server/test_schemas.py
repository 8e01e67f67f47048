"""JSON schemas as libraries write them, in the form that grammars take."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field

from moe_infinity.server.grammars import json_part, tools_of


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str | None = None


class Owner(BaseModel):
    pets: list[Cat | Dog] = Field(min_length=1)
    pet: Cat | Dog = Field(discriminator="kind")


def takes(schema: Any, text: str) -> bool:
    """Return whether the grammar of a schema takes a whole text. Asserts that it is a grammar."""
    grammar = json.dumps({"grammars": [json_part(schema, "x").grammar]})
    assert LLMatcher.validate_grammar(grammar) == ""
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


@pytest.mark.parametrize("has_discriminator", [True, False])
def test_alternatives_of_pydantic_are_told_apart(has_discriminator):
    """pydantic-ai leaves the `discriminator` out."""
    schema = Owner.model_json_schema()
    assert "oneOf" in schema["properties"]["pet"]
    if not has_discriminator:
        del schema["properties"]["pet"]["discriminator"]
    assert takes(schema, '{"pets": [{}], "pet": {"kind": "dog"}}')
    assert takes(schema, '{"pets": [{}], "pet": {"kind": "cat", "lives": 2}}')
    assert not takes(schema, '{"pets": [{}], "pet": {"lives": 2}}')


@pytest.mark.parametrize("name", ["path", "password", "binary", "byte", "cuid", "regex"])
def test_a_format_that_grammars_have_not_says_nothing(name):
    schema = {"type": "array", "items": {"anyOf": [{"type": "string", "format": name}]}}
    assert takes(schema, '["any"]')


def test_a_format_that_they_have_is_kept():
    schema = {"type": "string", "format": "date"}
    assert takes(schema, '"2026-01-01"')
    assert not takes(schema, '"any"')


def test_values_and_names_are_no_keywords():
    schema = {
        "type": "object",
        "properties": {"format": {"const": {"format": "path"}}, "enum": {"enum": [None]}},
        "required": ["format", "enum"],
        "additionalProperties": False,
    }
    assert takes(schema, '{"format": {"format": "path"}, "enum": null}')
    assert not takes(schema, '{"format": {}, "enum": null}')


def test_keywords_that_are_null_are_as_absent():
    """So clients in Go and C# write a function without arguments."""
    text = {"type": "string", "enum": None, "description": None}
    schema = {"type": "object", "required": None, "properties": {"a": text}, "$defs": None}
    assert takes(schema, '{"a": "b"}')
    parameters = {"type": None, "properties": None, "required": None}
    (tool,) = tools_of([{"function": {"name": "f", "parameters": parameters}}], "parameters")
    assert tool.schema == {"type": "object"}


@pytest.mark.parametrize(
    "more",
    [
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"unevaluatedProperties": True, "unevaluatedItems": {}},
        {"dependentRequired": {}, "dependencies": {}},
        {"if": {"required": ["b"]}},
        {"then": False, "minContains": 3},
        {"not": False},
    ],
    ids=str,
)
def test_keywords_that_allow_all_say_nothing(more):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, **more}
    assert takes(schema, '{"a": "b"}')
    assert not takes(schema, '{"a": 1}')


def test_names_that_are_listed_or_match_a_pattern_are_the_only_ones():
    """So Pydantic and zod write a dictionary whose keys are limited."""
    number = {"type": "object", "additionalProperties": {"type": "integer"}}
    listed = number | {"propertyNames": {"type": "string", "enum": ["a", "b"]}}
    matching = number | {"propertyNames": {"pattern": "^[ab]$"}}
    for schema in (listed, matching):
        assert takes(schema, '{"a": 1, "b": 2}')
        assert not takes(schema, '{"a": "b"}')
        assert not takes(schema, '{"c": 1}')


def test_properties_that_nothing_evaluates_are_other_properties():
    schema = {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}
    assert takes(schema, '{"a": 1}')
    assert not takes(schema, '{"b": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"enum": ["a"]}},
        {"anyOf": [{"type": "object"}], "unevaluatedProperties": False},
    ],
    ids=str,
)
def test_what_would_change_the_meaning_is_still_refused(schema):
    grammar = json.dumps({"grammars": [json_part(schema, "x").grammar]})
    assert "Unimplemented" in LLMatcher.validate_grammar(grammar)


def test_alternatives_that_overlap_are_any_of_them():
    """As in llama.cpp."""
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert takes(schema, "1")
    assert takes(schema, "1.5")
    assert not takes(schema, '"1"')
