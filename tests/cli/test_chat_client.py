"""`chat --url` and servers that answer as ours does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from moe_infinity.cli import chat_client

DELTA = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'


class Scripted:
    """A server that says one thing, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


@contextmanager
def scripted(answer: bytes, *, is_silent: bool = False) -> Iterator[Scripted]:
    script = Scripted()
    may_end = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            script.keys.append(self.headers["authorization"])
            script.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if is_silent:
                may_end.wait(20)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        script.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield script
        finally:
            may_end.set()
            server.shutdown()
            thread.join(20)


def chat(command: Callable[..., Any], url: str, *options: object) -> Any:
    return command("chat", "--url", url, *options, stdin="hello\n")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'data: {"error": "busy"}\n\n', "busy"),
        (b'data: {"error": {"message": "busy"}}\n\n', "busy"),
        (b'data: {"error": {"code": 7}}\n\n', '{"code": 7}'),
        (b"data: oops\n\n", "not a chunk of an answer: oops"),
        (b"data: 5\n\n", "not a chunk of an answer: 5"),
        (b'data: {"choices": [{}]}\n\n', "not a chunk of an answer"),
        (b'data: {"choices": [{"delta": null}]}\n\n', "not a chunk of an answer"),
        (b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', "not a chunk of an answer"),
        (b'data: {"id": "x"}\n\n', "not a chunk of an answer"),
        (b"<html></html>", "no stream of events"),
        (b"", "no stream of events"),
    ],
)
def test_a_malformed_answer_is_an_error_with_the_servers_address(command, answer, said):
    with scripted(answer) as server:
        outcome = chat(command, server.url)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(f"{server.url}: ")
    assert outcome.said(said)


def test_an_error_in_midstream_comes_after_the_text_before_it(command):
    with scripted(DELTA + b'data: {"error": {"message": "too late"}}\n\n') as server:
        outcome = chat(command, server.url)
    assert (outcome.code, outcome.out) == (1, "hi")
    assert outcome.said("too late")


def test_events_of_other_servers_are_read(command):
    """No space after the colon, an error that is null, usage without choices, comments."""
    events = b': ping\n\ndata:{"error": null, "choices": [{"delta": {"content": "ho"}}]}\n\n'
    events += b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
    with scripted(DELTA + events) as server:
        outcome = chat(command, server.url)
    assert (outcome.code, outcome.out) == (0, "hiho\n")


def test_a_server_that_says_nothing_is_not_waited_for_forever(command, monkeypatch):
    assert chat_client.READ_TIMEOUT_S > 600  # our own server's deadline
    monkeypatch.setattr(chat_client, "READ_TIMEOUT_S", 0.2)
    with scripted(b"", is_silent=True) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 1
    assert outcome.said(f"{server.url}: no answer: timed out")


def test_a_server_is_asked_for_the_top_p_that_was_given(command):
    with scripted(DELTA) as server:
        for top_p in (0.25, 1):
            options = ("--temperature", 1, "--top-p", top_p)
            assert chat(command, server.url, *options).code == 0
    assert [body["top_p"] for body in server.asked] == [0.25, 1]


@pytest.mark.parametrize("top_p", ["0", "-0.1", "1.1", "nan"])
def test_top_p_is_above_0_for_a_model_and_for_a_server(command, top_p):
    for where in (["models/demo"], ["--url", "http://127.0.0.1:1"]):
        outcome = command("chat", *where, "--temperature", 1, "--top-p", top_p, stdin="hello\n")
        assert outcome.code == 2
        assert outcome.said("--top-p")


def test_a_key_may_have_any_letters(command):
    with scripted(DELTA) as server:
        assert chat(command, server.url, "--api-key", "sésame").code == 0
    assert [key.encode("latin-1").decode() for key in server.keys if key] == ["Bearer sésame"]
