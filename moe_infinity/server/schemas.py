"""JSON schemas: the alternatives and types of a value as a whole, and the form for grammars."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

# Types of JSON by what json.loads returns.
TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object",
    list: "array", type(None): "null",
}  # fmt: skip
# Formats that grammars have. Any other says nothing about a value to who does not know it.
FORMATS = (
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
)  # fmt: skip
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by any name
VALUES = ("const", "enum", "default", "example", "examples")  # no schemas
# Keywords that grammars have not, and the values with which each says nothing.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "propertyNames": ({}, True, {"type": "string"}),  # so zod writes a record
    "unevaluatedItems": ({}, True),
    "unevaluatedProperties": ({}, True),
    "uniqueItems": (False,),
}
# The same of keywords without another.
OF_ANOTHER = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
EVALUATING = ("$ref", "allOf", "anyOf", "oneOf", "if")  # may name further properties
MOST_LOOKED_AT = 256  # schemas that a union may lead to; one with more may be anything
MOST_OF_REFERENCE = 1000  # characters; a longer one leads to nothing
MOST_NAMED = 512 << 10  # characters of the properties that are made of a list of names
LOOKS_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")  # which no regular language does


def alternatives_of(
    schema: Any, root: Mapping[str, Any], most: int = MOST_LOOKED_AT
) -> list[dict[str, Any]]:
    """Return the schemas of which a value has to fit one: what references lead to, `anyOf`,
    `oneOf`, an `allOf` of one, and each of several types. `root` has the definitions. With more
    than `most` a value may be anything.
    """
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    waiting = deque([schema])
    num_looked_at = 0
    while waiting:
        if len(found) + len(waiting) > most or num_looked_at > MOST_LOOKED_AT:
            return [{}]
        num_looked_at += 1
        each = waiting.popleft()
        if not isinstance(each, dict):
            found.append({})
        elif isinstance(reference := each.get("$ref"), str):
            if reference not in seen:
                waiting.append(_definition(reference, root))
            seen.add(reference)
        elif options := _options(each):
            waiting.extend(options[: most + 1])
        else:
            kinds = each.get("type")
            if isinstance(kinds, list):
                found += [each | {"type": kind} for kind in kinds[: len(TYPES)]]
            else:
                found.append(each)
            if each.get("nullable") is True:
                found.append({"type": "null"})
    return found if 0 < len(found) <= most else [{}]


def types_of(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Return the types that a value may have; none if it may be anything."""
    kinds: dict[str, None] = {}
    for each in alternatives_of(schema, root):
        values = [each["const"]] if "const" in each else each.get("enum")
        stated = [each["type"]] if isinstance(each.get("type"), str) else []
        if not stated and isinstance(values, list):
            stated = [TYPES[type(value)] for value in values]
        kinds |= dict.fromkeys(stated)
    return list(kinds)


def with_plain_types(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools whose arguments have only types. One that may be a string is no number."""
    plain = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        types = {
            key: types_of(schema, parameters)
            for key, schema in (properties if isinstance(properties, dict) else {}).items()
        }
        known = {
            key: {"type": [kind for kind in kinds if "string" not in kinds or kind == "null"]}
            for key, kinds in types.items()
        }
        plain.append({"function": {"name": function["name"], "parameters": {"properties": known}}})
    return plain


def for_grammar(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema as grammars take it: without formats that they have not, without patterns of
    a format that look around, without keywords that are null, and with a `oneOf` of which no value
    fits two. `root` has the definitions.
    """
    if isinstance(schema, list):
        return [for_grammar(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if _says_nothing(key, value, schema):
            continue
        if key in VALUES:
            made[key] = value
        elif key in NAMED and isinstance(value, dict):
            made[key] = {name: for_grammar(each, root) for name, each in value.items()}
        else:
            made[key] = for_grammar(value, root)
    return _told_apart(_with_names(made), root)


def _says_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword of a schema, or its value, allows what is allowed without it."""
    if value is None and key != "const":
        return True
    if key == "format":
        return value not in FORMATS
    if key == "pattern" and schema.get("format") in FORMATS:  # as zod writes them
        return isinstance(value, str) and LOOKS_AROUND.search(value) is not None
    if key == "if":
        return "then" not in schema and "else" not in schema
    return value in WITHOUT_EFFECT.get(key, ()) or OF_ANOTHER.get(key, key) not in schema


def _with_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose rules for names and for other properties are those that grammars have,
    if they can be.
    """
    made = dict(schema)
    if made.get("unevaluatedProperties") is False and not any(key in made for key in EVALUATING):
        del made["unevaluatedProperties"]
        made.setdefault("additionalProperties", False)
    names = made.get("propertyNames")
    if not isinstance(names, dict) or "properties" in made or "patternProperties" in made:
        return made
    value = made.get("additionalProperties", {})
    match {key: rule for key, rule in names.items() if key != "type"}:
        case {"enum": [*listed], **others} if (
            not others
            and all(isinstance(each, str) for each in listed)
            and len(listed) * len(json.dumps(value)) <= MOST_NAMED
        ):
            made["properties"] = dict.fromkeys(listed, value)
        case {"pattern": str(pattern), **others} if not others:
            made["patternProperties"] = {pattern: value}
        case _:
            return made
    del made["propertyNames"]
    return made | {"additionalProperties": False}


def _told_apart(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose `oneOf` requires the property that tells its alternatives apart, which
    Pydantic does not require, because it has a default.
    """
    options = schema.get("oneOf")
    if not isinstance(options, list) or (name := _different(options, root)) is None:
        return schema
    return schema | {"oneOf": [{"allOf": [each, {"required": [name]}]} for each in options]}


def _different(options: Sequence[Any], root: Mapping[str, Any]) -> str | None:
    """Return the name of a property that is another constant string in each of these schemas."""
    if len(options) > MOST_LOOKED_AT:
        return None
    found = []
    for option in options:
        alternatives = alternatives_of(option, root, most=1)
        properties = alternatives[0].get("properties") if len(alternatives) == 1 else None
        is_short = isinstance(properties, dict) and len(properties) <= MOST_LOOKED_AT
        known = properties.items() if properties is not None and is_short else ()
        values = {name: each.get("const") for name, each in known if isinstance(each, dict)}
        found.append({name: each for name, each in values.items() if isinstance(each, str)})
    names: list[str] = list(found[0]) if found else []
    for name in names:
        if len({each.get(name) for each in found} - {None}) == len(options):
            return name
    return None


def _options(schema: Mapping[str, Any]) -> list[Any]:
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        if isinstance(options, list) and (name != "allOf" or len(options) == 1):
            return options
    return []


def _definition(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference such as #/$defs/city leads to; None if there is nothing."""
    found: Any = root if len(reference) <= MOST_OF_REFERENCE else None
    for name in reference[:MOST_OF_REFERENCE].removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found
