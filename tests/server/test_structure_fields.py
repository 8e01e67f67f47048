"""The fields for the structure of an answer are those of all routes that generate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moe_infinity import MoE
from tests.server.serving import Serving, serving

ASKED = [{"role": "user", "content": "What is a fever?"}]
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": "A fever is", "max_tokens": 40},
    "/completion": {"prompt": "A fever is", "n_predict": 40},
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 40},
    "/v1/responses": {"input": ASKED, "max_output_tokens": 40},
    "/v1/messages": {"messages": ASKED, "max_tokens": 40},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ill": {"enum": ["yes"]}},
    "required": ["ill"],
    "additionalProperties": False,
}
FIT = '{"ill":"yes"}'
FIELDS: list[Any] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, FIT),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, FIT),
    ({"structured_outputs": {"json": SCHEMA}}, FIT),
    ({"guided_choice": ["yes"]}, "yes"),
    ({"regex": "yes"}, "yes"),
    ({"grammar": 'root ::= "yes"'}, "yes"),
]


@pytest.fixture(scope="module")
def server(demo: MoE) -> Iterator[Serving]:
    with serving(demo, max_batch=8, served_name="demo") as server:
        yield server


def text_in(answer: Any) -> str:
    """The text of an answer of any route."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])
    parts = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return parts if isinstance(parts, str) else str(parts[0]["text"])


@pytest.mark.parametrize(("fields", "text"), FIELDS)
@pytest.mark.parametrize("path", BODIES)
def test_each_route_keeps_the_structure(server, path, fields, text):
    body = BODIES[path] | {"temperature": 0} | fields
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200
    assert text_in(answer.json()).replace(" ", "") == text


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/v1/completions", {"structured_outputs": {"regex": "a"}}),
    ],
)
def test_two_structures_are_refused(server, path, own):
    body = BODIES[path] | own | FIELDS[0][0]
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 400
    assert "give either this or" in answer.json()["error"]["message"]
