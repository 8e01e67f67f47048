"""The checks that every request passes first: origin, API key and size of the body.

A refusal is OpenAI's error object.
"""

from __future__ import annotations

import hmac
import re
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse

from moe_infinity.errors import Cancelled
from moe_infinity.server.protocol import BadRequest
from moe_infinity.server.sequences import DeadlineExceeded, EngineStopped, QueueFull

# In the location of an error, pydantic also names which of several types it tried.
TRIED_TYPE = re.compile(r"(constrained-)?str|.*\[.*")
RETRY_AFTER_S = 2  # about the time until a sequence of a batch ends; any number would do


class Refused(Exception):
    """An answer with a status other than 200."""

    def __init__(self, status: int, error: dict[str, Any], headers: dict[str, str]) -> None:
        super().__init__(error["message"])
        self.status = status
        self.error = error
        self.headers = headers

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.error}, self.status, headers=self.headers)


def refuse(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Refused:
    """A refusal with OpenAI's error object; `kind` is its "type". The caller raises it."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return Refused(status, error, headers or {})


def refused_by(error: BaseException) -> Refused:
    """The answer for an error. The client sees only the class of an unexpected error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, BadRequest):
        message = f"{error.param}: {error}" if error.param else str(error)
        return refuse(400, message, param=error.param, code=error.code)
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        kind = "rate_limit_error"
        return refuse(429, f"busy: {error}", kind=kind, code="queue_full", headers=headers)
    if isinstance(error, EngineStopped):
        return refuse(503, str(error), kind="server_error", code="stopped")
    if isinstance(error, DeadlineExceeded):
        return refuse(504, str(error), kind="server_error", code="deadline_exceeded")
    if isinstance(error, Cancelled):
        return refuse(499, str(error), kind="server_error", code="cancelled")
    what = f"generation failed: {type(error).__name__}"
    return refuse(500, what, kind="server_error", code="internal_error")


def refused_by_fields(error: ValidationError) -> Refused:
    """A refusal with status 400 that names the first wrong field."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    # A field that allows several types has an error for each. The type that the client meant got
    # furthest.
    of_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    told = max(of_field, key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])))
    message = told["msg"]
    if told["type"] == "extra_forbidden":
        message = "this field is not supported"
    elif told["type"] == "literal_error":
        message = f"not supported with this value: {message}"
    if not told["loc"]:
        return refuse(400, message)
    param, *rest = map(str, told["loc"])
    place = ".".join([param, *(part for part in rest if not TRIED_TYPE.fullmatch(part))])
    return refuse(400, f"{place}: {message}", param=param)


def refuse_other_sites(request: HttpRequest) -> None:
    """Raises Refused for a request that a page of another site sends from a user's browser.

    Such a page cannot read the answer, but its request would use the model. Browsers name the
    relation of the sites (Sec-Fetch-Site) only over TLS and on loopback; elsewhere the request
    has only the page's origin.
    """
    marked = request.headers.get("sec-fetch-site")
    if marked in ("same-origin", "none"):  # also behind a proxy that changes Host
        return
    if marked == "cross-site" or not _has_own_origin(request):
        raise refuse(403, "requests from pages of other sites are refused", code="cross_site")


def _has_own_origin(request: HttpRequest) -> bool:
    """Whether the request comes from our own page, or from no browser: then it has no origin."""
    origin = request.headers.get("origin")
    if origin is None:
        return True
    _, _, place = origin.lower().partition("://")  # empty for "null"
    host = request.headers.get("host", "").lower()
    return bool(place) and place in (host, host.removesuffix(":80"))  # browsers omit port 80


def require_key(request: HttpRequest, api_key: str | None) -> None:
    """Raises Refused (401) without the key. The comparison takes constant time."""
    if api_key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Starlette decodes headers as Latin-1; encoding gives back the bytes that were sent.
    is_right = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise refuse(
            401,
            "this server wants an API key: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def read_body(request: HttpRequest, max_bytes: int) -> bytes:
    """The body. Raises Refused (413) as soon as it is larger than `max_bytes`.

    Received bytes count, so a wrong Content-Length does not help a client.
    """
    too_large = refuse(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)
