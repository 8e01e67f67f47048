"""Fields and parts that clients send to a route which has other words for them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from moe_infinity.server.anthropic_body import MessagesBody
from moe_infinity.server.bodies import read_json
from moe_infinity.server.chat import CalledFunction, ChatBody, Message
from moe_infinity.server.protocol import CompletionBody
from moe_infinity.server.refusals import BadRequest
from moe_infinity.server.responses_body import ResponsesBody

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


def test_a_negative_number_of_tokens_is_any():
    for name in ("max_tokens", "max_completion_tokens"):
        body = ChatBody.model_validate({"messages": SAID, name: -1})
        assert body.max_answer_tokens is None
    response = ResponsesBody.model_validate({"input": "w5", "max_output_tokens": -1})
    assert response.for_chat().max_answer_tokens is None


@pytest.mark.parametrize("arguments", [{}, "", None])
def test_a_call_without_arguments_has_an_object_of_them(arguments):
    function = {"name": "now"} if arguments is None else {"name": "now", "arguments": arguments}
    assert CalledFunction.model_validate(function).as_text == "{}"


def test_a_tool_that_a_search_has_found_is_named():
    found = [{"type": "tool_reference", "tool_name": "fetch"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": found}
    turns = [
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "search"}]},
        {"role": "user", "content": [result]},
    ]
    chat = MessagesBody.model_validate({"messages": turns, "max_tokens": 1}).for_chat()
    assert "fetch" in str(chat.messages[-1].content)


def test_images_in_a_document_are_replaced_by_words():
    image = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    content = [{"type": "text", "text": "a"}, {"type": "image", "source": image}]
    document = {"type": "document", "source": {"type": "content", "content": content}}
    turns = [{"role": "user", "content": [document]}]
    chat = MessagesBody.model_validate({"messages": turns, "max_tokens": 1}).for_chat()
    shown: Any = chat.messages[-1].content
    assert shown[0].text.startswith("a\n[image: left out")


def test_a_long_ngram_is_refused():
    """Each place of a prompt would keep one."""
    with pytest.raises(ValidationError, match="less than or equal to 64"):
        CompletionBody.model_validate({"prompt": "w5", "no_repeat_ngram_size": 65})
