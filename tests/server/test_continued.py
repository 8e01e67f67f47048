"""A structure that is asked for is that of the whole answer, also where its beginning is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moe_infinity import MoE
from tests.server.serving import Serving, serving

ITEM = {"type": "string", "maxLength": 3}
VALUE = {"anyOf": [ITEM, {"type": "array", "maxItems": 1, "items": ITEM}]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": VALUE},
    "required": ["a"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(demo: MoE) -> Iterator[Serving]:
    with serving(demo, max_batch=8, served_name="demo") as server:
        yield server


def answer_behind(server: Serving, begun: str) -> Any:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
    body = {"messages": said, "response_format": FORM, "max_tokens": 60}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()


@pytest.mark.parametrize("begun", ["{", '{\n   "a": [', '{"a": ["', '{"a":"'])
def test_a_structure_goes_on_behind_the_beginning_of_an_answer(server, begun):
    answer = answer_behind(server, begun)
    assert list(json.loads(begun + answer["choices"][0]["message"]["content"])) == ["a"]


def test_a_beginning_that_does_not_fit_is_refused(server):
    error = answer_behind(server, "Well, ")["error"]
    assert error["param"] == "messages"
    assert "does not fit" in error["message"]
