"""Fields and parts that clients send to a route which has other words for them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from moe_infinity.server.bodies import read_json
from moe_infinity.server.chat import ChatBody, Message
from moe_infinity.server.protocol import CompletionBody
from moe_infinity.server.refusals import BadRequest

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
SAID = [{"role": "user", "content": "w5"}]


def test_the_fields_of_extra_body_are_those_of_the_body():
    sent = {"messages": SAID, "top_k": 3, "extra_body": {"top_k": 9, "guided_choice": ["a"]}}
    body = read_json(json.dumps(sent).encode(), ChatBody)
    assert body.top_k == 3
    assert body.structure is not None
    assert body.structure.value == ["a"]


def test_as_many_answers_as_are_wanted_are_chosen_from_themselves():
    for fields in ({"best_of": 2, "n": 2}, {"best_of": 1}, {"best_of": 0}, {"logprobs": False}):
        assert CompletionBody.model_validate({"prompt": "w5"} | fields).num_logprobs is None
    with pytest.raises(BadRequest, match="none is chosen"):
        CompletionBody.model_validate({"prompt": "w5", "best_of": 3, "n": 2})


def test_sglangs_seed_is_one():
    assert CompletionBody.model_validate({"prompt": "w5", "sampling_seed": 7}).seed == 7


def test_redacted_thoughts_are_not_told():
    parts: list[Any] = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]
    message = Message.model_validate({"role": "assistant", "content": parts}).for_template()
    assert message == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "w5"}, {"tools": [{"type": "function", "function": FUNCTION}]}),
        ("completions", {"prompt": "w5"}, {"messages": SAID}),
        ("responses", {"input": "w5"}, {"functions": [FUNCTION]}),
        ("responses", {"input": "w5"}, {"function_call": {"name": "f"}}),
    ],
)
def test_what_another_route_would_do_is_refused_by_name(server, path, body, field):
    (name,) = field
    answer = httpx.post(f"{server.url}/v1/{path}", json=body | field, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
