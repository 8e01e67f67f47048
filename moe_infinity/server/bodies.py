"""The body of a request, on its way from the connection to fields that are checked.

parts --> bytes, within limits of size and time --> JSON, few items --> fields, or the first error
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from moe_infinity.server import limits
from moe_infinity.server.preparation import GONE, Preparation
from moe_infinity.server.refusals import (
    BadRequest,
    Refused,
    refused_by,
    require_within,
    wrong_fields,
)

LARGE = 64 * limits.KIB  # bytes of a body that takes much memory while it is prepared
SMALL = 16 << 10  # bytes of a body that is read at once, which takes a few milliseconds at most
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # PowerShell writes it before a text
# A whole pair of surrogates, a lone one, or any other escape, in which none of them begins.
ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
STRING = re.compile(rb'"[^"]*"')  # one that knew escapes would try again at each of them


class BodyRoom:
    """The memory that bodies have, together and of each client."""

    def __init__(self, max_body: int) -> None:
        """`max_body`: the bytes of the largest body, which has room if no other is there."""
        self._used: Counter[str] = Counter()
        of_one = limits.BODIES_OF_ONE
        self._of_one = replace(of_one, most=max(of_one.most, max_body))
        of_all = limits.BODIES
        self._of_all = replace(of_all, most=max(of_all.most, 2 * max_body))

    def take(self, client: str, num_bytes: int) -> None:
        """Raises Refused (429) where there is no room."""
        self._used[client] += num_bytes
        require_within(self._of_one, self._used[client])
        require_within(self._of_all, self._used.total())

    def give_back(self, client: str, num_bytes: int) -> None:
        self._used[client] -= num_bytes
        if self._used[client] <= 0:
            del self._used[client]


class JsonRequest(HttpRequest):
    """A request whose body is JSON, whatever its Content-Type: `curl -d` names a form."""

    def __init__(
        self,
        request: HttpRequest,
        *,
        max_bytes: int,
        kind: type[BaseModel] | None,
        room: BodyRoom,
        preparation: Preparation,
    ) -> None:
        """`kind`: of the body; None: any JSON."""
        headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._max_bytes = max_bytes
        self._kind = kind
        self._room = room
        self._preparation = preparation
        self._num_bytes = 0

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body in parts.

        Raises Refused (413) as soon as it is too large, and (429) where there is no room for it.
        Received bytes count, so a wrong Content-Length does not help a client.
        """
        async for part in super().stream():
            if self._num_bytes + len(part) > self._max_bytes:
                message = f"the body is larger than {self._max_bytes} bytes"
                raise Refused(limits.BODY.status, message, code="body_too_large")
            self._num_bytes += len(part)
            self._room.take(self.state.client, len(part))
            yield part

    async def body(self) -> bytes:
        """The whole body. Raises Refused (408) if it takes too long, and (415) if it is packed."""
        coding = self.headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            message = f"the body is packed (Content-Encoding: {coding[:80]}): send it as it is"
            raise Refused(415, message, {"Connection": "close"}, code="unsupported_encoding")
        try:
            data = await asyncio.wait_for(super().body(), limits.UPLOAD_S.most)
        except ClientDisconnect as error:
            raise Refused(GONE, "the client has gone", code="cancelled") from error
        except asyncio.TimeoutError as error:
            message = f"the body did not arrive within {limits.UPLOAD_S.most:g} s"
            # Else uvicorn goes on receiving the body.
            headers = {"Connection": "close"}
            raise Refused(
                limits.UPLOAD_S.status, message, headers, code="upload_timeout"
            ) from error
        self.state.is_large = len(data) > LARGE
        return data

    async def json(self) -> Any:
        """The body, as its kind. Raises Refused."""
        data = await self.body()
        self._body = b""  # the request lives as long as its answer
        read = partial(read_json, data, self._kind, self.state.deployment)
        return read() if len(data) <= SMALL else await self._preparation.run(self, read)

    def end(self) -> None:
        """Give back the room of the body."""
        self._room.give_back(self.state.client, self._num_bytes)
        if self._num_bytes > LARGE:
            self._preparation.return_memory_soon()
        self._num_bytes = 0


def read_json(data: bytes, kind: type[BaseModel] | None, deployment: str | None = None) -> Any:
    """Return a body by the parser of pydantic, as a value of its kind. A deployment is its model,
    whatever else it names, as in Azure's API.

    That parser refuses deep nesting, which the standard library lets through. Raises Refused.
    """
    data = data.removeprefix(BYTE_ORDER_MARK)
    require_within(limits.ITEMS, num_items(data))
    try:
        value = from_json(without_lone_surrogates(data), allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if _has_infinite(value):
        raise BadRequest("the body has a number beyond 1.8e308")
    if isinstance(value, dict):
        # Clients without such an argument, as those in JavaScript, send it as it is.
        more = value.get("extra_body")
        value = more | value if isinstance(more, dict) else value
        value |= {} if deployment is None else {"model": deployment}
    if kind is None:
        return value
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise refused_by(wrong_fields(error)) from error


def _has_infinite(value: Any) -> bool:
    """Return True for JSON with a number like 1e999, which no answer could repeat."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)
        elif isinstance(each, float) and math.isinf(each):
            return True
    return False


def without_lone_surrogates(data: bytes) -> bytes:
    """Return a JSON text with U+FFFD in place of lone surrogates: JavaScript writes one where a
    text was cut within a character, and no text in UTF-8 can have it.
    """
    if b"\\ud" not in data and b"\\uD" not in data:
        return data
    return ESCAPE.sub(lambda found: b"\\ufffd" if found["lone"] else found[0], data)


def num_items(data: bytes) -> int:
    """Return how many objects, arrays, names and values a JSON text has at most."""
    marks = (b",", b"{", b"[", b":")
    found = sum(map(data.count, marks))
    if found <= limits.ITEMS.most:
        return found  # also where some of them are in strings
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    num_strings = plain.count(b'"') // 2
    if num_strings > limits.ITEMS.most:
        return num_strings  # taking each of them out would take much memory
    outside = STRING.sub(b"", plain)
    return max(num_strings, sum(map(outside.count, marks)))
