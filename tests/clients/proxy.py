"""A proxy between a client and the server: it notes every exchange, and can force a call of a tool.

The bundled model calls no tool by itself. A forced call has arguments that the test chose, so that
it is harmless and short.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.clients.environments import Outcome

GENERATING = ("/chat/completions", "/responses", "/messages", "/api/chat")
ENDS = (b"data: [DONE]", b"event: response.completed", b"event: message_stop", b'"done": true')
OTHER_WAY = b"thread_unsupported_request"  # Anthropic's libraries then send the whole conversation
METHODS = ["GET", "POST", "HEAD", "OPTIONS", "DELETE"]
HOP_BY_HOP = {"connection", "content-length", "date", "host", "server", "transfer-encoding"}


@dataclass(slots=True)
class Exchange:
    """A request as the client sent it, and what the server answered."""

    method: str
    path: str
    body: dict[str, Any]
    status: int = 0
    answer: bytes = b""
    is_over: bool = False  # the server has sent its whole answer

    @property
    def generates(self) -> bool:
        return self.method == "POST" and self.path.endswith(GENERATING)

    @property
    def is_stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def ended_well(self) -> bool:
        """Its answer came, and a stream has the event with which its API ends."""
        if self.is_stream:  # whose end some clients do not wait for after that event
            return self.status == 200 and any(end in self.answer for end in ENDS)
        return self.is_over and self.status == 200

    @property
    def has_result(self) -> bool:
        """A tool's result is among what was sent."""
        written = json.dumps(self.body)
        marks = ('"role": "tool"', '"type": "tool_result"', '"type": "function_call_output"')
        return any(mark in written for mark in marks)


@dataclass(slots=True)
class Forced:
    """A call that the first request with this tool has to answer with."""

    name: str
    arguments: dict[str, Any]

    def put_into(self, body: dict[str, Any]) -> bool:
        """Change the request so. Returns False if it does not have the tool."""
        if self == NO_CALL:
            body["tool_choice"] = "none"
            return True
        for tool in body.get("tools") or ():
            function = tool.get("function", tool)
            if function.get("name") == self.name:
                key = "input_schema" if "input_schema" in function else "parameters"
                function[key] = self._schema()
                body["tool_choice"] = self._choice("function" in tool, key == "input_schema")
                return True
        return False

    def _schema(self) -> dict[str, Any]:
        only = {name: {"enum": [value]} for name, value in self.arguments.items()}
        required = list(self.arguments)
        return {
            "type": "object",
            "properties": only,
            "required": required,
            "additionalProperties": False,
        }

    def _choice(self, is_chat: bool, is_anthropic: bool) -> dict[str, Any]:
        if is_chat:
            return {"type": "function", "function": {"name": self.name}}
        return {"type": "tool" if is_anthropic else "function", "name": self.name}


NO_CALL = Forced("", {})  # the first request has to be answered without any


@dataclass(slots=True)
class Proxy:
    """Where clients send their requests, and what was exchanged so far."""

    upstream: str
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    forced: Forced | None = None

    @property
    def generated(self) -> list[Exchange]:
        return [e for e in self.exchanges if e.generates and OTHER_WAY not in e.answer]

    @property
    def refused(self) -> list[str]:
        """What the server would not do, in its words. A look for what there is may fail, and so
        may what a client then does in another way.
        """
        return [
            f"{e.method} {e.path} {e.status} {e.answer.decode(errors='replace')[:300]}"
            for e in self.exchanges
            if e.method == "POST" and e.status >= 400 and OTHER_WAY not in e.answer
        ]

    def is_idle(self) -> bool:
        """The server computes nothing."""
        text = httpx.get(f"{self.upstream}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("moe_infinity_sequences{")]
        assert len(lines) == 3
        return all(line.endswith(" 0.0") for line in lines)

    def wait_until_idle(self, limit_s: float = 10) -> None:
        """Wait until the server has noticed that a client is gone."""
        end = time.monotonic() + limit_s
        while not self.is_idle():
            assert time.monotonic() < end, "the server goes on"
            time.sleep(0.1)

    def check(self, outcome: Outcome, kind: str) -> None:
        """The client is content, the server refused nothing, and every answer ended; or, for the
        kind "cancel", the server stopped.
        """
        assert self.refused == []
        assert outcome.code == 0, outcome
        assert self.generated
        if kind == "cancel":
            self.wait_until_idle()
        else:
            assert all(exchange.ended_well for exchange in self.generated)

    def log(self) -> str:
        """One JSON object for each exchange."""
        lines = [asdict(e) | {"answer": e.answer.decode(errors="replace")} for e in self.exchanges]
        return "".join(json.dumps(line) + "\n" for line in lines)

    async def handle(self, request: Request) -> Response:
        content = await request.body()
        try:
            body = json.loads(content or b"{}")
        except ValueError:
            body = {}
        exchange = Exchange(request.method, request.url.path, body)
        self.exchanges.append(exchange)
        changed = json.loads(json.dumps(body))
        if self.forced is not None and self.forced.put_into(changed):
            self.forced = None
            content = json.dumps(changed).encode()
        return await self._forward(request, content, exchange)

    async def _forward(self, request: Request, content: bytes, exchange: Exchange) -> Response:
        client = httpx.AsyncClient(base_url=self.upstream, timeout=None)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {k: v for k, v in request.headers.items() if k not in HOP_BY_HOP}
        headers["accept-encoding"] = "identity"
        sent = client.build_request(request.method, target, content=content, headers=headers)
        answer = await client.send(sent, stream=True)
        exchange.status = answer.status_code

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    exchange.answer += piece
                    yield piece
                exchange.is_over = True
            finally:
                await answer.aclose()
                await client.aclose()

        kept = {k: v for k, v in answer.headers.items() if k not in HOP_BY_HOP}
        return StreamingResponse(pieces(), answer.status_code, kept)


@contextmanager
def proxying(upstream: str) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    app = Starlette(routes=[Route("/{path:path}", proxy.handle, methods=METHODS)])
    app.add_exception_handler(ClientDisconnect, lambda request, error: Response(status_code=499))
    settings = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        proxy.url = f"http://127.0.0.1:{port}"
        yield proxy
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
