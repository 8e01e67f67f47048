"""Answers of replicas: forwarded as they come, asked of another replica until there is a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from moe_infinity.cluster import forwarding
from moe_infinity.cluster.forwarding import (
    AnswerPart,
    BodyRefused,
    Forwarded,
    HttpCall,
    Intake,
    answered,
    refused,
)


class Died(Exception):
    """What Ray raises when an actor has died."""


replica_app = FastAPI()


@replica_app.post("/echo")
async def echo(request: Request) -> Response:
    return JSONResponse(
        {"body": (await request.body()).decode(), "key": request.headers.get("x-key")},
        status_code=201,
        headers={"x-more": "yes"},
    )


@replica_app.get("/stream")
async def stream() -> Response:
    async def pieces() -> AsyncGenerator[str, None]:
        for idx in range(3):
            yield f"data: {idx}\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


Ask = Callable[[HttpCall], AsyncGenerator[AnswerPart, None]]


def ingress(ask: Ask, intake: Intake | None = None) -> httpx.AsyncClient:
    app = FastAPI()
    taken = intake or Intake(100)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(request: Request, path: str) -> Response:
        try:
            call = await taken.read(request)
        except BodyRefused as refusal:
            return refused(refusal)
        return Forwarded(call, ask, (Died,), taken.forget)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")


def fetched(ask: Ask, method: str, path: str, **about: Any) -> httpx.Response:
    async def fetch() -> httpx.Response:
        async with ingress(ask) as client:
            return await client.request(method, path, **about)

    return asyncio.run(fetch())


async def alive(call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
    async for part in answered(replica_app, call):
        yield part


class Dying:
    """Some replicas die before they answer, or after so many parts."""

    def __init__(self, *after: int | None) -> None:
        self._after = list(after)

    async def __call__(self, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        left = self._after.pop(0)
        async for part in answered(replica_app, call):
            if left == 0:
                raise Died("killed")
            left = None if left is None else left - 1
            yield part


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "PAUSE_S", 0.0)


def test_status_headers_and_body_pass_both_ways():
    answer = fetched(alive, "POST", "/echo?a=1", content=b"text", headers={"x-key": "k"})
    assert (answer.status_code, answer.headers["x-more"]) == (201, "yes")
    assert answer.json() == {"body": "text", "key": "k"}


def test_a_stream_passes_piece_by_piece():
    assert fetched(alive, "GET", "/stream").text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_a_body_that_is_too_long_arrives_as_too_long():
    answer = fetched(alive, "POST", "/echo", content=b"x" * 500)
    assert len(answer.json()["body"]) == 101


def slowly(num_bytes: int, pause_s: float) -> AsyncGenerator[bytes, None]:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(num_bytes):
            await asyncio.sleep(pause_s)
            yield b"x"

    return pieces()


def test_bodies_under_way_share_a_bounded_memory_and_give_it_back(monkeypatch):
    monkeypatch.setattr(forwarding, "MOST_HELD_BYTES", 250)
    intake = Intake(100)
    may_answer = asyncio.Event()

    async def waiting(call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        await may_answer.wait()
        async for part in answered(replica_app, call):
            yield part

    async def fetch() -> list[httpx.Response]:
        async with ingress(waiting, intake) as client:
            asked = [client.post("/echo", content=b"x" * 10**6) for _ in range(5)]
            tasks = [asyncio.ensure_future(each) for each in asked]
            refused_first = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert refused_first[0]
            assert intake.held_bytes <= 250
            may_answer.set()
            return [await task for task in tasks]

    answers = asyncio.run(fetch())
    assert sorted(answer.status_code for answer in answers) == [201, 201, 503, 503, 503]
    assert intake.held_bytes == 0


def test_a_body_that_comes_too_slowly_is_refused_and_forgotten(monkeypatch):
    monkeypatch.setattr(forwarding, "BODY_S", 0.2)
    intake = Intake(100)

    async def fetch() -> httpx.Response:
        async with ingress(alive, intake) as client:
            return await client.post("/echo", content=slowly(50, 0.05))

    answer = asyncio.run(fetch())
    assert (answer.status_code, intake.held_bytes) == (408, 0)


@pytest.mark.parametrize("path", ["/stream", "/echo"])
def test_a_replica_that_dies_before_its_first_token_is_as_if_it_was_not_asked(path):
    method = "GET" if path == "/stream" else "POST"
    answer = fetched(Dying(0, 0, None), method, path)
    expected = fetched(alive, method, path)
    assert (answer.status_code, answer.content) == (expected.status_code, expected.content)


def test_a_replica_that_dies_later_ends_the_stream_with_an_error():
    answer = fetched(Dying(2, None), "GET", "/stream")
    assert answer.text.startswith("data: 0\n\ndata: 1\n\ndata: {")
    assert '"code": "replica_lost"' in answer.text
    assert "data: 2" not in answer.text


def test_replicas_that_all_die_are_an_error():
    answer = fetched(Dying(*[0] * forwarding.MOST_ATTEMPTS), "GET", "/stream")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "replica_lost"


def test_a_client_that_leaves_ends_the_work_of_the_replica():
    ended = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    async def ask(call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        async for part in answered(endless, call):
            yield part

    async def leave() -> None:
        sent = asyncio.Event()

        async def receive() -> Any:
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.set()

        scope = {"type": "http", "path": "/", "headers": []}
        await asyncio.wait_for(
            Forwarded(HttpCall(scope, b""), ask, (Died,), lambda call: None)(scope, receive, send),
            20,
        )
        assert ended.is_set()

    asyncio.run(leave())


def slow_events(*pauses_s: float) -> FastAPI:
    """An application whose stream waits before each piece."""
    app = FastAPI()

    @app.get("/stream")
    async def stream() -> Response:
        async def pieces() -> AsyncGenerator[str, None]:
            for idx, pause_s in enumerate(pauses_s):
                await asyncio.sleep(pause_s)
                yield f"data: {idx}\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    return app


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "LIFE_PERIOD_S", 0.05)
    monkeypatch.setattr(forwarding, "HEAD_AFTER_S", 0.01)


def test_a_client_sees_life_while_a_replica_has_no_token(hasty):
    async def ask(call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        async for part in answered(slow_events(0.3, 0.0), call):
            yield part

    text = fetched(ask, "GET", "/stream").text
    assert text.startswith(": still at work\n\n: still at work\n\n")
    assert text.replace(": still at work\n\n", "") == "data: 0\n\ndata: 1\n\n"


def test_another_replica_is_asked_although_the_client_saw_life(hasty):
    asked = []

    async def ask(call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        asked.append(call)
        async for part in answered(slow_events(0.2, 0.0), call):
            if len(asked) == 1 and part.body:
                raise Died("killed")
            yield part

    text = fetched(ask, "GET", "/stream").text
    assert len(asked) == 2
    assert text.startswith(": still at work\n\n")
    assert text.replace(": still at work\n\n", "") == "data: 0\n\ndata: 1\n\n"


def test_a_refusal_of_the_second_replica_is_an_event(hasty):
    asked = []

    async def ask(call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        asked.append(call)
        if len(asked) > 1:
            yield AnswerPart(b'{"error": {"code": "stopped"}}', 503, [(b"content-type", b"x/json")])
            return
        async for part in answered(slow_events(0.2), call):
            if part.body:
                raise Died("killed")
            yield part

    answer = fetched(ask, "GET", "/stream")
    assert answer.status_code == 200
    assert answer.text.endswith('data: {"error": {"code": "stopped"}}\n\n')


def test_a_refusal_of_the_second_replica_is_a_line_where_there_are_lines(hasty):
    asked = []
    lines = [(b"content-type", b"application/x-ndjson")]

    async def ask(call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        asked.append(call)
        if len(asked) > 1:
            yield AnswerPart(b'{"error": "the queue is full"}', 429, [(b"content-type", b"x/json")])
            return
        yield AnswerPart(b"", 200, lines)
        raise Died("killed")

    assert fetched(ask, "GET", "/stream").text == '{"error": "the queue is full"}\n'
