"""A stream shows at once, and then again and again, that somebody works on it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moe_infinity.server import exchange
from tests.server.serving import Serving

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
    "/v1/completions": [": still at work"],
    "/v1/chat/completions": ["chat.completion.chunk"],
    "/v1/messages": ["message_start", "ping"],
    "/v1/responses": ["response.created", "response.in_progress"],
}
LIFE = {"/v1/messages": "ping", "/v1/responses": "response.in_progress"}


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


def kind_of(event: str) -> str:
    """The type of an event; a comment is one without a name."""
    data = event.rpartition("data: ")[2]
    if event.startswith(":") or data == "[DONE]":
        return event
    payload = json.loads(data)
    return str(payload.get("type", payload.get("object")))


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_waits_for_its_prompt_shows_life(server, stuck, path):
    body = BODIES[path] | {"stream": True}
    events: list[str] = []
    with httpx.stream("POST", server.url + path, json=body, timeout=30) as answer:
        for line in answer.iter_text():
            events += [event for event in line.split("\n\n") if event]
            if len(events) == len(FIRST[path]) + 3:  # signs of life, before any token
                stuck.set()
    kinds = list(map(kind_of, events))
    num_first = len(FIRST[path])
    assert kinds[:num_first] == FIRST[path]
    life = LIFE.get(path, ": still at work")
    assert kinds[num_first : num_first + 3] == [life] * 3
    stuck.set()
    whole = httpx.post(server.url + path, json=BODIES[path], timeout=30)
    assert whole.status_code == 200
    if path == "/v1/responses":
        numbers = [json.loads(event.rpartition("data: ")[2])["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))


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
            if line.startswith(":") and not stuck.is_set():
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
