"""/v1/responses as the `openai` client sees it, over a real socket."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.server.driving import generated, words
from tests.server.serving import serving

pytestmark = pytest.mark.arithmetic

PROMPT = "w5 w6 w9 w100 w31"
PROMPT_IDS = [5, 6, 9, 100, 31]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
BEGINNING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
END = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def expected(moe) -> list[int]:
    return generated(moe, [*PROMPT_IDS, 77])


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def ask(client, content: Any = PROMPT, **more: Any) -> Any:
    return client.responses.create(input=content, **(GREEDY | more))


def test_an_answer_is_the_chat_answer_in_other_words(client, ended):
    answer = ask(client, metadata={"a": "b"}, store=False, user="u")
    Response.model_validate(answer.to_dict())
    assert (answer.object, answer.model, answer.status) == ("response", "tiny", "completed")
    assert answer.output_text == ended
    assert (answer.output[0].role, answer.output[0].status) == ("assistant", "completed")
    assert (answer.error, answer.incomplete_details) == (None, None)
    assert (answer.metadata, answer.store, answer.user) == ({"a": "b"}, False, "u")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0, 1, 12)
    usage = answer.usage
    num_tokens = len(ended.split()) + 1  # the end token counts
    assert (usage.input_tokens, usage.output_tokens) == (6, num_tokens)
    assert usage.total_tokens == 6 + num_tokens
    assert answer.id.startswith("resp_")
    assert answer.created_at > 1e9


def test_an_answer_cut_by_length_is_incomplete(client, expected):
    answer = ask(client, max_output_tokens=3)
    Response.model_validate(answer.to_dict())
    assert (answer.output_text, answer.status) == (words(expected[:3]), "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    last = list(ask(client, max_output_tokens=3, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == words(expected[:3])


def test_a_stream_is_the_documented_events_in_order(client, ended):
    events = list(ask(client, stream=True, include=["message.output_text.logprobs"]))
    kinds = [event.type for event in events]
    deltas = ["response.output_text.delta"] * (len(events) - 8)
    assert kinds == [*BEGINNING, *deltas, *END, "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.to_dict())
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == ended
    text, part, item, completed = events[-4:]
    response = completed.response
    assert text.text == part.part.text == item.item.content[0].text == response.output_text == ended
    assert len(text.logprobs) == len(ended.split())
    assert len({event.response.id for event in (*events[:2], completed)}) == 1
    assert len({item.item.id, events[2].item.id, text.item_id, response.output[0].id}) == 1
    assert (events[0].response.usage, response.usage.input_tokens) == (None, 6)


def test_the_clients_own_stream_helper_puts_it_together(client, ended):
    with client.responses.stream(input=PROMPT, **GREEDY) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == ended
    assert final.status == "completed"


def test_on_the_wire_an_event_has_its_name_and_nothing_comes_after_the_last(server):
    body = GREEDY | {"input": PROMPT, "max_output_tokens": 2, "stream": True}
    raw = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).text
    events = raw.removesuffix("\n\n").split("\n\n")
    assert events[0].startswith('event: response.created\ndata: {"type": "response.created"')
    assert events[-1].startswith("event: response.incomplete\n")


def test_instructions_come_first(client, moe):
    answer = ask(client, instructions="w8")
    assert answer.output_text == words(generated(moe, [8, *PROMPT_IDS, 77]))
    assert (answer.instructions, answer.usage.input_tokens) == ("w8", 7)


def test_a_conversation_is_a_list_and_an_answer_may_come_back_in_it(client, moe):
    first = ask(client, [{"role": "user", "content": PROMPT}], max_output_tokens=2)
    parts = [{"type": "input_text", "text": "w7 w11"}]
    turns = [
        {"role": "developer", "content": "w8"},
        {"role": "user", "content": PROMPT, "type": "message"},
        *first.output,
        {"role": "user", "content": parts},
    ]
    said = [int(word[1:]) for word in first.output_text.split()]
    ids = [8, *PROMPT_IDS, *said, 7, 11, 77]
    assert ask(client, turns).output_text == words(generated(moe, ids))
    dumped = [item.model_dump() for item in first.output]
    assert ask(client, [*turns[:2], *dumped, turns[-1]]).usage.input_tokens == len(ids)


def test_logprobs_are_told_when_asked_for(client):
    answer = ask(client, top_logprobs=2)
    Response.model_validate(answer.to_dict())
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == 12
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries)
    assert ask(client).output[0].content[0].logprobs == []


def test_tools_reach_the_template_unless_the_choice_is_none(client):
    tool = {"type": "function", "name": "w88", "parameters": {}}
    answer = ask(client, tools=[tool])
    Response.model_validate(answer.to_dict())
    assert (answer.usage.input_tokens, answer.tools[0].name) == (7, "w88")
    assert ask(client, tools=[tool], tool_choice="none").usage.input_tokens == 6


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [IMAGE]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input"),
        ({"input": [{"role": "tool", "content": "w5"}]}, "input"),
        ({"input": "w5 " * 600}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"background": True}, "background"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server, change, param):
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": PROMPT} | change, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert param in error["message"]


def test_a_wrong_key_and_another_model_are_refused(moe, server, client):
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        ask(client, model="gpt-5")
    with serving(moe, api_key=["right"]) as locked:
        with pytest.raises(openai.AuthenticationError):
            ask(locked.client(api_key="wrong"))
        assert ask(locked.client(api_key="right")).status == "incomplete"


def test_a_full_queue_and_a_client_that_goes_away(moe, server):
    with serving(moe, max_batch=1, max_queue=1) as busy, busy.client() as client:
        long = {"max_output_tokens": 400, "stream": True}
        streams = [ask(client, **long)]
        busy.wait_until(lambda: busy.engine.state()["decoding"] == 1)
        streams.append(ask(client, **long))
        busy.wait_until(lambda: busy.engine.state()["waiting"] == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(client)
        assert refused.value.response.headers["retry-after"]
        for stream in streams:
            stream.close()
        busy.wait_until_idle()


def test_an_error_within_a_stream_is_raised_by_the_client(moe, server):
    with serving(moe, deadline=0.05) as slow, slow.client() as client:
        events = []
        with pytest.raises(openai.APIError, match="more than 0.05 s"):  # noqa: PT012 - events come first
            for event in ask(client, max_output_tokens=400, stream=True):
                events.append(event.type)
        assert (events[:2], events[-1]) == (BEGINNING[:2], "response.failed")


def test_a_stream_that_fails_ends_with_a_failed_response_and_an_error(moe):
    """Some clients know only the first, some only the second."""
    with serving(moe, deadline=0.05) as slow:
        body = GREEDY | {"input": PROMPT, "max_output_tokens": 400, "stream": True}
        text = httpx.post(f"{slow.url}/v1/responses", json=body, timeout=60).text
    names, events = [], []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        names.append(name)
        events.append(json.loads(data.removeprefix("data: ")))
    assert names[-2:] == ["event: response.failed", "event: error"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, *_, failed, last = events
    message = last["message"]
    assert "more than 0.05 s" in message
    assert (last["code"], last["error"]["message"]) == ("deadline_exceeded", message)
    error = {"code": "server_error", "message": message}
    assert failed["response"] == first["response"] | {"status": "failed", "error": error}


@pytest.mark.parametrize(("user", "repeated"), [("u", "u"), ({"id": 1}, None), (7, None)])
def test_a_user_is_repeated_if_it_is_a_text(server, user, repeated):
    body = GREEDY | {"input": PROMPT, "max_output_tokens": 1, "user": user}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()
    assert answer["user"] == repeated
    Response.model_validate(answer)


def test_calls_alone_have_no_message_beside_them(demo):
    """Mirascope fails at a message whose text never comes."""
    look: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    asked: dict[str, Any] = {"model": "demo", "input": "hi", "tools": [look], "temperature": 0}
    asked |= {"tool_choice": {"type": "function", "name": "look"}, "max_output_tokens": 100}
    with serving(demo, served_name="demo") as server, server.client() as client:
        answer: Any = client.responses.create(**asked)
        events: list[Any] = list(client.responses.create(**asked, stream=True))
    assert [item.type for item in answer.output] == ["function_call"]
    assert [item.type for item in events[-1].response.output] == ["function_call"]
    items = [event for event in events if event.type.startswith("response.output_item")]
    assert [(event.output_index, event.item.type) for event in items] == [(0, "function_call")] * 2
    assert not [event for event in events if "text" in event.type or "part" in event.type]
