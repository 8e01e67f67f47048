"""/v1/messages as the `anthropic` client sees it, over a real socket."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, ToolParam
from anthropic.types.shared import ErrorResponse

from moe_infinity.prefixes.prefix_tree import BLOCK
from tests.server.driving import generated, words
from tests.server.serving import serving

pytestmark = pytest.mark.arithmetic

PROMPT = "w5 w6 w9 w100 w31"
PROMPT_IDS = [5, 6, 9, 100, 31]
ASKED: list[Any] = [{"role": "user", "content": PROMPT}]
BODY: dict[str, Any] = {"messages": ASKED, "max_tokens": 12, "temperature": 0}
TOOL: ToolParam = {"name": "w88", "description": "w3", "input_schema": {"type": "object"}}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}


def text_of(answer: Any) -> str:
    return "".join(block.text for block in answer.content)


@pytest.fixture(scope="module")
def expected(moe) -> list[int]:
    return generated(moe, [*PROMPT_IDS, 77])


@pytest.fixture(scope="module")
def client(server):
    with server.anthropic() as client:
        yield client


def ask(client, messages: Any = ASKED, **more: Any) -> Any:
    """The client has no parameter for temperature."""
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": messages}
    return client.messages.create(**(settings | {"extra_body": {"temperature": 0}} | more))


# answers


def test_an_answer_is_the_chat_answer_in_other_words(client, ended):
    answer = ask(client, metadata={"user_id": "u"})
    Message.model_validate(answer.to_dict())
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in answer.content] == [("text", ended)]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == 6
    assert answer.usage.cache_creation_input_tokens == 0
    assert answer.usage.output_tokens == len(ended.split()) + 1  # the end token counts
    assert answer.id.startswith("msg_")


def test_an_answer_may_end_by_length_or_by_a_stop_sequence(client, expected):
    answer = ask(client, max_tokens=3)
    assert (text_of(answer), answer.stop_reason) == (words(expected[:3]), "max_tokens")
    stop = words(expected[5:7])
    for found in (
        ask(client, stop_sequences=["never", stop]),
        list(ask(client, stop_sequences=["never", stop], stream=True))[-2].delta,
    ):
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    answer = ask(client, stop_sequences=["never", stop])
    assert text_of(answer) == words(expected).partition(stop)[0]


def test_sampling_is_what_the_body_says(client, expected):
    for sampling in ({"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 0}):
        assert text_of(ask(client, extra_body=sampling)) == words(expected)


def test_an_empty_answer_has_no_blocks(server, client, expected, monkeypatch):
    monkeypatch.setattr(server.moe.model.generation_config, "eos_token_id", expected[0])
    answer = ask(client)
    assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "end_turn", 1)
    kinds = [event.type for event in ask(client, stream=True)]
    assert kinds == ["message_start", "message_delta", "message_stop"]


# streams


def test_a_stream_is_the_documented_events_in_order(client, ended):
    events = list(ask(client, stream=True))
    deltas = ["content_block_delta"] * (len(events) - 5)
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    for event in events:
        type(event).model_validate(event.to_dict())
    assert "".join(event.delta.text for event in events[2:-3]) == ended
    assert len(deltas) > 1
    start, end = events[0].message, events[-2]
    assert (start.content, start.stop_reason, start.usage.output_tokens) == ([], None, 0)
    assert (end.delta.stop_reason, end.usage.output_tokens) == ("end_turn", len(ended.split()) + 1)


def test_the_clients_own_stream_helper_puts_it_together(client, ended):
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": ASKED}
    with client.messages.stream(**settings, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == ended
    assert final.stop_reason == "end_turn"
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == 6


def test_on_the_wire_an_event_has_its_name_and_nothing_comes_after_the_last(server):
    raw = httpx.post(f"{server.url}/v1/messages", json=BODY | {"stream": True}, timeout=60).text
    events = raw.removesuffix("\n\n").split("\n\n")
    assert events[0].startswith('event: message_start\ndata: {"type": "message_start"')
    assert events[-1] == 'event: message_stop\ndata: {"type": "message_stop"}'


# conversations


def test_text_comes_as_a_string_or_as_blocks(client, moe):
    ids = [8, *PROMPT_IDS, 77]
    blocks = [{"type": "text", "text": PROMPT, "cache_control": EPHEMERAL}]
    system = [{"type": "text", "text": "w8", "cache_control": EPHEMERAL}]
    for asked in (
        ask(client, system="w8"),
        ask(client, [{"role": "user", "content": blocks}], system=system, cache_control=EPHEMERAL),
    ):
        assert text_of(asked) == words(generated(moe, ids))


ROLES = (
    "{% set roles = {'system': 'w91', 'user': 'w92', 'assistant': 'w93', 'tool': 'w94'} %}"
    "{% for m in messages %}{{ roles[m['role']] }} "
    "{% for text in [m.get('reasoning_content'), m['content']] if text %}{{ text }} {% endfor %}"
    "{% for c in m.get('tool_calls', []) %}{{ c['function']['name'] }} "
    "{{ c['function']['arguments']['day'] }} {% endfor %}{% endfor %}w77"
)


def test_a_conversation_with_tools_reaches_the_template(client, moe, monkeypatch):
    monkeypatch.setattr(moe.tokenizer, "chat_template", ROLES)
    said = [
        {"type": "thinking", "thinking": "w20", "signature": ""},
        {"type": "text", "text": "w21", "citations": None},
        {"type": "tool_use", "id": "a", "name": "w22", "input": {"day": "w23"}, "caller": None},
        {"type": "tool_use", "id": "b", "name": "w24", "input": {"day": "w25"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "w30", "is_error": True},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "w31"}]},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "w32"},
    ]
    turns = [
        {"role": "user", "content": "w10"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": results},
    ]
    asked = [91, 9, 92, 10]
    called = [93, 20, 21, 22, 23, 24, 25]
    ids = [*asked, *called, 94, 30, 94, 31, 94, 92, 32, 77]
    answer = ask(client, turns, system="w9")
    assert client.messages.count_tokens(model="tiny", messages=turns).input_tokens == len(ids) - 2
    assert text_of(answer) == words(generated(moe, ids))


def test_an_answer_may_come_back_as_it_was_given(client, moe):
    first = ask(client, max_tokens=2)
    said = [int(word[1:]) for word in text_of(first).split()]
    ids = [*PROMPT_IDS, *said, 7, 77]
    for content in (first.content, [block.model_dump() for block in first.content]):
        turns = [*ASKED, {"role": "assistant", "content": content}]
        answer = ask(client, [*turns, {"role": "user", "content": "w7"}])
        assert text_of(answer) == words(generated(moe, ids))


def test_tools_reach_the_template_unless_the_choice_is_none(client):
    count = client.messages.count_tokens
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": [TOOL]}
    assert count(**asked).input_tokens == 7
    assert count(**asked, tool_choice={"type": "auto"}).input_tokens == 7
    assert count(**asked, tool_choice={"type": "none"}).input_tokens == 6


def test_tokens_of_the_prefix_cache_are_counted_apart(moe):
    prompt = words([at % 90 + 3 for at in range(3 * BLOCK)])
    asked: list[Any] = [{"role": "user", "content": prompt}]
    with serving(moe, max_batch=2, prefix_cache="64MiB") as server, server.anthropic() as client:
        total = client.messages.count_tokens(model="tiny", messages=asked).input_tokens
        usages = [ask(client, asked).usage, ask(client, asked).usage]
        with client.messages.stream(model="tiny", max_tokens=2, messages=asked) as stream:
            usages.append(stream.get_final_message().usage)
    assert total == 3 * BLOCK + 1
    assert [usage.cache_read_input_tokens for usage in usages] == [0, 3 * BLOCK, 3 * BLOCK]
    assert [usage.input_tokens for usage in usages] == [total, 1, 1]


# errors

IMAGE = {"role": "user", "content": [{"type": "image", "source": {}}]}


def error_of(answer: httpx.Response) -> Any:
    return ErrorResponse.model_validate(answer.json()).error


def kind_of(error: anthropic.APIStatusError) -> Any:
    return ErrorResponse.model_validate(error.body).error.type


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": None}, "messages: "),
        ({"messages": []}, "messages: "),
        ({"messages": [IMAGE]}, "messages: this model reads text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages.0.content.0.tool_use.id: Field",
        ),
        (
            {"messages": [{"role": "user", "content": "w5 " * 600}]},
            "prompt is too long: 602 tokens > 512 maximum",
        ),
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"temperature": 1.5}, "temperature: "),
        ({"top_k": -1}, "top_k: "),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice: this model's tokenizer"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "w88"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.tool.name: Field required"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server, change, said):
    answer = httpx.post(f"{server.url}/v1/messages", json=BODY | change, timeout=60)
    error = error_of(answer)
    assert (answer.status_code, error.type) == (400, "invalid_request_error")
    assert error.message.startswith(said)


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff"])
def test_a_body_that_is_no_object_is_refused(server, raw):
    answer = httpx.post(f"{server.url}/v1/messages", content=raw, timeout=60)
    assert error_of(answer).type == "invalid_request_error"


def test_another_model_is_not_found(client):
    with pytest.raises(anthropic.NotFoundError, match="'tiny'") as refused:
        ask(client, model="claude-of-the-future")
    assert kind_of(refused.value) == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="'tiny'"):
        client.messages.count_tokens(model="claude-of-the-future", messages=ASKED)


def test_a_key_may_come_in_either_header(moe):
    with serving(moe, api_key=["right"]) as locked:
        with (
            locked.anthropic(api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            ask(client)
        assert kind_of(refused.value) == "authentication_error"
        with locked.anthropic(api_key="right") as client:
            assert ask(client).stop_reason == "max_tokens"
        url = f"{locked.url}/v1/messages"
        for key, status in (("right", 200), ("wrong", 401), ("", 401)):
            answer = httpx.post(url, json=BODY, headers={"x-api-key": key}, timeout=60)
            assert answer.status_code == status
        assert httpx.post(url, json=BODY, timeout=60).status_code == 401
        other = httpx.post(f"{locked.url}/v1/chat/completions", json=BODY, timeout=60)
        assert other.json()["error"]["code"] == "invalid_api_key"


def test_a_full_queue_and_a_client_that_goes_away(moe):
    with serving(moe, max_batch=1, max_queue=1) as busy, busy.anthropic() as client:
        long: dict[str, Any] = {"max_tokens": 400, "stream": True}
        streams = [ask(client, **long)]
        busy.wait_until(lambda: busy.engine.state()["decoding"] == 1)
        streams.append(ask(client, **long))
        busy.wait_until(lambda: busy.engine.state()["waiting"] == 1)
        with pytest.raises(anthropic.RateLimitError) as refused:
            ask(client)
        assert kind_of(refused.value) == "rate_limit_error"
        assert refused.value.response.headers["retry-after"]
        for stream in streams:
            stream.close()
        busy.wait_until_idle()


def test_an_answer_that_is_too_late_is_an_error_of_its_stream_or_status(moe):
    with serving(moe, deadline=0.05) as slow, slow.anthropic() as client:
        for long in ({"max_tokens": 400, "stream": True}, {"max_tokens": 400}):
            with pytest.raises(anthropic.APIStatusError, match=r"more than 0.05 s") as failed:
                list(ask(client, **long))
            assert kind_of(failed.value) == "timeout_error"


def test_a_server_that_stops_says_so(moe):
    with serving(moe) as stopping:
        stopping.engine.drain()
        answer = httpx.post(f"{stopping.url}/v1/messages", json=BODY, timeout=60)
        assert (answer.status_code, error_of(answer).type) == (503, "overloaded_error")
