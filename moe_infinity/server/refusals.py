"""Refusals: the status and the error object of OpenAI's that answer each error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from moe_infinity.errors import Cancelled
from moe_infinity.server.constraints import ConstraintFailed
from moe_infinity.server.prompt_outputs import NoEmbeddings
from moe_infinity.server.sequences import DeadlineExceeded, EngineStopped, QueueFull

# In the location of an error, pydantic also names which of several types it tried.
TRIED_TYPE = re.compile(r"(constrained-)?str|.*\[.*")
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
        super().__init__(status, message, headers)
        self.error = ErrorObject(message=message, **fields)

    def response(self) -> JSONResponse:
        body = ErrorBody(error=self.error).model_dump()
        return JSONResponse(body, self.status_code, headers=self.headers)


class BadRequest(Refused):
    """A request that cannot be served as it is. The message begins with the field `param`."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        message = f"{param}: {message}" if param else message
        super().__init__(400, message, param=param, code=code)


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
    return Refused(500, what, type="server_error", code="internal_error")


def _refused_by_fields(error: RequestValidationError) -> Refused:
    """A refusal with status 400 that names the first wrong field."""
    errors = error.errors()
    # A location begins with "body". A field that allows several types has an error for each; the
    # deepest one is of the type that the client meant.
    of_field = [each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]]
    shown = max(of_field, key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])))
    message = shown["msg"]
    if shown["type"] == "extra_forbidden":
        message = "this field is not supported"
    elif shown["type"] == "literal_error":
        message = f"not supported with this value: {message}"
    if len(shown["loc"]) == 1:
        return BadRequest("the body must be a JSON object")
    param, *rest = map(str, shown["loc"][1:])
    place = ".".join([param, *(part for part in rest if not TRIED_TYPE.fullmatch(part))])
    return Refused(400, f"{place}: {message}", param=param)
