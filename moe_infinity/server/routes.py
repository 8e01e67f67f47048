"""All routes share this: how a path is read, who may ask, and how refusals are answered, logged and
counted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_infinity.server import refusals
from moe_infinity.server.anthropic import error_of
from moe_infinity.server.bodies import BodyRoom, JsonRequest
from moe_infinity.server.metrics import Metrics
from moe_infinity.server.preparation import GONE, Preparation
from moe_infinity.server.refusals import Refused, refused_by
from moe_infinity.server.sampling import ConstraintFailed

logger = logging.getLogger(__name__)
MOST_LOGGED = 300  # characters of a refusal
# How paths of Azure's API begin.
AZURE = re.compile("/+openai(/+deployments/+(?P<model>[^/]+))?(?=/)")
ADDRESS = re.compile("https?://[^/]*")  # in front of the path, as proxies are asked
IN_FRONT = re.compile("/.*(?=/v1(/|$))")


class Paths:
    """An ASGI application that gets the paths that clients mean: without slashes too many, with /v1
    where it was left out, and without what stands in front of it, such as another /v1 or a name of
    the client's service. A deployment of Azure's API becomes `state.deployment`.
    """

    def __init__(self, app: ASGIApp, routers: Sequence[APIRouter]) -> None:
        self._app = app
        routes = [route for router in routers for route in router.routes]
        self._patterns = [route.path_regex for route in routes if isinstance(route, APIRoute)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = ADDRESS.sub("", scope["path"], count=1)
            azure = AZURE.match(path)
            state = {**scope.get("state", {}), "deployment": azure and azure["model"]}
            path = self.meant(path)
            scope = {**scope, "path": path, "raw_path": path.encode(), "state": state}
        await self._app(scope, receive, send)

    def meant(self, path: str) -> str:
        """Return the path of a route, or a path without one as it is."""
        path = re.sub("/+", "/", path).rstrip("/") or "/"
        bare = AZURE.sub("", path, count=1) if AZURE.match(path) else path
        in_front = IN_FRONT.match(bare)
        for start in (bare, bare[in_front.end() :] if in_front else bare):
            for each in (start, f"/v1{start}", start.removeprefix("/v1")):
                if any(pattern.match(each) for pattern in self._patterns):
                    return each
        return path


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may ask, and where refusals are noted."""

    is_on_loopback: bool
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    api_keys: tuple[str, ...]
    max_body: int  # bytes
    metrics: Metrics
    preparation: Preparation
    room: BodyRoom

    def admit(self, request: HttpRequest, kind: type[BaseModel] | None) -> JsonRequest:
        """The request with its owner and its client, for a body of this kind. Raises Refused."""
        refusals.refuse_two_lengths(request)
        origin = request.headers.get("origin")
        if origin is None or not {origin, "*"} & set(self.allowed_origins):
            refusals.refuse_other_sites(request)
        if self.is_on_loopback:
            refusals.refuse_other_names(request, self.allowed_hosts)
        request.state.owner = refusals.owner_of(request, self.api_keys)
        request.state.is_large = False  # its body, before that is read
        request.state.client = request.state.owner or refusals.address_of(request)
        return JsonRequest(
            request,
            max_bytes=self.max_body,
            kind=kind,
            room=self.room,
            preparation=self.preparation,
        )

    def note(self, request: HttpRequest, error: BaseException) -> Refused:
        """Log and count a refusal or failure. Returns what the client gets."""
        refused = refused_by(error)
        route = route_of(request)
        if refused.status_code == 500:
            logger.error("%s failed", route, exc_info=error)
        if refused.status_code != GONE:
            log_refusal(request.method, route, refused, error)
            self.metrics.refusals.labels(route, refused.status_code).inc()
        return refused


def route_of(request: HttpRequest) -> str:
    """Return the pattern of the route that a request took; its path is the client's to choose."""
    route = request.scope.get("route")
    return str(getattr(route, "path", "no route"))


def log_refusal(method: str, route: str, refused: Refused, error: BaseException) -> None:
    """Write one line. It leaves out what a template or a grammar said, which may quote a prompt."""
    what = refused.error.message
    quoted = error if isinstance(error, ConstraintFailed) else refused.__cause__
    if quoted is not None and str(quoted):
        what = what.replace(str(quoted), type(quoted).__name__)
    what = re.sub("[^ -~]+", " ", what)
    logger.warning("refused %s %s: %d %s", method, route, refused.status_code, what[:MOST_LOGGED])


def refusal_for(request: HttpRequest, refused: Refused) -> Response:
    """The answer in the form that the API of this path has for errors."""
    path = request.url.path
    if path.startswith("/api/"):
        body: dict[str, Any] = {"error": refused.error.message}
    elif path.startswith("/v1/messages") or wants_anthropic(request):
        body = error_of(refused)
    else:
        return refused.response()
    return JSONResponse(body, refused.status_code, headers=refused.headers)


def wants_anthropic(request: HttpRequest) -> bool:
    """Return True for a client of Anthropic's, which names the version of the API."""
    return "anthropic-version" in request.headers


class GuardedRoute(APIRoute):
    """A route behind the checks of key and origin. Every answer is counted in the metrics."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        declared: Any = None if self.body_field is None else self.body_field.field_info.annotation
        # For Python 3.10 dict[str, Any] is a type, too.
        is_model = isinstance(declared, type(BaseModel))
        kind: type[BaseModel] | None = declared if is_model else None

        async def guarded(request: HttpRequest) -> Response:
            guard: Guard = request.app.state.guard
            admitted = None
            try:
                admitted = guard.admit(request, kind)
                response = await handle(admitted)
            except Exception as error:
                response = refusal_for(request, guard.note(request, error))
                forget(error)
            finally:
                if admitted is not None:
                    admitted.end()
            guard.metrics.responses.labels(self.path, response.status_code).inc()
            return response

        return guarded


def forget(error: BaseException | None) -> None:
    """Drop what the frames and causes of an error refer to, such as a body of megabytes. Futures
    refer to their errors, and these to the futures: they wait for the garbage collector.
    """
    while error is not None:
        clear_frames(error.__traceback__)
        cause = error.__cause__ or error.__context__
        error.__cause__ = error.__context__ = None
        error = cause


def add_get(router: APIRouter, path: str, handler: Callable[..., Any], **described: Any) -> None:
    """Add a route for GET, and for HEAD, which the document leaves out."""
    router.add_api_route(path, handler, **described)
    router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
