"""JSON schemas as libraries write them, in the form that grammars take."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field

from moe_infinity.server import grammars, limits
from moe_infinity.server.grammars import json_part, tools_of
from moe_infinity.server.refusals import Refused
from moe_infinity.server.schemas import alternatives_of, for_grammar, types_of


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


def test_a_value_with_very_many_alternatives_may_be_anything():
    few: dict[str, Any] = {"anyOf": [{"type": "string"}] * 200}
    many: dict[str, Any] = {"anyOf": [{"type": "string"}] * 300}
    apart = {"anyOf": [{"$ref": f"#/$defs/{at}"} for at in range(20)]}
    nested = apart | {"$defs": {str(at): {"anyOf": [{"type": "null"}] * 20} for at in range(20)}}
    assert (len(alternatives_of(few, few)), types_of(few, few)) == (200, ["string"])
    for schema in (many, nested):
        assert (alternatives_of(schema, schema), types_of(schema, schema)) == ([{}], [])


@pytest.mark.parametrize("is_one", [True, False])
def test_many_alternatives_that_lead_to_a_long_union_are_read_in_time(is_one):
    """The whole union was read for each of them."""
    city = {"$ref": "#/$defs/city"}
    options = {"oneOf": [city] * 3_000} if is_one else {"anyOf": [{"oneOf": [city]}] * 3_000}
    began_s = time.thread_time()
    json_part(options | {"$defs": {"city": {"anyOf": [{"type": "null"}] * 3_000}}}, "x")
    assert time.thread_time() - began_s < 1


def test_a_schema_that_is_too_long_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(grammars, "for_grammar", lambda *given: pytest.fail("it is read"))
    with pytest.raises(Refused) as caught:
        json_part({"const": "a" * limits.SCHEMA.most}, "x")
    assert (caught.value.error.code, caught.value.error.param) == ("too_large", "x")


# What zod 4 writes for z.email().
EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)


def test_a_pattern_that_looks_around_is_left_to_its_format():
    """As zod writes them, beside each other."""
    schema = {"type": "string", "format": "email", "pattern": EMAIL}
    assert takes(schema, '"a.b@example.com"')
    assert not takes(schema, '"example.com"')


@pytest.mark.parametrize("more", [{}, {"format": "path"}])
def test_a_pattern_that_looks_around_is_refused_without_a_format_that_is_known(more):
    schema = {"type": "string", "pattern": EMAIL} | more
    grammar = json.dumps({"grammars": [json_part(schema, "x").grammar]})
    assert LLMatcher.validate_grammar(grammar)


def test_any_other_pattern_counts_beside_a_format():
    schema = {"type": "string", "format": "date", "pattern": "^2026-"}
    assert takes(schema, '"2026-01-01"')
    assert not takes(schema, '"2025-01-01"')
    schema = {"type": "string", "format": "time", "pattern": r"^\(?=x\)$"}  # a bracket, perhaps
    assert for_grammar(schema, schema) == schema


def test_a_schema_of_many_types_or_properties_is_read_in_time_and_memory():
    number = {f"key{at}": 1 for at in range(2_000)}
    kinds = {"type": ["string"] * 2_000, **number}
    assert alternatives_of(kinds, {}, most=1) == [{}]
    assert len(alternatives_of(kinds, {})) <= 7
    many = {"properties": {f"key{at}": {"const": "a"} for at in range(5_000)}}
    schema = {"$defs": {"a": many}, "oneOf": [{"$ref": "#/$defs/a"}] * 5_000}
    began_s = time.thread_time()
    for_grammar(schema, schema)
    assert time.thread_time() - began_s < 1


def test_a_pattern_that_is_null_beside_a_format_is_absent():
    assert takes({"type": "string", "format": "date", "pattern": None}, '"2026-01-01"')


def test_references_that_lead_to_a_long_union_or_are_long_are_read_in_time():
    union = {"anyOf": [{"const": number} for number in range(250)]}
    options = [{"$ref": "#/$defs/union"}, {"$ref": "x/" * 20_000}]
    schema = {"$defs": {"union": union}, "oneOf": options * 2_000}
    began_s = time.thread_time()
    for_grammar(schema, schema)
    assert time.thread_time() - began_s < 1


def test_names_whose_schema_would_be_repeated_too_often_are_left_to_the_grammar():
    names = {"enum": [f"name{number}" for number in range(1_000)]}
    schema = {"propertyNames": names, "additionalProperties": {"const": "x" * 600}}
    assert for_grammar(schema, schema) == schema
    schema["additionalProperties"] = {"const": "x"}
    assert len(for_grammar(schema, schema)["properties"]) == 1_000
