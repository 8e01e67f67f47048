"""Connections have limits of number and time, however little their clients send or read."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from moe_infinity.server import limits
from moe_infinity.server.connections import FEWEST, Connections, most_connections
from moe_infinity.server.few_lines import BURST, FewLines
from tests.server.serving import Serving, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def connected(server: Serving, sent: bytes = b"") -> Iterator[socket.socket]:
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(sent)
        yield client


def is_closed(client: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return client.recv(1) == b""
    return True


def set_limit(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setattr(limits, name, replace(getattr(limits, name), most=most))


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_a_client_that_asks_nothing_is_disconnected(moe, monkeypatch, sent):
    set_limit(monkeypatch, "HEADER_S", 1)
    with serving(moe) as server, connected(server, sent) as client:
        began = time.monotonic()
        assert is_closed(client)
        assert time.monotonic() - began < 10


def test_half_a_request_behind_an_answer_is_disconnected(moe, monkeypatch):
    set_limit(monkeypatch, "HEADER_S", 1)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(moe) as server, connected(server, whole) as client:
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200")
        client.sendall(whole[:20])
        assert is_closed(client)


def test_a_request_under_way_is_waited_for(moe, monkeypatch):
    """The time for headers does not count for its answer."""
    set_limit(monkeypatch, "HEADER_S", 1)
    with serving(moe) as server:
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        moe_is_ready = server.engine._moe

        class Slow(type(moe_is_ready)):  # type: ignore[misc]
            is_ready = property(lambda self: time.monotonic() > ready)

        ready = time.monotonic() + 2.5
        kind = type(moe_is_ready)
        try:
            moe_is_ready.__class__ = Slow
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        finally:
            moe_is_ready.__class__ = kind
    assert answer.status_code == 200
    assert "[DONE]" in answer.text


@pytest.mark.parametrize(
    ("files", "more"),
    [
        (["highlight.min.js"], b""),
        (["highlight.min.js"], b"G"),  # a byte of its next request
        (["chat.js"] * 5, b""),  # it ends with less than what stops writing
    ],
    ids=["silent", "one byte", "closing"],
)
def test_a_client_that_does_not_read_its_answer_is_disconnected(moe, monkeypatch, files, more):
    set_limit(monkeypatch, "UNREAD_S", 1)
    with serving(moe) as server, socket.socket() as client:
        (listener,) = server.server.servers[0].sockets
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections, too
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        asked = [f"GET /page/{name} HTTP/1.1\r\nHost: localhost\r\n" for name in files]
        client.sendall("\r\n".join([*asked, ""]).encode()[:-2] + b"Connection: close\r\n\r\n")
        there = server.server.config.http._open  # type: ignore[union-attr]
        server.wait_until(lambda: bool(there))
        time.sleep(0.5)
        assert there, "what it reads was not all"
        with contextlib.suppress(ConnectionError):
            client.sendall(more)
        server.wait_until(lambda: not there)


def test_the_connection_that_is_idle_longest_makes_room(moe, monkeypatch):
    monkeypatch.setattr("moe_infinity.server.serve.most_connections", lambda: 5)
    with serving(moe) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(20)]
        began = time.monotonic()
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert time.monotonic() - began < 5
        closed = [is_closed(client) for client in idle[:15]]
        assert all(closed)


def test_connections_that_come_at_once_close_as_many():
    """Before the first of them has gone."""
    ended: list[int] = []

    class Idle:
        is_idle = True

        def __init__(self, number: int) -> None:
            self.number = number

        def end(self) -> None:
            ended.append(self.number)

    connections = Connections(3)
    made: list[Any] = [Idle(number) for number in range(10)]
    for each in made:
        connections.opened(each)
    assert ended == list(range(7))
    for each in made:
        connections.closed(each)
    connections.opened(made[0])
    assert ended == list(range(7))


def test_a_body_in_crumbs_is_refused(moe):
    crumbs = b"1\r\na\r\n" * 1000
    with serving(moe) as server, connected(server, HEAD) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(crumbs)
        assert is_closed(client)


def test_lines_of_a_few_bytes_are_no_crumbs(moe):
    """PowerShell writes JSON in lines that end as headers do."""
    body = json.dumps({"prompt": [1] * 500, "max_tokens": 1}, indent=1).replace("\n", "\r\n")
    answer = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    with serving(moe) as server, connected(server) as client:
        client.sendall(answer + b"%d\r\n\r\n" % len(body) + body.encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize("size", [40, 1000])
def test_a_body_in_chunks_is_read(moe, size):
    body = json.dumps({"prompt": "a" * 3000, "max_tokens": 1}).encode()
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    with serving(moe) as server, connected(server, HEAD + chunks + b"0\r\n\r\n") as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 ")


def test_headers_have_a_limit(moe):
    long = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000
    with serving(moe) as server, connected(server, long) as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 400")


def test_connections_leave_descriptors_for_the_rest(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert 700 < most_connections() < 1024
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    assert most_connections() == FEWEST
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert most_connections() == limits.CONNECTIONS.most


def test_a_log_has_few_lines_of_a_kind():
    few_lines = FewLines()
    shown = []
    for at in range(1000):
        record = logging.LogRecord("x", logging.WARNING, "", 0, "refused %s", (at,), None)
        record.created = at / 100
        if few_lines.filter(record):
            shown.append(record.getMessage())
    assert BURST + 8 <= len(shown) <= BURST + 10
    assert shown[0] == "refused 0"
    assert "more lines of this kind" in shown[-1]
    other = logging.LogRecord("x", logging.WARNING, "", 0, "another kind", (), None)
    assert few_lines.filter(other)


def test_a_deadline_counts_while_experts_are_preloaded(moe, monkeypatch):
    monkeypatch.setattr(type(moe), "is_ready", property(lambda self: time.monotonic() > ready))
    ready = time.monotonic() + 30
    with serving(moe, deadline=1) as server:
        began = time.monotonic()
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert answer.status_code == 504
        assert time.monotonic() - began < 15
        ready = 0.0


def test_too_many_sequences_are_refused_before_they_are_made(moe, monkeypatch):
    with serving(moe, max_queue=16) as server:
        monkeypatch.setattr(server.engine, "running", None)
        body = {"prompt": ["a", "b"], "n": 16, "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
