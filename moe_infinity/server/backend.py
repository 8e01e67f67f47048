"""The routes of all APIs answer with this: the model's names, its prompts and its engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moe_infinity.errors import ConfigError
from moe_infinity.model import MoE
from moe_infinity.server.answers import Answer, CompletionAnswer
from moe_infinity.server.chat import ChatBody
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.exchange import Exchange, ExchangeStream
from moe_infinity.server.fields import FieldCheck, RequestBody
from moe_infinity.server.messages import MessageReader
from moe_infinity.server.prompts import SAME_NAMES, FieldNames, PromptReader
from moe_infinity.server.protocol import CompletionBody, GenerationBody
from moe_infinity.server.refusals import BadRequest, Refused
from moe_infinity.server.routes import Guard
from moe_infinity.server.sequences import Request


class Backend:
    """One model for all APIs.

    Raises CheckpointError if neither the model nor `config` limits the context.
    """

    def __init__(
        self, moe: MoE, engine: Engine, config: ServeConfig, guard: Guard, *, is_forwarded: bool
    ) -> None:
        self.moe = moe
        self.engine = engine
        self.reader = PromptReader(moe, config)
        self.names = config.names() or (name_of(moe.checkpoint),)
        self.created = int(time.time())
        self._config = config
        self._fields = FieldCheck(is_strict=config.strict_fields)
        self._guard = guard
        self._is_forwarded = is_forwarded

    @property
    def name(self) -> str:
        """The name that answers have."""
        return self.names[0]

    def accept(self, body: RequestBody) -> None:
        """Remove fields of a body that have no effect. Raises Refused for a field that changes what
        is asked for, or for another model. Call this first.
        """
        self._fields.apply(body)
        self.require_model(body.model)

    def require_model(self, name: str | None) -> None:
        """Raises Refused (404) if a request names another model."""
        if self._config.any_model or name in (None, *self.names, self.moe.checkpoint):
            return
        if name is not None and name.removesuffix(":latest") in self.names:  # as Ollama writes it
            return
        known = " or ".join(map(repr, self.names))
        message = f"no model {name!r} here, but {known}; --any-model would take any name"
        raise Refused(404, message, param="model", code="model_not_found")

    async def completions(self, request: HttpRequest, body: CompletionBody) -> Response:
        """Continue prompts."""
        self.accept(body)
        requests = await run_in_threadpool(self.reader.completion, body)
        return await self.generate(request, body, requests, CompletionAnswer)

    def with_room(self, requests: Sequence[Request], limit: int | None) -> list[Request]:
        """Return requests that generate up to `limit` tokens, or as many as the context leaves."""
        room = [self.reader.max_context - len(each.prompt_ids) for each in requests]
        return [
            replace(each, max_new_tokens=most if limit is None else min(limit, most))
            for each, most in zip(requests, room, strict=True)
        ]

    async def chat(
        self,
        request: HttpRequest,
        body: ChatBody,
        answer_to: Callable[..., Answer],
        names: FieldNames = SAME_NAMES,
    ) -> Response:
        """Answer a conversation. `names`: what the API calls fields of `body`."""
        requests = await run_in_threadpool(self.reader.chat, body, names)
        tools = body.template_tools
        readers: list[MessageReader] = [
            self.reader.format.reader(each.prompt_ids, tools, max_calls=body.max_calls)
            for each in requests
        ]
        return await self.generate(request, body, requests, partial(answer_to, messages=readers))

    async def generate(
        self,
        request: HttpRequest,
        body: GenerationBody,
        requests: Sequence[Request],
        answer_to: Callable[..., Answer],
    ) -> Response:
        """Answer with what the model generates for `requests`."""
        answer = answer_to(
            requests,
            model=self.name,
            tokenizer=self.reader.tokenizer,
            usage_chunks=body.usage_chunks,
            shows_progress=bool(body.return_progress),
        )
        num_prompts = len(requests) // body.num_choices
        many = "prompt" if num_prompts > self._config.max_queue else "n"
        exchange = self.exchange(request, answer, requests, many)
        if not body.stream:
            return await exchange.body(request)
        return ExchangeStream(exchange, at_once=not self._is_forwarded)

    def exchange(
        self, request: HttpRequest, answer: Answer, requests: Sequence[Request], many: str
    ) -> Exchange:
        """Submit requests. `many` names the field that may ask for more than the queue can hold."""
        requests = [replace(each, owner=request.state.owner) for each in requests]
        note = partial(self._guard.note, request)
        try:
            return Exchange(self.engine, self._guard.metrics, answer, requests, note)
        except ConfigError as error:
            raise BadRequest(str(error), param=many) from error


def name_of(checkpoint: str) -> str:
    """Return the name that clients use for a checkpoint: its hub id, or a folder's name without its
    path.
    """
    path = Path(checkpoint)
    return path.resolve().name if path.exists() else checkpoint
