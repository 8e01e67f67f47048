"""Answers in OpenAI's form, made of the engine's outputs: one body, or a stream of chunks."""

from __future__ import annotations

import base64
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_infinity import __version__
from moe_infinity.server.messages import MessageReader, Parts
from moe_infinity.server.protocol import Encoding, UsageChunks
from moe_infinity.server.refusals import ErrorBody, Refused
from moe_infinity.server.sequences import Output, Progress, Request, TokenText

DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """The text and tokens that were generated for one choice so far."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    num_generated: int = 0
    num_cached: int = 0
    finish: str | None = None
    stop: str | None = None  # the stop string that was the reason

    def add(self, output: Output) -> None:
        self.text += output.text
        self.tokens += output.tokens
        self.num_generated = output.num_generated
        self.num_cached = output.num_cached
        self.finish = output.finish
        self.stop = output.stop


class Answer(ABC):
    """The answer to one HTTP request. What is never streamed has a body only."""

    media_type = "text/event-stream"
    shows_progress = False  # a stream has events for how far its prompts are

    def __init__(self, requests: Sequence[Request]) -> None:
        self._began_s = time.monotonic()
        self._first_s: float | None = None
        self._choices = [Choice() for _ in requests]
        prompts = {id(request.prompt_ids): len(request.prompt_ids) for request in requests}
        self._prompt_tokens = sum(prompts.values())
        self._is_first = [  # of the choices of its prompt
            at == 0 or requests[at - 1].prompt_ids is not request.prompt_ids
            for at, request in enumerate(requests)
        ]

    def add(self, index: int, output: Output) -> None:
        """Add an output to choice `index`."""
        if self._first_s is None:
            self._first_s = time.monotonic()
        self._choices[index].add(output)

    def seconds(self) -> tuple[float, float]:
        """How long it took to the first token, and from there until now."""
        now_s = time.monotonic()
        first_s = now_s if self._first_s is None else self._first_s
        return first_s - self._began_s, now_s - first_s

    def usage(self) -> dict[str, Any]:
        """Tokens of prompt and answer so far. A prompt counts once, however many its choices."""
        generated = sum(choice.num_generated for choice in self._choices)
        pairs = zip(self._choices, self._is_first, strict=True)
        cached = sum(choice.num_cached for choice, is_first in pairs if is_first)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The whole answer, once all outputs are added."""

    def first_chunks(self) -> list[str]:
        """The events with which a stream begins, before any output."""
        return []

    def chunk(self, index: int, output: Output) -> str:
        """The event for one output; empty if the output adds nothing to show."""
        return ""

    def life_chunk(self) -> str:
        """The sign of life of a stream that has nothing to say; by default a comment."""
        return ": still at work\n\n"

    def progress_chunk(self, index: int, progress: Progress) -> str:
        """The event for how far the prompt of choice `index` is; empty if no field says that."""
        return ""

    def last_chunks(self) -> list[str]:
        """The events with which a stream ends, after the last output."""
        return [DONE]

    def error_chunk(self, refused: Refused) -> str:
        """The event that ends a stream with an error."""
        return sse(ErrorBody(error=refused.error).model_dump())


class TextAnswer(Answer):
    """An answer of generated text. A subclass defines the fields of one kind of body."""

    id_prefix: str
    object: str
    chunk_object: str
    no_delta: dict[str, Any]  # the fields of a choice in a chunk without text

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        model: str,
        tokenizer: Any,
        usage_chunks: UsageChunks,
        shows_progress: bool = False,
    ) -> None:
        super().__init__(requests)
        self.shows_progress = shows_progress
        self._has_logprobs = requests[0].sampling.num_logprobs is not None
        self._usage_chunks = usage_chunks
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"moe-infinity-{__version__}",
        }

    def body(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "finish_reason": self._finish_reason(index),
                "logprobs": self._logprobs(choice.tokens),
                **self._content(index),
            }
            for index, choice in enumerate(self._choices)
        ]
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage()}

    def chunk(self, index: int, output: Output) -> str:
        return self._chunk(index, self._delta(index, output), output)

    def progress_chunk(self, index: int, progress: Progress) -> str:
        choice = {"index": index, "finish_reason": None, "logprobs": None, **self.no_delta}
        return self._event({"choices": [choice], "prompt_progress": progress_of(progress)})

    def last_chunks(self) -> list[str]:
        if self._usage_chunks == "none":
            return [DONE]
        return [self._event({"choices": [], "usage": self.usage()}), DONE]

    def _chunk(self, index: int, content: dict[str, Any], output: Output) -> str:
        logprobs = self._logprobs(output.tokens) if output.tokens else None
        finish = output.finish and self._finish_reason(index)
        choice = {"index": index, "finish_reason": finish, "logprobs": logprobs, **content}
        usage = {}
        if self._usage_chunks != "none":
            usage["usage"] = self.usage() if self._usage_chunks == "all" else None
        return self._event({"choices": [choice], **usage})

    def _event(self, rest: dict[str, Any]) -> str:
        return sse({**self._head, "object": self.chunk_object, **rest})

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        return self._shape_logprobs(tokens) if self._has_logprobs else None

    def _text_of(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text

    def _finish_reason(self, index: int) -> str | None:
        return self._choices[index].finish

    @abstractmethod
    def _content(self, index: int) -> dict[str, Any]:
        """The fields of a complete choice."""

    @abstractmethod
    def _delta(self, index: int, output: Output) -> dict[str, Any]:
        """The fields of a choice in the chunk for an output."""

    @abstractmethod
    def _shape_logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """The log-probabilities of tokens of one choice."""


class CompletionAnswer(TextAnswer):
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"
    no_delta = {"text": ""}

    def _content(self, index: int) -> dict[str, Any]:
        return {"text": self._choices[index].text}

    def _delta(self, index: int, output: Output) -> dict[str, Any]:
        return {"text": output.text}

    def _shape_logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        return {
            "tokens": [self._text_of(token.chosen.token_id) for token in tokens],
            "token_logprobs": [token.chosen.logprob for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _alternatives(self, token: TokenText) -> dict[str, float] | None:
        if token.chosen.logprob is None:  # the first of a prompt
            return None
        chosen = (token.chosen.token_id, token.chosen.logprob)
        pairs = (*token.chosen.alternatives, chosen)
        return {self._text_of(id_): logprob for id_, logprob in pairs}


class ChatAnswer(TextAnswer):
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    no_delta = {"delta": {}}

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        messages: Sequence[MessageReader],  # one for each choice
        calls_one_function: bool = False,  # `function_call` in place of `tool_calls`
        **settings: Any,
    ) -> None:
        super().__init__(requests, **settings)
        self._head["service_tier"] = "default"  # litellm's clients of Groq's API need one
        self._messages = messages
        self._calls_one_function = calls_one_function
        self._new: list[Parts] = [Parts() for _ in requests]  # what the newest output added
        self._num_reasoning = [0 for _ in requests]  # tokens, with those that begin a thought
        self._num_shown = [0 for _ in requests]  # tokens up to what was shown last

    def add(self, index: int, output: Output) -> None:
        super().add(index, output)
        is_cut = output.finish == "length" or output.stop is not None
        new = self._messages[index].add(output.text, is_last=output.is_last, is_cut=is_cut)
        self._new[index] = new
        if new.reasoning:
            self._num_reasoning[index] += output.num_generated - self._num_shown[index]
        if new.reasoning or new.content or new.calls:
            self._num_shown[index] = output.num_generated

    def usage(self) -> dict[str, Any]:
        details = {"reasoning_tokens": sum(self._num_reasoning)}
        return super().usage() | {"completion_tokens_details": details}

    def first_chunks(self) -> list[str]:
        role = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(index, role, Output()) for index in range(len(self._choices))]

    def life_chunk(self) -> str:
        """A chunk without text: some clients count the comments that come between."""
        unended = (at for at, choice in enumerate(self._choices) if choice.finish is None)
        return self._chunk(next(unended, 0), self.no_delta, Output())

    def _finish_reason(self, index: int) -> str | None:
        finish = super()._finish_reason(index)
        has_calls = bool(self._messages[index].message.calls)
        called = "function_call" if self._calls_one_function else "tool_calls"
        return called if has_calls and finish == "stop" else finish

    def _content(self, index: int) -> dict[str, Any]:
        message = self._messages[index].message
        calls = [call.as_dict() for call in message.calls]
        fields: dict[str, Any] = {
            "role": "assistant",
            "content": message.content if message.content or not calls else None,
            "refusal": None,
        }
        if message.reasoning:
            fields["reasoning_content"] = message.reasoning
        return {"message": fields | self._called(calls)}

    def _called(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The field for calls; none without any."""
        if not calls:
            return {}
        one = self._calls_one_function
        return {"function_call": calls[0]["function"]} if one else {"tool_calls": calls}

    def _delta(self, index: int, output: Output) -> dict[str, Any]:
        new = self._new[index]
        delta: dict[str, Any] = {"content": new.content} if new.content else {}
        if new.reasoning:
            delta["reasoning_content"] = new.reasoning
        if new.calls:
            first = len(self._messages[index].message.calls) - len(new.calls)
            calls = [{"index": first + at, **call.as_dict()} for at, call in enumerate(new.calls)]
            delta |= self._called(calls)
        return {"delta": delta}

    def _shape_logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        content = []
        for token in tokens:
            chosen = token.chosen
            assert chosen.logprob is not None
            best = [self._entry(id_, logprob) for id_, logprob in chosen.alternatives]
            content.append(self._entry(chosen.token_id, chosen.logprob) | {"top_logprobs": best})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text_of(token_id)
        # A token that is part of a character decodes to U+FFFD, which does not give its bytes.
        as_bytes = None if "�" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": as_bytes}


class EmbeddingsAnswer(Answer):
    """A vector of unit length for each input."""

    def __init__(
        self, requests: Sequence[Request], *, model: str, encoding: Encoding | None
    ) -> None:
        super().__init__(requests)
        self._model = model
        self._encoding = encoding
        self._vectors: list[tuple[float, ...]] = [()] * len(requests)

    def add(self, index: int, output: Output) -> None:
        super().add(index, output)
        self._vectors[index] = output.embedding

    def body(self) -> dict[str, Any]:
        """The whole answer, once all outputs are added."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            for index, vector in enumerate(self._vectors)
        ]
        usage = {name: self.usage()[name] for name in ("prompt_tokens", "total_tokens")}
        made = {"object": "list", "data": data, "model": self._model, "usage": usage}
        return {"id": f"embd-{uuid.uuid4().hex}"} | made  # Mistral's client needs one

    def _encoded(self, vector: tuple[float, ...]) -> list[float] | str:
        if self._encoding == "base64":
            return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode()
        return list(vector)


def progress_of(progress: Progress) -> dict[str, Any]:
    """How far a prompt is, in llama.cpp's words."""
    return {
        "total": progress.num_tokens,
        "cache": progress.num_cached,
        "processed": progress.num_read,
        "time_ms": round(progress.seconds * 1000),
    }


def sse(payload: dict[str, Any], name: str | None = None) -> str:
    """A server-sent event. It is ASCII: some clients split lines at Unicode line separators."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(payload)}\n\n"
