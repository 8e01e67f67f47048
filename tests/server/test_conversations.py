"""Conversations of three APIs become messages of one form, and their wishes those of a chat."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from moe_infinity.server.anthropic_body import MessagesBody
from moe_infinity.server.chat import ChatBody
from moe_infinity.server.ollama_body import OllamaChatBody
from moe_infinity.server.refusals import BadRequest
from moe_infinity.server.responses_body import ResponsesBody
from moe_infinity.server.shapes import Forms, shaped

SAID: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


def chat_messages(body: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in body.for_chat().messages]


def test_the_items_of_one_answer_become_one_message():
    output = {"type": "input_text", "text": "1"}
    refusal = {"type": "refusal", "refusal": "No"}
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "ls"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": [output]},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "2"},
        {"role": "assistant", "content": [refusal], "phase": "final_answer"},
    ]
    user, answer, *results, last = chat_messages(ResponsesBody.model_validate({"input": items}))
    assert (user["content"], answer["content"], answer["reasoning_content"]) == ("hi", "I", "Hm")
    names = [call["function"]["name"] for call in answer["tool_calls"]]
    arguments = [call["function"]["arguments"] for call in answer["tool_calls"]]
    assert (names, arguments) == (["f", "g"], ["{}", '{"input": "ls"}'])
    assert [(each["tool_call_id"], each["content"]) for each in results] == [("a", "1"), ("b", "2")]
    assert (last["role"], last["content"]) == ("assistant", "No")


def test_blocks_of_text_are_read_and_others_left_out():
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}
    found: dict[str, Any] = {"type": "search_result", "title": "S", "source": "U"}
    found |= {"content": [{"type": "text", "text": "C"}]}
    said = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "text", "text": "A", "citations": [{"type": "char_location"}]},
    ]
    turns = [
        {"role": "user", "content": [document, found]},
        {"role": "system", "content": "Late"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "more"},
    ]
    body = MessagesBody.model_validate({"messages": turns, "max_tokens": 1})
    contents = [(each["role"], each["content"]) for each in chat_messages(body)]
    assert contents == [
        ("user", "T\nD\nS\nU\nC"),
        ("system", "Late"),
        ("assistant", "A"),
        ("user", "more"),
    ]


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:,", "detail": "auto"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "document", "source": BLOCK["source"]}


def of_user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


ANSWER = {"role": "assistant", "content": "A"}
NEXT = {"role": "user", "content": "more"}
BODIES_WITH_IMAGES: list[tuple[Any, str, Any, str]] = [
    (ChatBody, "messages", of_user(IMAGE), "v1/chat/completions"),
    (ResponsesBody, "input", of_user(INPUT_IMAGE), "v1/responses"),
    (MessagesBody, "messages", of_user(BLOCK), "v1/messages"),
    (
        OllamaChatBody,
        "messages",
        {"role": "user", "content": "look", "images": ["aGk="]},
        "api/chat",
    ),
]


def chat_of(kind: Any, fields: dict[str, Any]) -> ChatBody:
    body = kind.model_validate(fields | ({"max_tokens": 1} if kind is MessagesBody else {}))
    return body if kind is ChatBody else body.for_chat()


@pytest.mark.parametrize(("kind", "name", "seen", "path"), BODIES_WITH_IMAGES)
def test_without_eyes_a_conversation_that_had_an_image_goes_on_and_a_new_one_is_refused(
    kind, name, seen, path, server
):
    first, *_ = chat_of(kind, {name: [seen, ANSWER, NEXT]}).messages
    assert "left out" in first.for_template()["content"]
    for turns, status in (([seen, ANSWER, NEXT], 200), ([seen], 400), ([NEXT, ANSWER, seen], 400)):
        body = {name: turns, "max_tokens": 1}
        if kind is ResponsesBody:
            body = {name: turns, "max_output_tokens": 1}
        answer = httpx.post(f"{server.url}/{path}", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        assert status == 200 or f"{name}: this model reads text only" in answer.text


def test_a_pdf_in_what_is_asked_last_is_refused():
    first, *_ = chat_of(MessagesBody, {"messages": [of_user(PDF), ANSWER, NEXT]}).messages
    assert "left out" in first.for_template()["content"]
    with pytest.raises(BadRequest, match="text only"):
        chat_of(MessagesBody, {"messages": [of_user(PDF)]})


def test_a_tool_may_give_an_image():
    result = {"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    turns = [NEXT, {"role": "assistant", "content": [use]}, of_user(result)]
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}
    for body in (
        chat_of(MessagesBody, {"messages": turns}),
        chat_of(ResponsesBody, {"input": [NEXT, called, output]}),
    ):
        last = body.messages[-1].for_template()
        assert last["role"] == "tool"
        assert "left out" in last["content"]


def test_a_file_beside_the_result_of_a_tool_is_left_out():
    """As Claude Code gives one that was read: no later request of the session was answered."""
    use = {"type": "tool_use", "id": "c", "name": "Read", "input": {"file_path": "a.pdf"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "PDF file read"}
    turns = [NEXT, {"role": "assistant", "content": [use]}, of_user(result, PDF), NEXT]
    for said in (turns[:-1], turns):
        _, _, tool, beside, *_ = chat_of(MessagesBody, {"messages": said}).messages
        assert tool.for_template()["content"] == "PDF file read"
        assert "left out" in beside.for_template()["content"]


def test_messages_between_agents_are_a_users():
    task = [
        {"type": "input_text", "text": "NEW_TASK: "},
        {"type": "encrypted_content", "encrypted_content": "Count the lines of a.py"},
    ]
    items = [
        {"type": "agent_message", "id": "m", "author": "/root", "recipient": "/b", "content": task},
        {"type": "agent_message", "content": [{"encrypted_content": "gAAAAABm"}]},
        {"type": "agent_message", "content": None},
    ]
    (only,) = chat_messages(ResponsesBody.model_validate({"input": items}))
    assert (only["role"], only["content"]) == ("user", "NEW_TASK: Count the lines of a.py")


def test_output_config_is_a_schema_and_an_effort():
    fields = {"messages": SAID, "max_tokens": 1, "thinking": {"type": "adaptive"}}
    structure = {"type": "json_schema", "schema": SCHEMA}
    for config in (
        {"output_config": {"effort": "max", "format": structure}},
        {"output_config": {"effort": "max"}, "output_format": structure},
    ):
        chat = MessagesBody.model_validate(fields | config).for_chat()
        assert chat.structure is not None
        assert (chat.structure.value, chat.reasoning_effort) == (SCHEMA, "max")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"json_schema": SCHEMA}, SCHEMA),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"grammar": 'root ::= "a"'}, 'root ::= "a"'),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}, 'root ::= "a"'),
        (
            {
                "response_format": {"type": "json_object"},
                "tools": [TOOL],
                "tool_choice": "required",
            },
            None,
        ),
        ({"function_call": {"name": "f"}, "functions": [FUNCTION]}, None),
    ],
)
def test_a_structure_may_be_asked_for_in_many_words_and_a_required_call_wins(fields, kind):
    body = ChatBody.model_validate({"messages": SAID} | fields)
    assert (None if body.structure is None else body.structure.value) == kind
    assert body.must_call == (kind is None)


def test_earlier_calls_may_be_a_function_call_or_an_object():
    turns = [
        *SAID,
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"é": 1}}}]},
    ]
    messages = ChatBody.model_validate({"messages": turns}).messages
    _, called, result, last = (message.for_template() for message in messages)
    assert called["tool_calls"][0]["id"] == result["tool_call_id"]
    assert result["role"] == "tool"
    assert last["tool_calls"][0]["function"]["arguments"] == '{"é": 1}'


@pytest.mark.parametrize("listed", [["f"], [{"function": "f"}], [{"name": 1}], "f"])
def test_allowed_tools_that_are_none_are_refused(listed):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": listed}}
    with pytest.raises(ValidationError):
        ChatBody.model_validate({"messages": SAID, "tools": [TOOL], "tool_choice": choice})


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (["a", {"type": "text", "text": "b"}], "a\nb"),
        ([{"text": "a"}], "a"),
        ([{"type": "reasoning", "text": "Hm"}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "reasoning", "summary": []}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "frob", "x": 1}], "a\n[frob: left out"),
    ],
)
def test_parts_of_other_libraries_are_read(parts, text):
    answer = {"role": "assistant", "content": parts}
    said = ChatBody.model_validate({"messages": [*SAID, answer, *SAID]}).messages[1]
    assert said.for_template()["content"].startswith(text)
    has_reasoning = "text" in parts[0] and "reasoning" in parts[0].values()
    assert said.for_template().get("reasoning_content") == ("Hm" if has_reasoning else None)


def test_a_part_of_an_unknown_type_that_is_asked_about_is_refused():
    asked = [{"role": "user", "content": [{"type": "frob"}]}]
    with pytest.raises(BadRequest, match="text only, not a part of type 'frob'"):
        ChatBody.model_validate({"messages": asked})


@pytest.mark.parametrize(
    "tool",
    [TOOL, {"type": "function"} | FUNCTION, {"name": "f", "input_schema": SCHEMA}],
)
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "name": "f"},
        {"type": "tool", "name": "f"},
    ],
)
def test_tools_may_come_in_the_words_of_another_api(tool, choice):
    fields = {"messages": SAID, "tools": [tool, {"type": "web_search", "name": "w"}]}
    body = ChatBody.model_validate(fields | {"tool_choice": choice})
    assert body.template_tools == [TOOL]
    assert body.called_name == "f"
    for kind, must_call in (("auto", False), ("none", False), ("any", True), ("required", True)):
        body = ChatBody.model_validate(fields | {"tool_choice": {"type": kind}})
        assert body.must_call == must_call
        assert (body.template_tools is None) == (kind == "none")


def test_results_are_put_into_the_order_of_their_calls():
    """Many templates write no ids: a model would take one result for the other."""
    names = ("a", "b", "c")
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in names]
    results = [{"role": "tool", "tool_call_id": n, "content": n} for n in ("c", "x", "a", "b", "y")]
    said: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    said += [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    said += [{"role": "user", "content": "more"}, {"role": "tool", "content": "z"}]
    found = [each["content"] for each in shaped(said, Forms())]
    assert found == ["hi", "", "a", "b", "c", "x", "y", "more", "z"]
