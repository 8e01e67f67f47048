"""The routes of all APIs answer with this: the model's names, its prompts and its engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

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

Accepted = TypeVar("Accepted", bound=RequestBody)
Made = TypeVar("Made")


class Backend:
    """One model for all APIs.

    Raises CheckpointError if neither the model nor `config` limits the context.
    """

    def __init__(
        self, moe: MoE, engine: Engine, config: ServeConfig, guard: Guard, *, is_forwarded: bool
    ) -> None:
        self.moe = moe
        self.engine = engine
        self.reader = PromptReader(moe, config, reads_whole=engine.reads_whole)
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

    def accepted(self, body: Accepted) -> Accepted:
        """Return a body without the fields that have no effect. Raises Refused for a field that
        changes what is asked for, or for another model. Call this first.
        """
        self.require_model(body.model)
        self._fields.apply(body)
        return body

    async def prepared(self, request: HttpRequest, work: Callable[[], Made]) -> Made:
        """Return what `work` makes of a request, which may take a while. Raises what it raises."""
        return await self._guard.preparation.run(request, work)

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
        requests = await self.prepared(request, lambda: self.reader.completion(self.accepted(body)))
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
        asked: Callable[[], ChatBody],
        answer_to: Callable[..., Answer],
        names: FieldNames = SAME_NAMES,
    ) -> Response:
        """Answer a conversation. `asked` makes a chat body of the request's; `names`: what the API
        calls its fields.
        """

        def read() -> tuple[ChatBody, list[Request], list[MessageReader]]:
            body = asked()
            requests = self.reader.chat(body, names)
            form = self.reader.format
            tools = body.template_tools
            readers = [
                form.reader(
                    each.prompt_ids, tools, max_calls=body.max_calls, has_calls=tools is not None
                )
                for each in requests
            ]
            return body, requests, readers

        body, requests, readers = await self.prepared(request, read)
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
        exchange = await self.exchange(request, answer, requests, many)
        if not body.stream:
            return await exchange.body()
        return ExchangeStream(exchange, at_once=not self._is_forwarded)

    async def exchange(
        self, request: HttpRequest, answer: Answer, requests: Sequence[Request], many: str
    ) -> Exchange:
        """Submit requests. `many` names the field that may ask for more than the queue can hold."""
        state = request.state
        requests = [replace(each, owner=state.owner, client=state.client) for each in requests]
        # Others embed a thousand texts in one request. They keep nothing while they wait.
        is_embedding = requests[0].pooling is not None
        most = self._config.max_queue
        if len(requests) > most and not is_embedding:
            message = f"{len(requests)} sequences, at most {most} may wait"
            raise BadRequest(message, param=many)
        exchange = Exchange(self.engine, self._guard, answer, request)
        running = await self.prepared(request, lambda: exchange.running(requests))
        exchange.submit(running, most if is_embedding else None)
        return exchange


def name_of(checkpoint: str) -> str:
    """Return the name that clients use for a checkpoint: its hub id, or a folder's name without its
    path.
    """
    path = Path(checkpoint)
    return path.resolve().name if path.exists() else checkpoint
