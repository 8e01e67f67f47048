"""The routes of llama.cpp's server that OpenAI's API has not: its own completions, and what its
clients ask about the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Security
from fastapi.security import HTTPBearer
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from moe_infinity import __version__
from moe_infinity.server.answers import CompletionAnswer, progress_of, sse
from moe_infinity.server.backend import Backend
from moe_infinity.server.chat import ChatBody
from moe_infinity.server.field_tables import ONLY_TEXT
from moe_infinity.server.fields import BoundedBody, Items
from moe_infinity.server.llama_options import options_of
from moe_infinity.server.ollama_body import parsed
from moe_infinity.server.protocol import CompletionBody
from moe_infinity.server.refusals import BadRequest
from moe_infinity.server.routes import GuardedRoute, add_get
from moe_infinity.server.sequences import Output, Progress, Request, TokenText

NO_SLOT = -1


def text_of(prompt: Any) -> Any:
    """Return the text of a prompt that is an object. Raises BadRequest for one with media."""
    if not isinstance(prompt, dict):
        return prompt
    if prompt.get("multimodal_data"):
        raise BadRequest(ONLY_TEXT, param="prompt.multimodal_data")
    return prompt.get("prompt_string")


class LlamaBody(BoundedBody):
    """The body of /completion. All other fields are those of a completion of OpenAI's."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    prompt: Annotated[str | Items[str | int], BeforeValidator(text_of)]
    model: str | None = None
    stream: bool | None = None
    n_probs: int | None = Field(None, ge=0, validation_alias=AliasChoices("n_probs", "logprobs"))
    return_tokens: bool | None = None
    return_progress: bool | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    logit_bias: dict[str, Any] | Items[Items[Any]] | None = None  # by id, or pairs

    def for_completion(self) -> CompletionBody:
        """Raises BadRequest and RequestValidationError."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(p, str) for p in prompt):
            raise BadRequest("give one prompt", param="prompt")
        fields: dict[str, Any] = options_of(self.model_extra or {}) | {
            "prompt": prompt,
            "stream": self.stream,
            "return_progress": self.return_progress,
        }
        has_logprobs = self.n_probs or self.return_tokens
        fields["logprobs"] = (self.n_probs or 0) if has_logprobs else None
        if self.json_schema is not None:
            fields["structured_outputs"] = {"json": self.json_schema}
        elif self.grammar:
            fields["structured_outputs"] = {"grammar": self.grammar}
        biases = self.logit_bias or {}
        pairs: Iterable[Sequence[Any]]
        pairs = list(biases.items()) if isinstance(biases, dict) else biases
        if not all(len(pair) == 2 for pair in pairs):
            raise BadRequest("give pairs of a token id and a bias", param="logit_bias")
        # False forbids a token.
        fields["logit_bias"] = {str(id_): -100 if bias is False else bias for id_, bias in pairs}
        body = parsed(CompletionBody, fields)
        if body.num_choices > 1:
            raise BadRequest("there is one answer", param="n")
        return body


class LlamaAnswer(CompletionAnswer):
    """An answer of /completion. The last event of a stream has `stop`, and no text."""

    def __init__(self, requests: Sequence[Request], *, asked: LlamaBody, **settings: Any) -> None:
        super().__init__(requests, **settings)
        self._asked = asked
        self._limit = requests[0].max_new_tokens

    def body(self) -> dict[str, Any]:
        choice = self._choices[0]
        return self._object(choice.text, choice.tokens) | self._end()

    def chunk(self, index: int, output: Output) -> str:
        return sse(self._object(output.text, output.tokens))

    def progress_chunk(self, index: int, progress: Progress) -> str:
        return sse(self._object("", ()) | {"prompt_progress": progress_of(progress)})

    def last_chunks(self) -> list[str]:
        return [sse(self._object("", ()) | self._end())]

    def _object(self, text: str, tokens: Sequence[TokenText]) -> dict[str, Any]:
        usage = self.usage()
        ids = [token.chosen.token_id for token in tokens]
        made: dict[str, Any] = {
            "index": 0,
            "content": text,
            "tokens": ids if self._asked.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": False,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
        }
        if self._asked.n_probs and tokens:
            made["completion_probabilities"] = list(map(self._probability, tokens))
        return made

    def _probability(self, token: TokenText) -> dict[str, Any]:
        chosen = token.chosen
        best = [self._entry(id_, logprob) for id_, logprob in chosen.alternatives]
        return self._entry(chosen.token_id, chosen.logprob) | {"top_logprobs": best}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._text_of(token_id)
        return {"id": token_id, "token": text, "bytes": list(text.encode()), "logprob": logprob}

    def _end(self) -> dict[str, Any]:
        choice = self._choices[0]
        is_stopped = "word" if choice.stop is not None else "eos"
        return {
            "stop": True,
            "model": self._head["model"],
            "has_new_line": "\n" in choice.text,
            "truncated": False,
            "stop_type": "limit" if choice.finish == "length" else is_stopped,
            "stopping_word": choice.stop or "",
            "tokens_cached": choice.num_cached,
            "generation_settings": {"n_predict": self._limit, "stream": bool(self._asked.stream)},
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, Any]:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        prompt_s, answer_s = self.seconds()
        timings: dict[str, Any] = {"cache_n": cached}
        counts = ("prompt", usage["prompt_tokens"] - cached, prompt_s), (
            "predicted", usage["completion_tokens"], answer_s,
        )  # fmt: skip
        for name, num_tokens, seconds in counts:
            timings[f"{name}_n"] = num_tokens
            timings[f"{name}_ms"] = seconds * 1000
            timings[f"{name}_per_token_ms"] = seconds * 1000 / max(num_tokens, 1)
            timings[f"{name}_per_second"] = num_tokens / max(seconds, 1e-9)
        return timings


class LlamaApi:
    """These routes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def router(self) -> APIRouter:
        """All of them."""
        key = Security(HTTPBearer(auto_error=False))  # for the document: GuardedRoute checks it
        router = APIRouter(route_class=GuardedRoute, dependencies=[key])
        add_get(router, "/props", self.props)
        add_get(router, "/slots", self.slots)
        add_post = partial(router.add_api_route, methods=["POST"])
        add_post("/completion", self.completion)
        add_post("/completions", self.either_completion, include_in_schema=False)
        add_post("/apply-template", self.apply_template)
        return router

    async def completion(self, request: HttpRequest, body: LlamaBody) -> Response:
        """Continue a prompt."""
        backend = self._backend
        backend.require_model(body.model)

        def read() -> tuple[CompletionBody, list[Request]]:
            asked = backend.accepted(body.for_completion())
            return asked, backend.reader.completion(asked)

        asked, requests = await backend.prepared(request, read)
        requests = backend.with_room(requests, asked.max_tokens)
        return await backend.generate(request, asked, requests, partial(LlamaAnswer, asked=body))

    async def either_completion(self, request: HttpRequest, fields: dict[str, Any]) -> Response:
        """Continue a prompt of llama.cpp's API, which has `n_predict`, or of OpenAI's, for a client
        whose address lacks its /v1.
        """

        def read() -> LlamaBody | CompletionBody:
            if "n_predict" in fields:
                return parsed(LlamaBody, fields)
            return parsed(CompletionBody, fields)

        body = await self._backend.prepared(request, read)
        if isinstance(body, LlamaBody):
            return await self.completion(request, body)
        return await self._backend.completions(request, body)

    async def apply_template(self, request: HttpRequest, body: ChatBody) -> Response:
        """The prompt of a conversation, as text."""
        reader = self._backend.reader

        def answered() -> Response:
            ids = reader.conversation_ids(self._backend.accepted(body))
            return JSONResponse({"prompt": reader.text_of(ids)})

        return await self._backend.prepared(request, answered)

    async def props(self) -> Response:
        """The model's template, context and number of places."""
        reader = self._backend.reader
        tokenizer = reader.tokenizer
        return JSONResponse(
            {
                "default_generation_settings": {"n_ctx": reader.max_context},
                "total_slots": self._backend.engine.config.max_batch,
                "model_alias": self._backend.name,
                "model_path": self._backend.moe.checkpoint,
                "modalities": {"vision": reader.takes_images, "audio": False},
                "chat_template": str(tokenizer.chat_template or ""),
                "bos_token": tokenizer.bos_token or "",
                "eos_token": tokenizer.eos_token or "",
                "build_info": f"moe-infinity {__version__}",
            }
        )

    async def slots(self) -> Response:
        """One place for each sequence that may run."""
        state = self._backend.engine.state()
        num_running = state["prefilling"] + state["decoding"]
        n_ctx = self._backend.reader.max_context
        return JSONResponse(
            [
                {"id": slot, "n_ctx": n_ctx, "is_processing": slot < num_running}
                for slot in range(self._backend.engine.config.max_batch)
            ]
        )
