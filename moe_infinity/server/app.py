"""The routes of the HTTP API.

Nothing here waits for the model. The engine's thread generates and posts its outputs to the event
loop.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from moe_infinity import __version__
from moe_infinity.model import MoE
from moe_infinity.server import anthropic_body, responses_body
from moe_infinity.server.answers import ChatAnswer, EmbeddingsAnswer
from moe_infinity.server.anthropic import AnthropicErrorBody, MessagesAnswer
from moe_infinity.server.anthropic_body import CountTokensBody, MessagesBody
from moe_infinity.server.backend import Backend
from moe_infinity.server.bodies import BodyRoom
from moe_infinity.server.chat import ChatBody, TokenizeBody
from moe_infinity.server.config import LOOPBACK, ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.kept import KeptTexts, ResponseTurn
from moe_infinity.server.kept_api import KeptApi
from moe_infinity.server.limits import KEPT
from moe_infinity.server.llama_cpp import LlamaApi
from moe_infinity.server.metrics import Metrics, stats_of
from moe_infinity.server.ollama import OllamaApi
from moe_infinity.server.preparation import Preparation
from moe_infinity.server.prompts import FieldNames
from moe_infinity.server.protocol import (
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
)
from moe_infinity.server.refusals import ErrorBody, Refused
from moe_infinity.server.responses import ResponseAnswer
from moe_infinity.server.responses_body import ResponsesBody
from moe_infinity.server.routes import (
    Guard,
    GuardedRoute,
    Paths,
    add_get,
    refusal_for,
    wants_anthropic,
)

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
        title="MoE-Infinity", version=__version__, docs_url=None, redoc_url=None, openapi_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.state.guard = guard = Guard(
        is_on_loopback=config.host in LOOPBACK,
        allowed_hosts=tuple(config.allowed_host or ()),
        allowed_origins=tuple(config.cors or ()),
        api_keys=config.keys(),
        max_body=config.max_body,
        metrics=Metrics(moe, engine),
        preparation=Preparation(),
        room=BodyRoom(config.max_body),
    )
    backend = Backend(moe, engine, config, guard, is_forwarded=is_forwarded)
    # What is named may come to another replica.
    kept = KeptTexts(0 if is_forwarded else KEPT.most)
    api = Api(backend, guard.metrics, kept)
    routers = [
        api.open_router(),
        api.router(),
        OllamaApi(backend).router(),
        LlamaApi(backend).router(),
    ]
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Paths, routers=routers)
    if config.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.cors, allow_methods=["*"], allow_headers=["*"]
        )
    return app


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """The answer where there is no such route or method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    guard: Guard = request.app.state.guard
    refused = Refused(error.status_code, message, error.headers)
    return refusal_for(request, guard.note(request, refused))


class Api:
    """The routes of OpenAI's and Anthropic's APIs, and those about the server."""

    def __init__(self, backend: Backend, metrics: Metrics, kept: KeptTexts) -> None:
        self._backend = backend
        self._metrics = metrics
        self._kept = kept
        self._files = StaticFiles(directory=PAGE)

    def open_router(self) -> APIRouter:
        """Routes that need no key. They show nothing of requests or answers."""
        router = APIRouter()
        add_get(router, "/", self.page, include_in_schema=False)
        add_get(router, "/page/{name}", self.page, include_in_schema=False)
        add_get(router, "/health", self.health, responses=NOT_HEALTHY)
        add_get(router, "/ping", self.ping, responses=NOT_HEALTHY)
        router.add_api_route("/ping", self.ping, methods=["POST"], include_in_schema=False)
        add_get(router, "/version", self.version)
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
        add_get(router, "/load", self.load)
        add_get(router, "/v1", self.about)
        add_get(router, "/v1/models", self.models)
        add_get(router, "/v1/models/{name:path}", self.model)
        add_post = partial(router.add_api_route, methods=["POST"])
        add_post("/v1/completions", self.completions, responses=STREAM)
        add_post("/v1/chat/completions", self.chat_completions, responses=STREAM)
        add_post("/v1/responses", self.responses, responses=STREAM)
        add_post("/v1/embeddings", self.embeddings)
        add_post("/v1/responses/input_tokens", self.input_tokens)
        KeptApi(self._backend, self._kept).add_to(router)
        add_post("/v1/messages", self.messages, responses=STREAM | ANTHROPIC_REFUSALS)
        add_post("/v1/messages/count_tokens", self.count_tokens, responses=ANTHROPIC_REFUSALS)
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
        is_live = self._backend.engine.is_alive
        return JSONResponse({"live": is_live}, 200 if is_live else 503)

    async def ready(self) -> Response:
        """Say whether the engine takes requests."""
        is_ready = self._backend.engine.is_ready
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def health(self) -> Response:
        """Both, and why the engine stopped. 200 if it takes requests."""
        engine = self._backend.engine
        body: dict[str, Any] = {"live": engine.is_alive, "ready": engine.is_ready}
        if engine.is_ready:
            body["status"] = "ok"  # as llama.cpp says it
        if engine.death is not None:
            body["error"] = f"the engine died: {type(engine.death).__name__}"
        return JSONResponse(body, 200 if engine.is_ready else 503)

    async def ping(self) -> Response:
        """Say by the status whether the engine takes requests."""
        return Response(status_code=200 if self._backend.engine.is_ready else 503)

    async def version(self) -> Response:
        """The version of MoE-Infinity."""
        return JSONResponse({"version": __version__})

    async def load(self) -> Response:
        """How many sequences run or wait."""
        state = self._backend.engine.state()
        num = sum(state[name] for name in ("waiting", "prefilling", "decoding"))
        return JSONResponse({"server_load": num})

    async def show_metrics(self) -> Response:
        """Metrics for Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def stats(self) -> Response:
        """Return the numbers that the page draws."""
        backend = self._backend
        stats = stats_of(backend.moe, backend.engine, self._metrics, model=backend.name)
        return JSONResponse(stats)

    async def document(self, request: HttpRequest) -> Response:
        return JSONResponse(request.app.openapi())

    async def about(self) -> Response:
        """The answer at the address that clients are given."""
        about = {"name": "moe-infinity", "version": __version__, "document": "/openapi.json"}
        return JSONResponse(about | {"models": list(self._backend.names)})

    async def models(self, request: HttpRequest) -> Response:
        """The one model, under each of its names."""
        names = self._backend.names
        if wants_anthropic(request):
            cards = list(map(self._anthropic_card, names))
            ends = {"first_id": names[0], "last_id": names[-1]}
            return JSONResponse({"data": cards, "has_more": False, **ends})
        found: dict[str, Any] = {"object": "list", "data": list(map(self._model_card, names))}
        if "client_version" in request.query_params:  # Codex, which has a catalog of its own
            found["models"] = []
        return JSONResponse(found)

    async def model(self, request: HttpRequest, name: str) -> Response:
        """Its name and context."""
        self._backend.require_model(name)
        card = self._anthropic_card if wants_anthropic(request) else self._model_card
        return JSONResponse(card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        """OpenAI's fields, vLLM's context, and what Mistral's client asks for beside them."""
        reader = self._backend.reader
        return {
            "id": name,
            "object": "model",
            "created": self._backend.created,
            "owned_by": "moe-infinity",
            "max_model_len": reader.max_context,
            "max_context_length": reader.max_context,
            "type": "base",
            "capabilities": {
                "completion_chat": reader.tokenizer.chat_template is not None,
                "function_calling": reader.format.is_known,
                "vision": reader.takes_images,
            },
        }

    def _anthropic_card(self, name: str) -> dict[str, Any]:
        created = datetime.fromtimestamp(self._backend.created, timezone.utc)
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": self._backend.reader.max_context,
            "max_tokens": self._backend.reader.max_context,
        }

    # generating

    async def completions(self, request: HttpRequest, body: CompletionBody) -> Response:
        """Continue prompts."""
        return await self._backend.completions(request, body)

    async def chat_completions(self, request: HttpRequest, body: ChatBody) -> Response:
        """Answer a conversation."""
        answer_to = partial(ChatAnswer, calls_one_function=body.calls_one_function)
        return await self._backend.chat(request, lambda: self._backend.accepted(body), answer_to)

    async def responses(self, request: HttpRequest, body: ResponsesBody) -> Response:
        """Answer a conversation, of which earlier turns may be named by their ids."""
        turn = self._turn(request, body)
        answer_to = partial(ResponseAnswer, asked=body, turn=turn)
        return await self._backend.chat(
            request,
            lambda: turn.whole(self._backend.accepted(body)).for_chat(),
            answer_to,
            responses_body.NAMES,
        )

    async def input_tokens(self, request: HttpRequest, body: ResponsesBody) -> Response:
        """How many tokens the conversation of a response has."""
        whole = self._turn(request, body).whole
        num_tokens = await self._num_tokens(
            request, lambda: whole(self._backend.accepted(body)).for_chat(), responses_body.NAMES
        )
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def messages(self, request: HttpRequest, body: MessagesBody) -> Response:
        """Answer a conversation in Anthropic's form."""
        return await self._backend.chat(
            request,
            lambda: self._backend.accepted(body).for_chat(),
            MessagesAnswer,
            anthropic_body.NAMES,
        )

    async def count_tokens(self, request: HttpRequest, body: CountTokensBody) -> Response:
        """How many tokens a conversation of Anthropic's form has."""
        num_tokens = await self._num_tokens(
            request, lambda: self._backend.accepted(body).for_chat(), anthropic_body.NAMES
        )
        return JSONResponse({"input_tokens": num_tokens})

    def _turn(self, request: HttpRequest, body: ResponsesBody) -> ResponseTurn:
        guard: Guard = request.app.state.guard
        owner = request.state.owner
        store = body.store is not False
        return ResponseTurn(self._kept, owner, store=store, max_bytes=guard.max_body)

    async def _num_tokens(
        self, request: HttpRequest, asked: Callable[[], ChatBody], names: FieldNames
    ) -> int:
        def counted() -> int:
            return len(self._backend.reader.conversation_ids(asked(), names))

        return await self._backend.prepared(request, counted)

    async def embeddings(self, request: HttpRequest, body: EmbeddingsBody) -> Response:
        """Vectors of texts."""
        backend = self._backend
        requests = await backend.prepared(
            request, lambda: backend.reader.embeddings(backend.accepted(body))
        )
        answer = EmbeddingsAnswer(requests, model=backend.name, encoding=body.encoding_format)
        exchange = await backend.exchange(request, answer, requests, "input")
        return await exchange.body()

    async def tokenize(self, request: HttpRequest, body: TokenizeBody) -> Response:
        """Token ids of a text or of a conversation."""
        reader = self._backend.reader

        def answered() -> Response:
            self._backend.accepted(body)
            if body.messages is not None:
                ids = reader.conversation_ids(body.for_chat())
            else:
                text = body.prompt or body.content or ""
                ids = reader.text_ids(text, "prompt", has_special=body.has_special)
            tokens: list[Any] = ids
            if body.with_pieces:
                tokens = [{"id": each, "piece": reader.text_of([each])} for each in ids]
            counts = {"count": len(ids), "max_model_len": reader.max_context}
            return JSONResponse({"tokens": tokens, **counts})

        return await self._backend.prepared(request, answered)

    async def detokenize(self, request: HttpRequest, body: DetokenizeBody) -> Response:
        """The text of token ids."""

        def answered() -> Response:
            text = self._backend.reader.text_of(self._backend.accepted(body).tokens)
            # In vLLM's words, and llama.cpp's.
            return JSONResponse({"prompt": text, "content": text})

        return await self._backend.prepared(request, answered)
