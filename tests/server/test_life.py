"""A stream shows at once, and then again and again, that somebody works on it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from moe_infinity.server import exchange
from moe_infinity.server.responses import ResponseAnswer
from tests.server.serving import Serving
from tests.server.test_messages import ANTHROPIC, ASKED, WEATHER, scripted

__all__ = ["scripted"]  # a server whose model writes what a test says

PERIOD_S = 0.05
PROMPT = "w5 w6 w9 w100 w31"
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": CHAT | {"max_tokens": 4, "temperature": 0},
    "/v1/messages": CHAT | {"max_tokens": 4, "temperature": 0},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 4, "temperature": 0},
}
FIRST = {
    "/v1/completions": [],
    "/v1/chat/completions": ["chat.completion.chunk"],
    "/v1/messages": ["message_start", "ping"],
    "/v1/responses": ["response.created", "response.in_progress"],
}
LIFE = {
    "/v1/completions": ": still at work",
    "/v1/chat/completions": "chat.completion.chunk",
    "/v1/messages": "ping",
    "/v1/responses": "response.in_progress",
}


@pytest.fixture
def stuck(server: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Prompts wait for this event, as for a slow disk."""
    going = threading.Event()
    prefill = server.engine._passes.prefill

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert going.wait(30)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(server.engine._passes, "prefill", slow)
    monkeypatch.setattr(exchange, "LIFE_PERIOD_S", PERIOD_S)
    yield going
    going.set()


def data_of(event: str) -> Any:
    return json.loads(event.rpartition("data: ")[2])


def kind_of(event: str) -> str:
    """The type of an event; a comment is one without a name."""
    if event.startswith(":") or event == "data: [DONE]":
        return event
    return str(data_of(event).get("type", data_of(event).get("object")))


def waited(server: Serving, stuck: threading.Event, path: str, **more: Any) -> list[str]:
    """The events of a stream that waits until it has shown life three times."""
    body = BODIES[path] | {"stream": True} | more
    events: list[str] = []
    with httpx.stream("POST", server.url + path, json=body, timeout=30) as answer:
        for line in answer.iter_text():
            events += [event for event in line.split("\n\n") if event]
            if len(events) >= len(FIRST[path]) + 3:  # signs of life, before any token
                stuck.set()
    return events


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_waits_for_its_prompt_shows_life(server, stuck, path):
    events = waited(server, stuck, path)
    kinds = list(map(kind_of, events))
    num_first = len(FIRST[path])
    assert kinds[:num_first] == FIRST[path]
    assert kinds[num_first : num_first + 3] == [LIFE[path]] * 3
    whole = httpx.post(server.url + path, json=BODIES[path], timeout=30)
    assert whole.status_code == 200
    if path == "/v1/responses":
        numbers = [data_of(event)["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))


@pytest.mark.parametrize("path", BODIES)
def test_before_its_first_token_a_forwarded_stream_has_nothing(server, stuck, path, monkeypatch):
    """Until then another replica may be asked."""
    chunks = exchange.Exchange.chunks
    forwarded = lambda self, at_once: chunks(self, at_once=False)  # noqa: E731
    monkeypatch.setattr(exchange.Exchange, "chunks", forwarded)
    body = BODIES[path] | {"stream": True, "return_progress": True}
    timer = threading.Timer(10 * PERIOD_S, stuck.set)
    with httpx.stream("POST", server.url + path, json=body, timeout=30) as answer:
        timer.start()
        pieces = answer.iter_text()
        assert next(pieces)
        assert stuck.is_set()
        assert "".join(pieces)


def test_the_life_of_a_chat_is_a_chunk_that_adds_nothing(server, stuck):
    """Some clients take too many comments for an error."""
    first, *lives = map(data_of, waited(server, stuck, "/v1/chat/completions")[:4])
    choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None, "delta": {}}
    assert lives == [first | {"choices": [choice]}] * 3


def test_a_request_that_each_sign_of_life_repeats_is_written_once(server, stuck, monkeypatch):
    """It may be long: tools have schemas."""
    made = []
    response = ResponseAnswer._response

    def noted(self: ResponseAnswer, status: str, **rest: Any) -> dict[str, Any]:
        made.append(status)
        return response(self, status, **rest)

    monkeypatch.setattr(ResponseAnswer, "_response", noted)
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    events = waited(server, stuck, "/v1/responses", tools=[tool], user="œuf")
    _, first, *lives = map(data_of, events[:5])
    assert first["response"]["user"] == "œuf"
    assert lives == [first | {"sequence_number": number} for number in (2, 3, 4)]
    assert made == ["in_progress", "in_progress", "incomplete"]


# A call of a tool is written by the scripted model, and what is to come, but for signs of life.
TOOL = {"type": "function", **WEATHER["function"]}
CALLING: dict[str, dict[str, Any]] = {
    "/v1/messages": ANTHROPIC | {"messages": ASKED},
    "/v1/responses": {"input": "w5", "tools": [TOOL], "max_output_tokens": 200},
    "/api/chat": {"messages": ASKED, "tools": [WEATHER], "options": {"num_predict": 200}},
}


def is_life(event: str, path: str) -> bool:
    if path != "/api/chat":
        return kind_of(event) == LIFE[path]
    line = json.loads(event)
    return line["message"] == {"role": "assistant", "content": ""} and not line["done"]


@pytest.mark.parametrize("path", CALLING)
def test_a_stream_shows_life_while_a_call_is_written(scripted, monkeypatch, path):
    """Tokens come all the time, and none of them is shown."""
    ticks = count()  # each look at the clock takes a second
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    body = CALLING[path] | {"stream": True}
    text = httpx.post(scripted.url + path, json=body, timeout=30).text
    events = text.removesuffix("\n").split("\n" if path == "/api/chat" else "\n\n")
    shows_life = [is_life(event, path) for event in filter(None, events)]
    at_first = len(FIRST.get(path, [""]))
    assert sum(shows_life[at_first:]) >= 3
    assert not all(shows_life[at_first:])


def test_clients_read_such_streams_as_before(server, stuck):
    threading.Timer(4 * PERIOD_S, stuck.set).start()
    ask: dict[str, Any] = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 4}
    ask["extra_body"] = {"temperature": 0}
    with server.client() as client, server.anthropic() as other:
        chunks = list(client.chat.completions.create(**ask, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        with other.messages.stream(**ask) as stream:
            assert stream.get_final_text()
        events = client.responses.create(
            model="tiny", input=PROMPT, max_output_tokens=4, temperature=0, stream=True
        )
        assert [event.type for event in events][-1] == "response.incomplete"


def test_a_client_that_leaves_a_waiting_stream_frees_its_place(server, stuck):
    body = BODIES["/v1/completions"] | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        assert next(answer.iter_text()).startswith(":")
    stuck.set()
    server.wait_until_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_may_say_how_far_its_prompt_is(server, stuck, path, monkeypatch):
    monkeypatch.setattr(exchange, "PROGRESS_PERIOD_S", PERIOD_S)
    monkeypatch.setattr(server.engine._passes, "_chunk", 2)
    asked = BODIES[path] | {"stream": True, "return_progress": True}
    if path == "/v1/completions":
        asked["prompt"] = [7, 8, 9, 10, 11]
    chunks = []
    with httpx.stream("POST", server.url + path, json=asked, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
            if line and not stuck.is_set():
                server.wait_until(lambda: server.engine.state()["prefilling"] == 1)
                prompts = httpx.get(f"{server.url}/stats").json()["engine"]["prompts"]
                assert [each["read"] for each in prompts] == [0]
                stuck.set()
    shown = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert shown[0]["processed"] == 0
    assert shown[-1]["processed"] == shown[-1]["total"] >= 5
    texts = [str(chunk["choices"][0]) for chunk in chunks if "prompt_progress" not in chunk]
    assert sum("w" in text for text in texts) >= 4  # the tokens come after it, each once
    assert "prompt_progress" in chunks[len(FIRST[path])]


def test_progress_is_only_said_when_asked_for(server):
    body = BODIES["/v1/completions"] | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        assert b"prompt_progress" not in answer.read()
