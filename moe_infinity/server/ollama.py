"""Ollama's API: chat, generate, embeddings, and what its clients ask about models.

A request becomes a request of OpenAI's chat or completions. An answer has fields of its own, and a
stream is lines of JSON, the last of which has `done`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from fastapi import APIRouter, Security
from fastapi.security import HTTPBearer
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from moe_infinity.server.answers import ChatAnswer, EmbeddingsAnswer
from moe_infinity.server.backend import Backend
from moe_infinity.server.messages import MessageReader, Parts
from moe_infinity.server.ollama_body import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaPullBody,
    OllamaShowBody,
    parsed,
)
from moe_infinity.server.protocol import EmbeddingsBody
from moe_infinity.server.refusals import Refused
from moe_infinity.server.routes import GuardedRoute, add_get
from moe_infinity.server.sequences import Output, Request, TokenText
from moe_infinity.server.shapes import object_of

VERSION = "0.13.4"  # of Ollama: the API here is that one's, and clients ask for the least of them


class OllamaAnswer(ChatAnswer):
    """An answer of /api/chat, or of /api/generate."""

    media_type = "application/x-ndjson"

    def __init__(self, requests: Sequence[Request], *, is_chat: bool, **settings: Any) -> None:
        super().__init__(requests, **settings)
        self._is_chat = is_chat
        self._num_calls = 0  # that were shown

    def body(self) -> dict[str, Any]:
        choice = self._choices[0]
        return self._object(self._messages[0].message, choice.tokens) | self._end()

    def first_chunks(self) -> list[str]:
        return [self.life_chunk()]

    def life_chunk(self) -> str:
        """A line without text."""
        return line(self._object(Parts(), ()) | {"done": False})

    def chunk(self, index: int, output: Output) -> str:
        new = self._new[index]
        if not (new.content or new.reasoning or new.calls or output.tokens):
            return ""
        return line(self._object(new, output.tokens) | {"done": False})

    def last_chunks(self) -> list[str]:
        return [line(self._object(Parts(), ()) | self._end())]

    def error_chunk(self, refused: Refused) -> str:
        return line({"error": refused.error.message})

    def _object(self, parts: Parts, tokens: Sequence[TokenText]) -> dict[str, Any]:
        made: dict[str, Any] = {"model": self._head["model"], "created_at": now()}
        thinking = {"thinking": parts.reasoning} if parts.reasoning else {}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": parts.content, **thinking}
            if parts.calls:
                message["tool_calls"] = [
                    {
                        "id": call.id,
                        "function": {
                            "index": self._num_calls + at,
                            "name": call.name,
                            "arguments": object_of(call.arguments),
                        },
                    }
                    for at, call in enumerate(parts.calls)
                ]
                self._num_calls += len(parts.calls)
            made["message"] = message
        else:
            made |= {"response": parts.content, **thinking}
        shaped = self._logprobs(tokens) if tokens else None
        return made if shaped is None else made | {"logprobs": shaped["content"]}

    def _end(self) -> dict[str, Any]:
        """The fields of the last line: why it ended, tokens, and times in nanoseconds."""
        usage = self.usage()
        prompt_s, answer_s = self.seconds()
        return {
            "done": True,
            "done_reason": self._choices[0].finish,
            "total_duration": nanoseconds(prompt_s + answer_s),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": nanoseconds(prompt_s),
            "eval_count": usage["completion_tokens"],
            "eval_duration": nanoseconds(answer_s),
        }


def line(payload: dict[str, Any]) -> str:
    return json.dumps(payload) + "\n"


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


class OllamaApi:
    """The routes below /api."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._since = now()

    def router(self) -> APIRouter:
        """All of them."""
        key = Security(HTTPBearer(auto_error=False))  # for the document: GuardedRoute checks it
        router = APIRouter(prefix="/api", route_class=GuardedRoute, dependencies=[key])
        add_get(router, "/version", self.version)
        add_get(router, "/tags", self.tags)
        add_get(router, "/ps", self.running)
        add_post = partial(router.add_api_route, methods=["POST"])
        add_post("/show", self.show)
        add_post("/pull", self.pull)
        add_post("/chat", self.chat)
        add_post("/generate", self.generate)
        add_post("/embed", self.embed)
        add_post("/embeddings", self.embeddings)
        return router

    async def version(self) -> Response:
        """The version of Ollama whose API this is."""
        return JSONResponse({"version": VERSION})

    async def tags(self) -> Response:
        """The one model, under each of its names."""
        return JSONResponse({"models": self._models()})

    async def running(self) -> Response:
        """The same: it is always loaded."""
        never = "9999-12-31T23:59:59Z"
        more = {"expires_at": never, "size_vram": 0, "context_length": self._context}
        return JSONResponse({"models": [each | more for each in self._models()]})

    async def show(self, body: OllamaShowBody) -> Response:
        """The model's template, context and abilities."""
        self._backend.require_model(body.model or body.name)
        config = self._backend.moe.model.config
        kind = config.model_type
        text_config = config.get_text_config()
        info = {
            "general.architecture": kind,
            f"{kind}.context_length": self._context,
            f"{kind}.embedding_length": text_config.hidden_size,
            f"{kind}.block_count": text_config.num_hidden_layers,
        }
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": f"num_ctx {self._context}",
                "template": self._template,
                "details": self._details(),
                "model_info": info,
                "capabilities": self._capabilities(),
                "modified_at": self._since,
            }
        )

    async def pull(self, body: OllamaPullBody) -> Response:
        """Whoever downloads a model before its use is told that it is here."""
        self._backend.require_model(body.model or body.name)
        is_stream = body.stream is not False
        return Response(
            line({"status": "success"}),
            media_type=OllamaAnswer.media_type if is_stream else "application/json",
        )

    async def chat(self, request: HttpRequest, body: OllamaChatBody) -> Response:
        """Answer a conversation."""
        self._backend.require_model(body.model)
        if not body.messages:
            return self._loaded(body, {"message": {"role": "assistant", "content": ""}})
        answer_to = partial(OllamaAnswer, is_chat=True)
        return await self._backend.chat(request, body.for_chat, answer_to)

    async def generate(self, request: HttpRequest, body: OllamaGenerateBody) -> Response:
        """Answer or continue one prompt."""
        backend = self._backend
        backend.require_model(body.model)
        body.require_possible()
        if not body.prompt:
            return self._loaded(body, {"response": ""})
        answer_to = partial(OllamaAnswer, is_chat=False)
        if not body.raw and backend.reader.tokenizer.chat_template is not None:
            return await backend.chat(request, body.for_chat, answer_to)
        asked = body.for_completion()
        requests = await backend.prepared(request, lambda: backend.reader.completion(asked))
        requests = backend.with_room(requests, asked.max_tokens)
        reader = MessageReader(None, None, ())
        return await backend.generate(
            request, asked, requests, partial(answer_to, messages=[reader])
        )

    async def embed(self, request: HttpRequest, body: OllamaEmbedBody) -> Response:
        """Vectors of texts. Who asks for none wants the model to be loaded."""
        if not body.input:
            self._backend.require_model(body.model)
            return JSONResponse({"model": self._backend.name, "embeddings": []})
        answer = await self._vectors(request, body, body.input)
        vectors = [each["embedding"] for each in answer["data"]]
        num_tokens = answer["usage"]["prompt_tokens"]
        made = {"model": self._backend.name, "embeddings": vectors}
        return JSONResponse(made | {"prompt_eval_count": num_tokens})

    async def embeddings(self, request: HttpRequest, body: OllamaEmbedBody) -> Response:
        """The vector of one text, or of none."""
        if not body.prompt:
            self._backend.require_model(body.model)
            return JSONResponse({"embedding": []})
        answer = await self._vectors(request, body, body.prompt)
        return JSONResponse({"embedding": answer["data"][0]["embedding"]})

    async def _vectors(
        self, request: HttpRequest, body: OllamaEmbedBody, texts: str | list[str] | None
    ) -> dict[str, Any]:
        backend = self._backend
        backend.require_model(body.model)
        fields = {"input": texts, "dimensions": body.dimensions or None}
        requests = await backend.prepared(
            request, lambda: backend.reader.embeddings(parsed(EmbeddingsBody, fields))
        )
        answer = EmbeddingsAnswer(requests, model=backend.name, encoding="float")
        exchange = await backend.exchange(request, answer, requests, "input")
        await exchange.body()
        return answer.body()

    @property
    def _template(self) -> str:
        return str(self._backend.reader.tokenizer.chat_template or "")

    def _capabilities(self) -> list[str]:
        """Without `embedding`: Ollama's clients do not chat with a model that has it."""
        reader = self._backend.reader
        able = ["completion"]
        able += ["vision"] if reader.takes_images else []
        able += ["tools"] if self._template and reader.format.is_known else []
        return able + (["thinking"] if "thinking" in self._template else [])

    @property
    def _context(self) -> int:
        return self._backend.reader.max_context

    def _loaded(self, body: OllamaGenerationBody, empty: dict[str, Any]) -> Response:
        """The answer to who asks for nothing but that the model is loaded, or is not."""
        made = {"model": self._backend.name, "created_at": now(), **empty}
        reason = "unload" if body.wants_unload else "load"
        return JSONResponse(made | {"done": True, "done_reason": reason})

    def _models(self) -> list[dict[str, Any]]:
        report = self._backend.moe.report()
        size = report.tiers[-1].capacity_bytes + sum(report.dense_types.values())
        return [
            {
                "name": name if ":" in name else f"{name}:latest",
                "model": name if ":" in name else f"{name}:latest",
                "modified_at": self._since,
                "size": size,
                "digest": hashlib.sha256(name.encode()).hexdigest(),  # clients cut it
                "details": self._details() | {"context_length": self._context},
                "capabilities": self._capabilities(),
            }
            for name in self._backend.names
        ]

    def _details(self) -> dict[str, Any]:
        model = self._backend.moe.model
        kind = model.config.model_type
        return {
            "parent_model": "",
            "format": "safetensors",
            "family": kind,
            "families": [kind],
            "parameter_size": "",
            "quantization_level": str(model.dtype).removeprefix("torch.").upper(),
        }
