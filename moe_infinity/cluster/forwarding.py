"""HTTP requests that a replica answers in place of the process that has the client.

    client ──> Forwarded (in the ingress) ──call──> answered (in a replica) ──> the server's app

The ingress sends no event before a replica has its first token. A replica that dies before is as if
it had not been asked: another one is. One that dies later ends the answer with an error event. In a
stream the ingress sends comments while it waits, so that the client sees that somebody works.
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

from moe_infinity.server.pauses import LIFE_PERIOD_S, with_pauses

HEAD_AFTER_S = 0.1  # a replica that has no piece yet gives status and headers
LIFE = b": still at work\n\n"
EVENTS = b"text/event-stream"
LINES = b"application/x-ndjson"  # Ollama's streams
MOST_ATTEMPTS = 4  # for one request, each by another replica
PAUSE_S = 0.5  # between two of them
BODY_S = 60.0  # for the body of a request
MOST_HELD_BYTES = 256 << 20  # of all bodies
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
    """A piece of the answer. The first one has status and headers, and may have no body."""

    body: bytes
    status: int | None = None
    headers: Headers | None = None


class BodyRefused(Exception):
    """A body that is not read to its end."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Intake:
    """Reads requests. Their bodies take a bounded time to read, and bounded memory together until
    they are answered: nobody has shown a key yet.
    """

    def __init__(self, most_bytes: int) -> None:
        self.held_bytes = 0
        self._most_bytes = most_bytes

    async def read(self, request: Request) -> HttpCall:
        """Raises BodyRefused. A body above `most_bytes` is cut behind them: the replica refuses
        it. Who has the call gives it back with `forget`.
        """
        names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path")
        more = ("query_string", "root_path", "headers", "client", "server")
        scope = {name: request.scope[name] for name in (*names, *more) if name in request.scope}
        scope["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        body = bytearray()
        try:
            await asyncio.wait_for(self._fill(body, request), BODY_S)
        except BaseException as error:
            self.held_bytes -= len(body)
            if isinstance(error, asyncio.TimeoutError):
                raise BodyRefused(408, f"the body took more than {BODY_S:.0f} s") from error
            raise
        return HttpCall(scope, bytes(body))

    def forget(self, call: HttpCall) -> None:
        """The call was answered."""
        self.held_bytes -= len(call.body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        async for piece in request.stream():
            piece = piece[: self._most_bytes + 1 - len(body)]
            if self.held_bytes + len(piece) > MOST_HELD_BYTES:
                raise BodyRefused(503, "the bodies of other requests take all memory for them")
            body += piece
            self.held_bytes += len(piece)
            if len(body) > self._most_bytes:
                return


def refused(refusal: BodyRefused) -> Response:
    """The answer to a request whose body is not read. The connection ends with it."""
    error = {"message": refusal.message, "type": "invalid_request_error", "param": None}
    body = {"error": error | {"code": "body_refused"}}
    return JSONResponse(body, refusal.status, headers={"Connection": "close"})


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
        while True:
            timeout_s = None if start is None else HEAD_AFTER_S
            try:
                message = await asyncio.wait_for(messages.get(), timeout_s)
            except asyncio.TimeoutError:
                message = {"type": "http.response.body", "body": b""}
            if message is None:
                break
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
    one of `losses` if it dies. `on_end` is called once the answer has ended.
    """

    def __init__(
        self,
        call: HttpCall,
        ask: Callable[[HttpCall], AsyncGenerator[AnswerPart, None]],
        losses: tuple[type[BaseException], ...],
        on_end: Callable[[HttpCall], None],
    ) -> None:
        super().__init__()
        self._on_end = on_end
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
            self._on_end(self._call)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind: bytes | None = None  # of content, once the client has status and headers
        has_body = False
        for attempt in range(MOST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_S * attempt)
            try:
                parts = with_pauses(self._ask(self._call), LIFE_PERIOD_S)
                async with aclosing(parts):
                    async for part in parts:
                        body = b"" if part is None else part.body
                        if part is None:
                            body = LIFE if kind == EVENTS else b""
                        elif part.headers is not None and kind is None:
                            kind = kind_of(part)
                            head = {"status": part.status, "headers": part.headers}
                            await send({"type": "http.response.start", **head})
                        elif part.headers is not None and kind_of(part) != kind:
                            body = self._event(json.loads(body), kind)  # a refusal of the next one
                        has_body = has_body or (part is not None and bool(body))
                        if body:
                            await _send_body(send, body)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            except self._losses as error:
                logger.warning("a replica was lost: %s", error)
                if has_body:
                    break
        if kind is None:
            refusal = JSONResponse({"error": _error()}, 503, headers={"Retry-After": "1"})
            await refusal(scope, receive, send)
        else:
            await self._end_with_error(kind, send)

    async def _end_with_error(self, kind: bytes, send: Send) -> None:
        """Send an event or a line where there are such; else the answer stays incomplete, which the
        client sees by its length.
        """
        if kind in (LINES, EVENTS):
            await _send_body(send, self._event({"error": _error()}, kind), more=False)
        else:
            raise ConnectionError(LOST)

    def _event(self, refusal: dict[str, Any], kind: bytes | None) -> bytes:
        """The body of a refusal as an event or line of the stream."""
        if kind == LINES:
            error = refusal["error"]  # a text, as in Ollama's API
            text = error.get("message", LOST) if isinstance(error, dict) else error
            return json.dumps({"error": text}).encode() + b"\n"
        if self._call.scope["path"].rstrip("/").endswith("/messages"):
            event = "event: error\ndata: " + json.dumps({"type": "error"} | refusal)
        else:
            event = "data: " + json.dumps(refusal)
        return f"{event}\n\n".encode()


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def kind_of(part: AnswerPart) -> bytes:
    """Return the media type that the headers of an answer name."""
    return dict(part.headers or ()).get(b"content-type", b"").partition(b";")[0]


def _error() -> dict[str, Any]:
    return {"message": LOST, "type": "server_error", "param": None, "code": "replica_lost"}


async def _gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
