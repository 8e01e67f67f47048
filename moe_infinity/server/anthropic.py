"""Anthropic's Messages API for text and tools.

A request becomes a chat request. Its answer is a list of blocks: thinking, text and uses of tools,
in the order in which the model wrote them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError

from moe_infinity.server.answers import ChatAnswer, sse
from moe_infinity.server.messages import ToolCall
from moe_infinity.server.protocol import MAX_STOPS, Body, ChatBody, Message, Stop
from moe_infinity.server.refusals import BadRequest, Refused
from moe_infinity.server.sequences import Output, Request

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
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# What this API calls a field of a chat request.
NAMES = {"function.parameters": "input_schema"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools, in words of the chat API


class CacheControl(Body):
    """Without effect: prefixes are kept in any case."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(Body):
    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str
    citations: None = None


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: str
    content: list[TextBlock] | str = ""
    is_error: bool | None = None  # without effect: chat templates have no place for it
    toolset_name: None = None

    def for_chat(self) -> Message:
        return Message(role="tool", content=text_of(self.content), tool_call_id=self.tool_use_id)


class ThinkingBlock(Body):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # ignored


class ToolUseBlock(Cacheable):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: None = None
    toolset_name: None = None

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Body):
    role: Literal["user"]
    content: list[UserBlock] | str

    def for_chat(self) -> list[Message]:
        """A message for each result of a tool, then one for the text."""
        if isinstance(self.content, str):
            return [Message(role="user", content=self.content)]
        results = [each.for_chat() for each in self.content if isinstance(each, ToolResultBlock)]
        texts = [each for each in self.content if isinstance(each, TextBlock)]
        if texts or not results:
            results.append(Message(role="user", content=text_of(texts)))
        return results


class AssistantMessage(Body):
    """An earlier answer."""

    role: Literal["assistant"]
    content: list[AssistantBlock] | str

    def for_chat(self) -> list[Message]:
        if isinstance(self.content, str):
            return [Message(role="assistant", content=self.content)]
        texts = [each for each in self.content if isinstance(each, TextBlock)]
        thinking = [each.thinking for each in self.content if isinstance(each, ThinkingBlock)]
        calls = [each.for_chat() for each in self.content if isinstance(each, ToolUseBlock)]
        message = Message(
            role="assistant",
            content=text_of(texts),
            reasoning_content="".join(thinking) or None,
            tool_calls=calls or None,
        )
        return [message]


Turn = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


def text_of(content: Sequence[TextBlock] | str) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


class ClientTool(Cacheable):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Literal[False] | None = None

    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


class ToolChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> Any:
        return CHOICES[self.type]


class NamedToolChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> Any:
        return {"type": "function", "function": {"name": self.name}}


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1024)  # without effect: no model here knows budgets
    display: Literal["summarized"] | None = None

    def effort(self) -> str | None:
        return {"enabled": "medium", "disabled": "none", "adaptive": None}[self.type]


class CountTokensBody(Cacheable):
    """The body of /v1/messages/count_tokens: what makes a prompt."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: list[TextBlock] | str | None = None
    tools: list[ClientTool] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None

    def for_chat(self) -> ChatBody:
        """Raises BadRequest for what it could not answer, and RequestValidationError for what the
        chat body does not take.
        """
        messages = [message for each in self.messages for message in each.for_chat()]
        if messages and messages[-1].role == "assistant":
            raise BadRequest("the last one must be a user's, not an answer", param="messages")
        if self.system is not None:
            messages.insert(0, Message(role="system", content=text_of(self.system)))
        try:
            return ChatBody.model_validate({"messages": messages} | self._chat_fields())
        except ValidationError as error:
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise RequestValidationError(errors) from error

    def _chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.tools:
            fields["tools"] = [tool.for_chat() for tool in self.tools]
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.for_chat()
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            fields["reasoning_effort"] = self.thinking.effort()
        return fields


class Metadata(Body):
    user_id: str | None = None  # for the client's own use: it has no effect


class MessagesBody(CountTokensBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)  # 0: the likeliest token
    top_k: int | None = Field(None, ge=0)  # 0: all
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None

    def _chat_fields(self) -> dict[str, Any]:
        same = self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "stream"})
        return super()._chat_fields() | same | {"stop": self.stop_sequences}


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
        block["input"] = input_of(call.arguments)
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
            self._add_event("content_block_stop")
        self._is_open = False

    def _add_event(self, kind: str, **rest: Any) -> None:
        """Add an event of the last block."""
        self._events.append(self._named(kind, index=len(self._blocks) - 1, **rest))

    def _named(self, kind: str, **rest: Any) -> str:
        return sse({"type": kind, **rest}, kind)


def input_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object. What is none becomes the only value of one."""
    try:
        values = json.loads(arguments)
    except ValueError:
        values = arguments
    return values if isinstance(values, dict) else {"arguments": values}


class ErrorDetails(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every refusal of these routes."""

    type: Literal["error"] = "error"
    error: ErrorDetails


def error_of(refused: Refused) -> dict[str, Any]:
    """A refusal in Anthropic's form."""
    kind = ERROR_TYPES.get(refused.status_code, "invalid_request_error")
    error = ErrorDetails(type=kind, message=refused.error.message)
    return AnthropicErrorBody(error=error).model_dump()
