"""OpenAI's Responses API for text. Each request brings its whole conversation; none is stored.

A request becomes a chat request. Its answer has other fields than a chat answer, and the events of
its stream have names and sequence numbers.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field

from moe_infinity.server.answers import ChatAnswer, sse
from moe_infinity.server.messages import ToolCall
from moe_infinity.server.protocol import (
    MAX_LOGPROBS,
    Body,
    ChatBody,
    Effort,
    JsonObjectFormat,
    JsonSchema,
    Message,
    SampledBody,
    TextFormat,
)
from moe_infinity.server.refusals import Refused
from moe_infinity.server.sequences import Output, Request, TokenText

# What this API calls fields of a chat request.
NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "function.parameters": "parameters",
}
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class InputPart(Body):
    type: Literal["input_text", "output_text"]
    text: str
    # A client may send back an earlier answer unchanged; only its text is read.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputPart] | str
    id: str | None = None  # id, status and phase: of an earlier answer, ignored
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None

    def for_chat(self) -> Message:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Message(role=self.role, content=text)


class FunctionCall(Body):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None  # ignored, as is status
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def for_chat(self) -> Message:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return Message(role="assistant", tool_calls=[call])


class FunctionCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def for_chat(self) -> Message:
        return Message(role="tool", content=self.output, tool_call_id=self.call_id)


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None

    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(exclude={"type", "strict"}, exclude_none=True)
        return {"type": "function", "function": {"parameters": {}} | function}


InputItem = FunctionCall | FunctionCallOutput | InputMessage


class FlatSchemaFormat(JsonSchema):
    type: Literal["json_schema"]

    def for_chat(self) -> dict[str, Any]:
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": "json_schema", "json_schema": schema}


class TextConfig(Body):
    format: Annotated[
        TextFormat | JsonObjectFormat | FlatSchemaFormat | None, Field(discriminator="type")
    ] = None

    def for_chat(self) -> dict[str, Any] | None:
        if isinstance(self.format, FlatSchemaFormat):
            return self.format.for_chat()
        return None if self.format is None else self.format.model_dump()


class FunctionChoice(Body):
    type: Literal["function"]
    name: str

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class Reasoning(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # without effect


class EventOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(SampledBody):
    """The body of /v1/responses."""

    # The list is first: an error in a message then names the message.
    input: Annotated[list[InputItem], Field(min_length=1)] | str
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    # The second is for reasoning that is kept by the client; there is none.
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    stream_options: EventOptions | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    background: Literal[False] | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    reasoning: Reasoning | None = None
    # For the server's own use, without effect: prefixes are kept in any case.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None

    def for_chat(self) -> ChatBody:
        messages = []
        if self.instructions is not None:
            messages.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages += [message.for_chat() for message in self.input]
        choice = self.tool_choice
        wants_logprobs = "message.output_text.logprobs" in (self.include or ())
        has_logprobs = wants_logprobs or bool(self.top_logprobs)
        chat = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": has_logprobs,
            "top_logprobs": self.top_logprobs if has_logprobs else None,
            "tools": [tool.for_chat() for tool in self.tools] if self.tools else None,
            "tool_choice": choice.for_chat() if isinstance(choice, FunctionChoice) else choice,
            "response_format": None if self.text is None else self.text.for_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "stream": self.stream,
        }
        return ChatBody.model_validate(chat)

    def echoed_fields(self) -> dict[str, Any]:
        """The fields of the request that an answer repeats."""
        choice = self.tool_choice or "auto"
        text_format = (self.text and self.text.format) or TextFormat(type="text")
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": None if self.reasoning is None else self.reasoning.model_dump(),
            "service_tier": "default",
            "store": False,
            "text": {"format": text_format.model_dump(by_alias=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice,
            "tools": [tool.model_dump() for tool in self.tools or []],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "user": self.user,
        }


class ResponseAnswer(ChatAnswer):
    """An answer of one message that has one part of text, and of calls of functions.

    The events of a stream: response.created, response.in_progress, output_item.added,
    content_part.added, output_text.delta for each piece, output_text.done, content_part.done,
    output_item.done; four for each call; then response.completed or response.incomplete.
    """

    def __init__(
        self, requests: Sequence[Request], *, asked: ResponsesBody, **settings: Any
    ) -> None:
        super().__init__(requests, **settings)
        sampling = requests[0].sampling
        self._echoed_fields = asked.echoed_fields() | {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._num_events = 0

    def body(self) -> dict[str, Any]:
        status = self._status
        usage = self.usage()
        is_cut = status == "incomplete"
        return self._response(
            status,
            output=[self._item(status), *map(self._call, self._messages[0].message.calls)],
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        )

    def first_chunks(self) -> list[str]:
        begun = self._response("in_progress")
        item = self._item("in_progress") | {"content": []}
        return [
            self._named("response.created", response=begun),
            self._named("response.in_progress", response=begun),
            self._named("response.output_item.added", output_index=0, item=item),
            self._of_part("content_part.added", part=self._part()),
        ]

    def life_chunk(self) -> str:
        """The only event that has no effect."""
        return self._named("response.in_progress", response=self._response("in_progress"))

    def chunk(self, index: int, output: Output) -> str:
        text = self._new[index].content
        if not text and not output.tokens:
            return ""
        logprobs = self._entries(output.tokens)
        return self._of_part("output_text.delta", delta=text, logprobs=logprobs)

    def last_chunks(self) -> list[str]:
        part = self._part()
        body = self.body()
        text_done = {"text": part["text"], "logprobs": part["logprobs"]}
        item = body["output"][0]
        return [
            self._of_part("output_text.done", **text_done),
            self._of_part("content_part.done", part=part),
            self._named("response.output_item.done", output_index=0, item=item),
            *chain.from_iterable(
                self._call_chunks(at, call) for at, call in enumerate(body["output"]) if at > 0
            ),
            self._named(f"response.{body['status']}", response=body),
        ]

    def _call_chunks(self, output_index: int, call: dict[str, Any]) -> list[str]:
        begun = call | {"arguments": "", "status": "in_progress"}
        place = {"output_index": output_index, "item_id": call["id"]}
        kind = "response.function_call_arguments"
        done = {"name": call["name"], "arguments": call["arguments"]}
        return [
            self._named("response.output_item.added", output_index=output_index, item=begun),
            self._named(f"{kind}.delta", **place, delta=call["arguments"]),
            self._named(f"{kind}.done", **place, **done),
            self._named("response.output_item.done", output_index=output_index, item=call),
        ]

    def _call(self, call: ToolCall) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": call.id.replace("call_", "fc_"),
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }

    def error_chunk(self, refused: Refused) -> str:
        """The event that ends a stream with an error.

        The fields are flat, as documented, and nested, as clients need them to raise an error.
        """
        error = refused.error.model_dump()
        flat = {name: error[name] for name in ("code", "message", "param")}
        return self._named("error", **flat, error=error)

    @property
    def _status(self) -> str:
        return "incomplete" if self._choices[0].finish == "length" else "completed"

    def _response(self, status: str, **rest: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._echoed_fields,
            **rest,
        }

    def _item(self, status: str) -> dict[str, Any]:
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return item | {"content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        choice = self._choices[0]
        text = self._messages[0].message.content
        part = {"type": "output_text", "text": text, "annotations": []}
        return part | {"logprobs": self._entries(choice.tokens)}

    def _entries(self, tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
        shaped = self._logprobs(tokens)
        return [] if shaped is None else shaped["content"]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        entry = super()._entry(token_id, logprob)
        return entry | {"bytes": entry["bytes"] or []}  # this API has no null here

    def _of_part(self, kind: str, **rest: Any) -> str:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._named(f"response.{kind}", **place, **rest)

    def _named(self, kind: str, **rest: Any) -> str:
        event = {"type": kind, "sequence_number": self._num_events, **rest}
        self._num_events += 1
        return sse(event, kind)
