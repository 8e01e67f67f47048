"""HTTP requests that a replica answers in place of the process that has the client.

    client ──> Forwarded (in the ingress) ──call──> answered (in a replica) ──> the server's app

The ingress sends nothing before a replica has its first token. A replica that dies before is as if
it had not been asked: another one is. One that dies later ends the answer with an error event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_ATTEMPTS = 4  # for one request, each by another replica
PAUSE_S = 0.5  # between two of them
LOST = "the replica that computed this answer was lost"

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One HTTP request, as it goes to a replica."""

    scope: dict[str, Any]  # of ASGI, as far as it can be sent
    body: bytes


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of the answer. The first one has status and headers."""

    body: bytes
    status: int | None = None
    headers: Headers | None = None


async def call_of(request: Request, most_bytes: int) -> HttpCall:
    """Read a request. A body above `most_bytes` is cut behind them: the replica refuses it."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            break
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path")
    more = ("query_string", "root_path", "headers", "client", "server")
    scope = {name: request.scope[name] for name in (*names, *more) if name in request.scope}
    scope["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    return HttpCall(scope, bytes(body[: most_bytes + 1]))


async def answered(app: ASGIApp, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
    """The answer of an ASGI application. It is cancelled with this generator."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # the client goes: all of this is cancelled
        is_read = True
        return {"type": "http.request", "body": call.body, "more_body": False}

    task = asyncio.ensure_future(app(dict(call.scope), receive, messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    start: Message | None = None
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                start = message
                continue
            body = message.get("body", b"")
            if not body and message.get("more_body"):
                continue
            if start is None:
                yield AnswerPart(body)
            else:
                yield AnswerPart(body, start["status"], [tuple(pair) for pair in start["headers"]])
                start = None
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Forwarded(Response):
    """The answer of whichever replica gives one. `ask` begins a call of some replica, and raises
    one of `losses` if it dies.
    """

    def __init__(
        self,
        call: HttpCall,
        ask: Callable[[HttpCall], AsyncGenerator[AnswerPart, None]],
        losses: tuple[type[BaseException], ...],
    ) -> None:
        super().__init__()
        self._call = call
        self._ask = ask
        self._losses = losses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._answer(scope, receive, send))
        watch = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        for attempt in range(MOST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_S * attempt)
            content_type = None
            try:
                async with aclosing(self._ask(self._call)) as parts:
                    async for part in parts:
                        if part.headers is not None:
                            content_type = dict(part.headers).get(b"content-type", b"")
                            head = {"status": part.status, "headers": part.headers}
                            await send({"type": "http.response.start", **head})
                        body = {"body": part.body, "more_body": True}
                        await send({"type": "http.response.body", **body})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            except self._losses as error:
                logger.warning("a replica was lost: %s", error)
                if content_type is not None:
                    await self._end_with_error(content_type, send)
                    return
        refusal = JSONResponse({"error": _error()}, 503, headers={"Retry-After": "1"})
        await refusal(scope, receive, send)

    async def _end_with_error(self, content_type: bytes, send: Send) -> None:
        """An event where there are events; else the answer stays incomplete, which the client sees
        by its length.
        """
        if not content_type.startswith(b"text/event-stream"):
            raise ConnectionError(LOST)
        if self._call.scope["path"].startswith("/v1/messages"):
            event = "event: error\ndata: " + json.dumps({"type": "error", "error": _error()})
        else:
            event = "data: " + json.dumps({"error": _error()})
        body = f"{event}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _error() -> dict[str, Any]:
    return {"message": LOST, "type": "server_error", "param": None, "code": "replica_lost"}


async def _gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
