"""Refusals: the checks that every request passes first (origin and API key), and the status and the
error object of OpenAI's that answer each error.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse

from moe_infinity.errors import Cancelled, CheckpointError
from moe_infinity.server.limits import Limit, amount
from moe_infinity.server.sampling import ConstraintFailed
from moe_infinity.server.sequences import (
    DeadlineExceeded,
    EngineStopped,
    NoEmbeddings,
    QueueFull,
)

# In the location of an error, pydantic also names which of several types it tried.
TRIED_TYPE = re.compile(r"(constrained-)?(str|int)|.*\[.*")
MOST_SHOWN = 1_000  # characters of a message, which may quote what a client sent
RETRY_AFTER_S = 2  # about the time until a sequence of a batch ends; any number would do


class ErrorObject(BaseModel):
    message: str
    type: str = "invalid_request_error"
    param: str | None = None  # the field that is wrong
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every refusal."""

    error: ErrorObject


class Refused(HTTPException):
    """An answer with a status other than 200. `fields` are those of ErrorObject."""

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> None:
        if len(message) > MOST_SHOWN:
            message = f"{message[:MOST_SHOWN]} ..."
        super().__init__(status, message, headers)
        self.error = ErrorObject(message=message, **fields)
        if self.error.param is not None:
            self.error.param = self.error.param[:MOST_SHOWN]

    def response(self) -> JSONResponse:
        body = ErrorBody(error=self.error).model_dump()
        return JSONResponse(body, self.status_code, headers=self.headers)


class BadRequest(Refused):
    """A request that cannot be served as it is. The message begins with the field `param`."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        message = f"{param}: {message}" if param else message
        super().__init__(400, message, param=param, code=code)


def require_within(limit: Limit, number: float, param: str | None = None) -> None:
    """Raise Refused, which names `param`, for more than a limit allows."""
    if number > limit.most:
        message = f"{limit.what}: at most {amount(limit)}"
        message = f"{param}: {message}" if param else message
        raise Refused(limit.status, message, param=param, code="too_large")


class PromptTooLong(BadRequest):
    """A prompt leaves no room for an answer."""

    def __init__(self, num_tokens: int, most: int, *, param: str, is_counted: bool = True) -> None:
        """`is_counted`: otherwise the prompt has this many tokens or more."""
        has = f"{num_tokens}" if is_counted else f"{num_tokens} or more"
        message = f"this model's maximum context length is {most} tokens, the prompt has {has}"
        super().__init__(message, param=param, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.most = most


def refused_by(error: BaseException) -> Refused:
    """The answer for an error. The client sees only the class of an unexpected error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestValidationError):
        return _refused_by_fields(error)
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return Refused(429, f"busy: {error}", headers, type="rate_limit_error", code="queue_full")
    if isinstance(error, EngineStopped):
        return Refused(503, str(error), type="server_error", code="stopped")
    if isinstance(error, DeadlineExceeded):
        return Refused(504, str(error), type="server_error", code="deadline_exceeded")
    if isinstance(error, NoEmbeddings):
        return BadRequest(str(error), code="no_embeddings")
    if isinstance(error, ConstraintFailed):
        return BadRequest(f"the answer's grammar: {error}", code="constraint_failed")
    if isinstance(error, Cancelled):
        return Refused(499, str(error), type="server_error", code="cancelled")
    what = f"generation failed: {type(error).__name__}"
    if isinstance(error, CheckpointError):
        what += ": a file of the model cannot be read, or was changed (the server's log names it)"
    return Refused(500, what, type="server_error", code="internal_error")


def wrong_fields(error: ValidationError) -> RequestValidationError:
    """Return the error of a body, as FastAPI would raise it."""
    return RequestValidationError(
        [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
    )


def _refused_by_fields(error: RequestValidationError) -> Refused:
    """A refusal with status 400 that names the first wrong field."""
    errors = error.errors()
    # A location begins with "body". A field that allows several types has an error for each; the
    # deepest one is of the type that the client meant.
    of_field = [each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]]
    shown = max(of_field, key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])))
    message = shown["msg"]
    if shown["type"] in ("literal_error", "union_tag_invalid"):
        message = f"not supported with this value: {message}"
    if len(shown["loc"]) == 1:
        return BadRequest("the body must be a JSON object")
    param, *rest = map(str, shown["loc"][1:])
    place = ".".join([param, *(part for part in rest if not TRIED_TYPE.fullmatch(part))])
    return Refused(400, f"{place}: {message}", param=param)


def refuse_two_lengths(request: HttpRequest) -> None:
    """Raises Refused for a body with two lengths. A proxy that goes by the other one would take the
    rest for the request of somebody else, so the connection ends, too.
    """
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        message = "give either Content-Length or Transfer-Encoding"
        raise Refused(400, message, headers={"Connection": "close"}, code="two_lengths")


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
        raise Refused(403, "requests from pages of other sites are refused", code="cross_site")


def _has_own_origin(request: HttpRequest) -> bool:
    """Return True for a request of our own page, or of no browser: then it has no origin."""
    origin = request.headers.get("origin")
    if origin is None:
        return True
    _, _, place = origin.lower().partition("://")  # empty for "null"
    host = request.headers.get("host", "").lower()
    return bool(place) and place in (host, host.removesuffix(":80"))  # browsers omit port 80


def refuse_other_names(request: HttpRequest, allowed: Sequence[str]) -> None:
    """Raises Refused for a request to a name that is not known: a site may let its own name stand
    for our address (DNS rebinding), and to a browser it then asks itself.
    """
    host = request.headers.get("host", "").lower()
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name in ("", "localhost", *allowed):
        return
    try:
        ip_address(name)
    except ValueError:
        message = f"this server is not known as {name!r}: start it with --allowed-host {name}"
        raise Refused(403, message, code="unknown_host") from None


def owner_of(request: HttpRequest, api_keys: Sequence[str]) -> str:
    """The key that a request was sent with; empty if none is needed. Raises Refused (401) without a
    right one. Anthropic's clients may send it as x-api-key, Azure's as api-key. Comparisons take
    constant time.
    """
    if not api_keys:
        return ""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key") or request.headers.get("api-key", "")
    # Starlette decodes headers as Latin-1; encoding gives back the bytes that were sent.
    sent = given.strip().encode("latin-1")
    right = [key for key in api_keys if hmac.compare_digest(sent, key.encode())]
    if not right:
        raise Refused(
            401,
            "this server wants an API key: Authorization: Bearer KEY, or x-api-key: KEY",
            headers={"WWW-Authenticate": "Bearer"},
            code="invalid_api_key",
        )
    return right[0]


def address_of(request: HttpRequest) -> str:
    """The address of a client without a key, whose requests share turns. Of IPv6, the network that
    one client has.
    """
    host = request.client.host if request.client is not None else ""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    return str(address) if address.version == 4 else str(ip_network(f"{host}/64", strict=False))
