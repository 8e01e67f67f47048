"""The routes of the HTTP API.

Nothing here waits for the model. The engine's thread generates and posts its outputs to the event
loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from moe_infinity import __version__
from moe_infinity.errors import ConfigError
from moe_infinity.model import MoE
from moe_infinity.server import anthropic, refusals, responses
from moe_infinity.server.answers import Answer, ChatAnswer, CompletionAnswer, EmbeddingsAnswer
from moe_infinity.server.anthropic import (
    AnthropicErrorBody,
    CountTokensBody,
    MessagesAnswer,
    MessagesBody,
    error_of,
)
from moe_infinity.server.config import LOOPBACK, ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.exchange import Exchange, ExchangeStream
from moe_infinity.server.messages import MessageReader
from moe_infinity.server.metrics import Metrics, stats_of
from moe_infinity.server.prompts import PromptReader
from moe_infinity.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    GenerationBody,
    TokenizeBody,
)
from moe_infinity.server.refusals import BadRequest, ErrorBody, Refused, refused_by
from moe_infinity.server.responses import ResponseAnswer, ResponsesBody
from moe_infinity.server.sequences import Request

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page")
SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-cache",  # asked for again each time, and not sent again if unchanged
}
Responses = dict[int | str, dict[str, Any]]
# What /openapi.json says of answers.
REFUSALS: Responses = {
    "4XX": {"model": ErrorBody, "description": "refused; `param` names the field that is wrong"},
    "5XX": {"model": ErrorBody, "description": "stopping, too late, or generation failed"},
}
ANTHROPIC_REFUSALS: Responses = {
    "4XX": {"model": AnthropicErrorBody, "description": "refused; the message names the field"},
    "5XX": {"model": AnthropicErrorBody, "description": REFUSALS["5XX"]["description"]},
}
STREAM: Responses = {200: {"content": {"text/event-stream": {}}}}
NOT_HEALTHY: Responses = {503: {"description": "no"}}


def create_app(
    moe: MoE, engine: Engine, config: ServeConfig, *, is_forwarded: bool = False
) -> FastAPI:
    """The ASGI application. The caller starts and stops the engine. `is_forwarded`: another process
    has the clients' connections, and may ask another replica before the first token.

    Raises CheckpointError if neither the model nor `config` limits the context.
    """
    app = FastAPI(
        title="MoE-Infinity", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.api = api = Api(moe, engine, config, is_forwarded=is_forwarded)
    app.include_router(api.open_router())
    app.include_router(api.router())
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return Refused(error.status_code, message).response()


class GuardedRoute(APIRoute):
    """A route behind the checks of key and origin.

    Errors become answers of OpenAI's form, and every answer is counted in the metrics.
    """

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: HttpRequest) -> Response:
            api: Api = request.app.state.api
            try:
                refusals.refuse_other_sites(request)
                if api.is_on_loopback:
                    refusals.refuse_other_names(request, api.config.allowed_host or ())
                request.state.owner = refusals.owner_of(request, api.api_keys)
                response = await handle(refusals.JsonRequest(request, api.config.max_body))
            except Exception as error:
                refused = refused_by(error)
                if refused.status_code == 500:
                    logger.exception("%s failed", request.url.path)
                response = self.refusal(refused)
            api.metrics.responses.labels(self.path, response.status_code).inc()
            return response

        return guarded

    def refusal(self, refused: Refused) -> Response:
        return refused.response()


class AnthropicRoute(GuardedRoute):
    """A route whose errors have Anthropic's form."""

    def refusal(self, refused: Refused) -> Response:
        return JSONResponse(error_of(refused), refused.status_code, headers=refused.headers)


class Api:
    """The handlers of all routes, and the objects they share."""

    def __init__(
        self, moe: MoE, engine: Engine, config: ServeConfig, *, is_forwarded: bool
    ) -> None:
        self.config = config
        self._is_forwarded = is_forwarded
        self.api_keys = config.keys()
        self.is_on_loopback = config.host in LOOPBACK
        self.metrics = Metrics(moe, engine)
        self._moe = moe
        self._engine = engine
        self._reader = PromptReader(moe, config)
        self._files = StaticFiles(directory=PAGE)
        self._model_name = config.served_name or name_of(moe.checkpoint)
        self._created = int(time.time())

    def open_router(self) -> APIRouter:
        """Routes that need no key. They show nothing of requests or answers."""
        router = APIRouter()
        add_get(router, "/", self.page, include_in_schema=False)
        add_get(router, "/page/{name}", self.page, include_in_schema=False)
        add_get(router, "/health", self.health, responses=NOT_HEALTHY)
        add_get(router, "/health/live", self.live, responses=NOT_HEALTHY)
        add_get(router, "/health/ready", self.ready, responses=NOT_HEALTHY)
        return router

    def router(self) -> APIRouter:
        """All other routes."""
        key = Security(HTTPBearer(auto_error=False))  # for the document: GuardedRoute checks it
        router = APIRouter(route_class=GuardedRoute, responses=REFUSALS, dependencies=[key])
        add_get(router, "/metrics", self.show_metrics, response_class=PlainTextResponse)
        add_get(router, "/openapi.json", self.document, include_in_schema=False)
        add_get(router, "/stats", self.stats)
        add_get(router, "/v1/models", self.models)
        add_get(router, "/v1/models/{name:path}", self.model)
        add_post = partial(router.add_api_route, methods=["POST"])
        add_post("/v1/completions", self.completions, responses=STREAM)
        add_post("/v1/chat/completions", self.chat_completions, responses=STREAM)
        add_post("/v1/responses", self.responses, responses=STREAM)
        add_post("/v1/embeddings", self.embeddings)
        add_anthropic = partial(add_post, route_class_override=AnthropicRoute)
        add_anthropic("/v1/messages", self.messages, responses=STREAM | ANTHROPIC_REFUSALS)
        add_anthropic("/v1/messages/count_tokens", self.count_tokens, responses=ANTHROPIC_REFUSALS)
        add_post("/tokenize", self.tokenize)
        add_post("/detokenize", self.detokenize)
        return router

    # about the server

    async def page(self, request: HttpRequest, name: str = "index.html") -> Response:
        """The page, or one of its files."""
        response = await self._files.get_response(name, request.scope)
        response.headers.update(SAFE_HEADERS)
        return response

    async def live(self) -> Response:
        """Say whether the engine's thread runs."""
        is_live = self._engine.is_alive
        return JSONResponse({"live": is_live}, 200 if is_live else 503)

    async def ready(self) -> Response:
        """Say whether the engine takes requests."""
        is_ready = self._engine.is_ready
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def health(self) -> Response:
        """Both, and why the engine stopped. 200 if it takes requests."""
        engine = self._engine
        body: dict[str, Any] = {"live": engine.is_alive, "ready": engine.is_ready}
        if engine.death is not None:
            body["error"] = f"the engine died: {type(engine.death).__name__}"
        return JSONResponse(body, 200 if engine.is_ready else 503)

    async def show_metrics(self) -> Response:
        """Metrics for Prometheus."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def stats(self) -> Response:
        """Return the numbers that the page draws."""
        return JSONResponse(stats_of(self._moe, self._engine, self.metrics, model=self._model_name))

    async def document(self, request: HttpRequest) -> Response:
        return JSONResponse(request.app.openapi())

    async def models(self) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        """Its name and context."""
        self._require_model(name)
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "moe-infinity",
            "max_model_len": self._reader.max_context,
        }

    # generating

    async def completions(self, request: HttpRequest, body: CompletionBody) -> Response:
        """Continue prompts."""
        self._require_model(body.model)
        requests = await run_in_threadpool(self._reader.completion, body)
        return await self._generate(request, body, requests, CompletionAnswer)

    async def chat_completions(self, request: HttpRequest, body: ChatBody) -> Response:
        """Answer a conversation."""
        self._require_model(body.model)
        requests = await run_in_threadpool(self._reader.chat, body)
        answer_to = partial(ChatAnswer, messages=self._message_readers(body, requests))
        return await self._generate(request, body, requests, answer_to)

    async def responses(self, request: HttpRequest, body: ResponsesBody) -> Response:
        """Answer a conversation; nothing is kept."""
        self._require_model(body.model)
        chat = body.for_chat()
        requests = await run_in_threadpool(self._reader.chat, chat, responses.NAMES)
        readers = self._message_readers(chat, requests)
        answer_to = partial(ResponseAnswer, asked=body, messages=readers)
        return await self._generate(request, chat, requests, answer_to)

    async def messages(self, request: HttpRequest, body: MessagesBody) -> Response:
        """Answer a conversation in Anthropic's form."""
        self._require_model(body.model)
        chat = body.for_chat()
        requests = await run_in_threadpool(self._reader.chat, chat, anthropic.NAMES)
        answer_to = partial(MessagesAnswer, messages=self._message_readers(chat, requests))
        return await self._generate(request, chat, requests, answer_to)

    async def count_tokens(self, body: CountTokensBody) -> Response:
        """How many tokens a conversation of Anthropic's form has."""
        self._require_model(body.model)
        chat = body.for_chat()
        ids = await run_in_threadpool(self._reader.conversation_ids, chat)
        return JSONResponse({"input_tokens": len(ids)})

    async def embeddings(self, request: HttpRequest, body: EmbeddingsBody) -> Response:
        """Vectors of texts."""
        self._require_model(body.model)
        requests = await run_in_threadpool(self._reader.embeddings, body)
        answer = EmbeddingsAnswer(requests, model=self._model_name, encoding=body.encoding_format)
        return await self._exchange(request, answer, requests, "input").body(request)

    def _message_readers(self, body: ChatBody, requests: Sequence[Request]) -> list[MessageReader]:
        tools = body.template_tools
        return [
            self._reader.format.reader(each.prompt_ids, tools, max_calls=body.max_calls)
            for each in requests
        ]

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Token ids of a text or of a conversation."""
        self._require_model(body.model)
        if body.messages is not None:
            ids = await run_in_threadpool(self._reader.chat_ids, body.messages)
        else:
            ids = await run_in_threadpool(self._reader.text_ids, body.prompt or "")
        max_context = self._reader.max_context
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": max_context})

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of token ids."""
        self._require_model(body.model)
        text = await run_in_threadpool(self._reader.text_of, body.tokens)
        return JSONResponse({"prompt": text})

    def _require_model(self, name: str | None) -> None:
        """Raises Refused (404) if a request names another model."""
        if name not in (None, self._model_name, self._moe.checkpoint):
            message = f"no model {name!r} here, but {self._model_name!r}"
            raise Refused(404, message, param="model", code="model_not_found")

    async def _generate(
        self,
        request: HttpRequest,
        body: GenerationBody,
        requests: Sequence[Request],
        answer_to: Callable[..., Answer],
    ) -> Response:
        answer = answer_to(
            requests,
            model=self._model_name,
            tokenizer=self._reader.tokenizer,
            wants_usage=body.wants_usage,
            shows_progress=bool(body.return_progress),
        )
        num_prompts = len(requests) // body.num_choices
        many = "prompt" if num_prompts > self.config.max_queue else "n"
        exchange = self._exchange(request, answer, requests, many)
        if not body.stream:
            return await exchange.body(request)
        return ExchangeStream(exchange, at_once=not self._is_forwarded)

    def _exchange(
        self, request: HttpRequest, answer: Answer, requests: Sequence[Request], many: str
    ) -> Exchange:
        """Submit requests. `many` names the field that may ask for more than the queue can hold."""
        requests = [replace(each, owner=request.state.owner) for each in requests]
        try:
            return Exchange(self._engine, self.metrics, answer, requests)
        except ConfigError as error:
            raise BadRequest(str(error), param=many) from error


def add_get(router: APIRouter, path: str, handler: Callable[..., Any], **described: Any) -> None:
    """Add a route for GET, and for HEAD, which the document leaves out."""
    router.add_api_route(path, handler, **described)
    router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)


def name_of(checkpoint: str) -> str:
    """Return the name that clients use for a checkpoint: its hub id, or a folder's name without its
    path.
    """
    path = Path(checkpoint)
    return path.resolve().name if path.exists() else checkpoint
