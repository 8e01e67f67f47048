"""The routes of the HTTP API.

Nothing here waits for the model. The engine's thread generates and posts its outputs to the event
loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response

from moe_infinity.errors import ConfigError
from moe_infinity.model import MoE
from moe_infinity.server import auth
from moe_infinity.server.answers import Answer, ChatAnswer, CompletionAnswer
from moe_infinity.server.document import document_of
from moe_infinity.server.engine import Engine
from moe_infinity.server.exchange import Exchange
from moe_infinity.server.metrics import Metrics, stats_of
from moe_infinity.server.prompts import PromptReader
from moe_infinity.server.protocol import (
    BadRequest,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from moe_infinity.server.responses import ResponseAnswer, ResponsesBody
from moe_infinity.server.sequences import Request

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:",
}
AnyBody = TypeVar("AnyBody", bound=BaseModel)
Handler = Callable[[HttpRequest], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """What the routes need to know beside the model."""

    model_name: str  # as clients call it
    api_key: str | None = None  # None: requests need no key
    max_body_bytes: int = 4 << 20


def create_app(moe: MoE, engine: Engine, reader: PromptReader, config: ApiConfig) -> FastAPI:
    """The ASGI application. The caller starts and stops the engine."""
    api = Api(moe, engine, reader, config)
    app = FastAPI(title="MoE-Infinity", docs_url=None, redoc_url=None, openapi_url=None)
    for path, handler in api.open_routes().items():
        app.add_route(path, handler, methods=["GET"])
    for method, routes in (("GET", api.get_routes()), ("POST", api.post_routes())):
        for path, handler in routes.items():
            app.add_route(path, api.guarded(path, handler), methods=[method])
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return auth.refuse(error.status_code, message).response()


class Api:
    """The handlers of all routes, and the objects they share."""

    def __init__(self, moe: MoE, engine: Engine, reader: PromptReader, config: ApiConfig) -> None:
        self._moe = moe
        self._engine = engine
        self._reader = reader
        self._config = config
        self._metrics = Metrics(moe, engine)
        self._created = int(time.time())

    def open_routes(self) -> dict[str, Handler]:
        """Routes that need no key. They show nothing of requests or answers."""
        return {
            "/": self.page,
            "/health": self.health,
            "/health/live": self.live,
            "/health/ready": self.ready,
        }

    def get_routes(self) -> dict[str, Handler]:
        return {
            "/metrics": self.metrics,
            "/openapi.json": self.document,
            "/stats": self.stats,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
        }

    def post_routes(self) -> dict[str, Handler]:
        return {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat_completions,
            "/v1/responses": self.responses,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }

    def guarded(self, path: str, handler: Handler) -> Handler:
        """The handler behind the checks of key and origin.

        Errors become answers of OpenAI's form, and every answer is counted in the metrics.
        """

        async def guarded(request: HttpRequest) -> Response:
            try:
                auth.refuse_other_sites(request)
                auth.require_key(request, self._config.api_key)
                response = await handler(request)
            except ValidationError as error:
                response = auth.refused_by_fields(error).response()
            except Exception as error:
                refused = auth.refused_by(error)
                if refused.status == 500:
                    logger.exception("%s failed", request.url.path)
                response = refused.response()
            self._metrics.responses.labels(path, response.status_code).inc()
            return response

        return guarded

    # about the server

    async def page(self, request: HttpRequest) -> Response:
        return HTMLResponse(PAGE.read_text("utf-8"), headers=SAFE_HEADERS)

    async def live(self, request: HttpRequest) -> Response:
        is_live = self._engine.is_alive
        return JSONResponse({"live": is_live}, 200 if is_live else 503)

    async def ready(self, request: HttpRequest) -> Response:
        is_ready = self._engine.is_ready
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def health(self, request: HttpRequest) -> Response:
        engine = self._engine
        body: dict[str, Any] = {
            "live": engine.is_alive,
            "ready": engine.is_ready,
            "step_s": engine.step_age_s,
        }
        if engine.death is not None:
            body["error"] = f"the engine died: {type(engine.death).__name__}"
        return JSONResponse(body, 200 if engine.is_ready else 503)

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def stats(self, request: HttpRequest) -> Response:
        return JSONResponse(stats_of(self._moe, self._engine, model=self._config.model_name))

    async def document(self, request: HttpRequest) -> Response:
        return JSONResponse(document_of(self._config.model_name))

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: HttpRequest) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        card = {"id": self._config.model_name, "object": "model", "created": self._created}
        return card | {
            "owned_by": "moe-infinity",
            "max_model_len": self._reader.defaults.max_context,
        }

    # generating

    async def completions(self, request: HttpRequest) -> Response:
        body = await self._read(request, CompletionBody)
        requests = await run_in_threadpool(self._reader.completion, body)
        return await self._generate(request, body, requests, CompletionAnswer)

    async def chat_completions(self, request: HttpRequest) -> Response:
        body = await self._read(request, ChatBody)
        requests = await run_in_threadpool(self._reader.chat, body)
        return await self._generate(request, body, requests, ChatAnswer)

    async def responses(self, request: HttpRequest) -> Response:
        asked = await self._read(request, ResponsesBody)
        body = asked.for_chat()
        try:
            requests = await run_in_threadpool(self._reader.chat, body)
        except BadRequest as error:
            error.param = "input" if error.param == "messages" else error.param
            raise
        return await self._generate(request, body, requests, partial(ResponseAnswer, asked=asked))

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await self._read(request, TokenizeBody)
        if body.messages is not None:
            ids = await run_in_threadpool(self._reader.chat_ids, body.messages)
        else:
            ids = await run_in_threadpool(self._reader.text_ids, body.prompt or "")
        max_context = self._reader.defaults.max_context
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": max_context})

    async def detokenize(self, request: HttpRequest) -> Response:
        body = await self._read(request, DetokenizeBody)
        text = await run_in_threadpool(self._reader.text_of, body.tokens)
        return JSONResponse({"prompt": text})

    async def _read(self, request: HttpRequest, kind: type[AnyBody]) -> AnyBody:
        raw = await auth.read_body(request, self._config.max_body_bytes)
        body = kind.model_validate_json(raw)
        model = getattr(body, "model", None)
        if model is not None:
            self._require_model(model)
        return body

    def _require_model(self, name: str) -> None:
        if name not in (self._config.model_name, self._moe.checkpoint):
            served = self._config.model_name
            raise auth.refuse(
                404,
                f"no model {name!r} here, but {served!r}",
                param="model",
                code="model_not_found",
            )

    async def _generate(
        self,
        request: HttpRequest,
        body: GenerationBody,
        requests: Sequence[Request],
        answer_to: Callable[..., Answer],
    ) -> Response:
        answer = answer_to(
            requests,
            model=self._config.model_name,
            tokenizer=self._reader.tokenizer,
            wants_usage=body.wants_usage,
        )
        try:
            exchange = Exchange(self._engine, self._metrics, answer, requests)
        except ConfigError as error:  # more sequences than the queue has places
            num_prompts = len(requests) // body.num_choices
            too_many = "prompt" if num_prompts > self._engine.config.max_queue else "n"
            raise BadRequest(str(error), param=too_many) from error
        return exchange.stream() if body.stream else await exchange.body(request)
