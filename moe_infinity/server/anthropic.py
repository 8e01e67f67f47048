"""Answers of Anthropic's Messages API for text and tools.

An answer is a list of blocks: thinking, text and uses of tools, in the order in which the model
wrote them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from moe_infinity.server.answers import ChatAnswer, sse
from moe_infinity.server.messages import ToolCall
from moe_infinity.server.refusals import PromptTooLong, Refused
from moe_infinity.server.sequences import Output, Request
from moe_infinity.server.shapes import object_of

# What statuses are called; any other below 500 is an invalid request.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Nobody signs thoughts here, but clients leave out those without any signature.
UNSIGNED = "unsigned"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(ChatAnswer):
    """An answer of blocks.

    The events of a stream: message_start and a ping; for each block content_block_start, a
    content_block_delta for each piece, and content_block_stop; message_delta, message_stop.
    """

    def __init__(self, requests: Sequence[Request], **settings: Any) -> None:
        super().__init__(requests, **settings)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # the last block may get more
        self._events: list[str] = []  # of the newest output

    def add(self, index: int, output: Output) -> None:
        super().add(index, output)
        new = self._new[index]
        self._events = []
        self._add_text("thinking", new.reasoning)
        self._add_text("text", new.content)
        for call in new.calls:
            self._add_call(call)

    def body(self) -> dict[str, Any]:
        self._close()
        return self._message() | {"content": self._blocks, **self._stop()}

    def first_chunks(self) -> list[str]:
        return [self._named("message_start", message=self._message()), self.life_chunk()]

    def life_chunk(self) -> str:
        return self._named("ping")

    def chunk(self, index: int, output: Output) -> str:
        return "".join(self._events)

    def last_chunks(self) -> list[str]:
        self._events = []
        self._close()
        delta = self._named("message_delta", delta=self._stop(), usage=self._token_counts())
        return [*self._events, delta, self._named("message_stop")]

    def error_chunk(self, refused: Refused) -> str:
        return sse(error_of(refused), "error")

    def _message(self) -> dict[str, Any]:
        """The message before it has any content."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._token_counts(),
        }

    def _stop(self) -> dict[str, Any]:
        """Why the answer ended."""
        finish = self._finish_reason(0)
        sequence = self._choices[0].stop if finish == "stop" else None
        reason = "stop_sequence" if sequence is not None else STOP_REASONS[str(finish)]
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _token_counts(self) -> dict[str, int]:
        """So far: how much of the prompt is cached is known after the first output."""
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def _add_text(self, kind: str, text: str) -> None:
        """Add to the open block of this kind, or to a new one."""
        if not text:
            return
        if not self._is_open or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            self._open({"type": kind, kind: "", **signature})
        self._blocks[-1][kind] += text
        self._add_delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: ToolCall) -> None:
        """Add a block of its own, which is complete."""
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._open(block)
        block["input"] = object_of(call.arguments)
        as_json = json.dumps(block["input"])
        self._add_delta({"type": "input_json_delta", "partial_json": as_json})
        self._close()

    def _open(self, block: dict[str, Any]) -> None:
        self._close()
        self._blocks.append(block)
        self._is_open = True
        self._add_event("content_block_start", content_block=block)

    def _add_delta(self, delta: dict[str, Any]) -> None:
        self._add_event("content_block_delta", delta=delta)

    def _close(self) -> None:
        if self._is_open:
            if self._blocks[-1]["type"] == "thinking":
                self._blocks[-1]["signature"] = UNSIGNED
                self._add_delta({"type": "signature_delta", "signature": UNSIGNED})
            self._add_event("content_block_stop")
        self._is_open = False

    def _add_event(self, kind: str, **rest: Any) -> None:
        """Add an event of the last block."""
        self._events.append(self._named(kind, index=len(self._blocks) - 1, **rest))

    def _named(self, kind: str, **rest: Any) -> str:
        return sse({"type": kind, **rest}, kind)


class ErrorDetails(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorBody(BaseModel):
    """The body of every refusal of these routes."""

    type: Literal["error"] = "error"
    error: ErrorDetails


def error_of(refused: Refused) -> dict[str, Any]:
    """A refusal in Anthropic's form."""
    kind = ERROR_TYPES.get(refused.status_code, "invalid_request_error")
    message = refused.error.message
    if isinstance(refused, PromptTooLong):  # in the words for which clients look
        message = f"prompt is too long: {refused.num_tokens} tokens > {refused.most} maximum"
    error = ErrorDetails(type=kind, message=message)
    if refused.error.param == "thread":  # then Anthropic's client sends the whole conversation
        error.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return AnthropicErrorBody(error=error).model_dump(exclude_none=True)
