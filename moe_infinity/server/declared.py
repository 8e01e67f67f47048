"""Functions for models whose chat template shows none: DeepSeek's own, Mixtral's and older ones.

The functions are described at the beginning of the conversation, with the form in which such a
model writes calls; calls of messages before are written in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moe_infinity.server.formats import CallForm

HOW = """\
# Functions

You can call the functions below. Their arguments are described by JSON Schema.

{functions}

If you need one of them, write the call in exactly this form, with its name and arguments, \
and nothing behind it:

{form}

The results come in the next message. If you need none, answer in words."""


def declaration(tools: Sequence[Mapping[str, Any]], form: CallForm) -> dict[str, Any]:
    """Return a system's message that describes these functions."""
    functions = "\n\n".join(_described(tool["function"]) for tool in tools)
    written = text_of_calls(form, [("NAME", {"KEY": "VALUE"})])
    return {"role": "system", "content": HOW.format(functions=functions, form=written)}


def _described(function: Mapping[str, Any]) -> str:
    parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    lines = [f"## {function['name']}", function.get("description"), f"Arguments: {parameters}"]
    return "\n".join(filter(None, lines))


def text_of_calls(form: CallForm, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return a message that calls these functions, by name, with these arguments."""
    texts = [_text_of_call(form, idx, *call) for idx, call in enumerate(calls)]
    return form.begin + (form.between or "").join(texts) + form.end


def _text_of_call(form: CallForm, idx: int, name: str, arguments: Mapping[str, Any]) -> str:
    opening = form.open.replace("NUMBER", str(idx)).replace("NAME", name)
    if form.around_value is None:
        return opening + json.dumps(arguments, ensure_ascii=False) + form.close
    before, behind = form.around_value
    values = []
    for key, value in arguments.items():
        is_plain = isinstance(value, str) and not form.quotes
        text = value if is_plain else json.dumps(value, ensure_ascii=False)
        values.append(before.replace("KEY", key) + text + behind)
    return opening + form.between_values.join(values) + form.close
