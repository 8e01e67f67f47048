"""Response templates of transformers, as answers here are read by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers.utils.chat_parsing.response_templates import load_response_template

from moe_infinity.server.formats import THINK, Family

THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # names of the field
FROM_FIRST = r"(?:\G|(?<!\s))"  # where a scan begins, or behind what is no space


def loaded(spec: dict[str, Any] | None, ends_thought: str = "") -> Any:
    """Return a response template by which `<think>` begins a thought only where a message begins:
    elsewhere it is text, as in an answer about thoughts. `ends_thought`: a pattern of what ends one
    beside `</think>`.
    """
    if spec is None:
        return None
    fields = dict(spec["fields"])
    for name, own in fields.items():
        has_marks = (own.get("open"), own.get("close")) == THINK
        if name in THOUGHTS and has_marks and not own.get("repeats"):
            others = {key: value for key, value in own.items() if key not in ("open", "close")}
            end = THINK[1] + (f"|(?={ends_thought})" if ends_thought else "")
            begin = rf"\A\s*{THINK[0]}"
            fields[name] = others | {"open_pattern": begin, "close_pattern": end}
    return load_response_template(spec | {"fields": fields})


def quick_to_scan(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response template whose patterns look at spaces in front of them from
    the first one only: from each, a long run would be looked through as often as it has spaces.
    """
    return {
        name: {
            key: FROM_FIRST + value
            if key.endswith("_pattern") and str(value).startswith(r"\s*")
            else value
            for key, value in field.items()
        }
        for name, field in fields.items()
    }


def without_calls(spec: dict[str, Any] | None, family: Family | None) -> dict[str, Any] | None:
    """Return a response template by which calls are content. Where content has marks around it, it
    stays as it is: what is outside of them is lost.
    """
    fields = {} if spec is None else spec["fields"]
    others = {name: field for name, field in fields.items() if name != "tool_calls"}
    content = others.get("content", {})
    if spec is None or not others or is_marked(content):
        return spec
    end = "" if family is None else family.written.calls.end.strip()
    is_end_of_calls = bool(end) and end in str([content.get("close"), content.get("close_pattern")])
    if is_end_of_calls:
        kept = {key: content[key] for key in content.keys() - {"close", "close_pattern"}}
        others["content"] = kept
    return spec | {"fields": others}


def is_marked(field: Mapping[str, Any]) -> bool:
    """Return True for a field of a response template that marks begin, and not any text."""
    return not {"open", "open_pattern"}.isdisjoint(field)


def known_in(spec: dict[str, Any] | None) -> str:
    """Return the text of a response template's fields, also of what is in expressions."""
    fields = {} if spec is None else spec["fields"]
    return json.dumps(fields, ensure_ascii=False).replace("\\", "")
