"""Request bodies of Ollama's API, and the requests of OpenAI's that they become."""

from __future__ import annotations

import re
from itertools import count
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from moe_infinity.server.chat import ChatBody
from moe_infinity.server.efforts import EFFORTS
from moe_infinity.server.fields import BoundedBody, Items
from moe_infinity.server.llama_options import ollama_options_of
from moe_infinity.server.protocol import CompletionBody
from moe_infinity.server.refusals import BadRequest, wrong_fields

Parsed = TypeVar("Parsed", bound=BaseModel)
NO_TIME = re.compile(r"-?(0+(\.0+)?(ns|us|µs|ms|s|m|h))+|-?0+(\.0+)?")
MOST_OF_TIME = 64  # characters


class OllamaBody(BoundedBody):
    """A body of which unknown fields are ignored, as Ollama does."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    model: str | None = None


class OllamaMessage(OllamaBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Items[Any] | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None  # of a result

    def call_of(self, calls: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the call that this is the result of: by its id, or else the first of its name, or
        else the first. None if there are none.
        """
        by_id = [call for call in calls if call["id"] == self.tool_call_id]
        by_name = [call for call in calls if name_in(call) == self.tool_name]
        return next(iter(by_id or by_name or calls), None)


def parts_of(images: list[Any], text: str | None) -> list[dict[str, Any]]:
    """Return the content of a message; the images come first, as in Ollama."""
    parts = [{"type": "image", "data": data} for data in images]
    return [*parts, {"type": "text", "text": text or ""}]


def name_in(call: dict[str, Any]) -> Any:
    """Return the name of the function that a call is of."""
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


class OllamaGenerationBody(OllamaBody):
    """The fields that chat and generate share. Options that are about the machine have no effect,
    as has `keep_alive`: the model stays loaded, whatever the answer says.
    """

    stream: bool | None = None  # left out: yes
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: Any = None  # seconds, or a text such as "5m"

    @property
    def wants_unload(self) -> bool:
        text = str(self.keep_alive)
        return len(text) <= MOST_OF_TIME and NO_TIME.fullmatch(text) is not None

    def generation_fields(self) -> dict[str, Any]:
        """The fields of a request of OpenAI's. Raises BadRequest."""
        return ollama_options_of(self.options or {}) | {"stream": self.stream is not False}

    def chat_body(self, messages: list[dict[str, Any]], **fields: Any) -> ChatBody:
        """A chat request. Raises BadRequest and RequestValidationError."""
        fields |= self.generation_fields() | {"messages": messages}
        effort = self.think if isinstance(self.think, str) else EFFORTS[self.think]
        fields["reasoning_effort"] = effort
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            schema = {"name": "answer", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return parsed(ChatBody, fields)


class OllamaChatBody(OllamaGenerationBody):
    """The body of /api/chat."""

    messages: Items[OllamaMessage] | None = None
    tools: Items[dict[str, Any]] | None = None

    def for_chat(self) -> ChatBody:
        """Raises BadRequest and RequestValidationError."""
        ids = (f"call_{number}" for number in count())
        open_calls: list[dict[str, Any]] = []  # without a result
        messages = []
        for each in self.messages or ():
            message: dict[str, Any] = {"role": each.role, "content": each.content or ""}
            if each.images:
                message["content"] = parts_of(each.images, each.content)
            if each.thinking:
                message["reasoning_content"] = each.thinking
            if each.tool_calls:
                calls = [{"id": next(ids), "type": "function"} | call for call in each.tool_calls]
                open_calls = list(calls)
                message["tool_calls"] = calls
            if each.role == "tool":
                call = each.call_of(open_calls) or {"id": next(ids)}
                open_calls = [other for other in open_calls if other is not call]
                message["tool_call_id"] = each.tool_call_id or call["id"]
            messages.append(message)
        return self.chat_body(messages, tools=self.tools or None)


class OllamaGenerateBody(OllamaGenerationBody):
    """The body of /api/generate. With `raw` the prompt is the model's, as it is."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    images: Items[Any] | None = None
    template: str | None = None
    context: Items[int] | None = None

    def require_possible(self) -> None:
        """Raises BadRequest for a field that this server has nothing for."""
        for name in ("suffix", "template", "context"):
            if getattr(self, name):
                raise BadRequest("this field is not supported", param=name)
        if self.images and self.raw:
            raise BadRequest("a raw prompt has no place for images", param="images")

    def for_chat(self) -> ChatBody:
        """Raises BadRequest and RequestValidationError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = parts_of(self.images, self.prompt) if self.images else self.prompt
        return self.chat_body([*system, {"role": "user", "content": content}])

    def for_completion(self) -> CompletionBody:
        """Raises BadRequest and RequestValidationError."""
        if self.system:
            raise BadRequest("a prompt without a template has no place for it", param="system")
        fields: dict[str, Any] = self.generation_fields() | {"prompt": self.prompt}
        if self.format:
            schema = {"type": "object"} if self.format == "json" else self.format
            fields["structured_outputs"] = {"json": schema}
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return parsed(CompletionBody, fields)


class OllamaEmbedBody(OllamaBody):
    """The body of /api/embed, and with `prompt` of the older /api/embeddings."""

    input: str | Items[str] | None = None
    prompt: str | None = None
    dimensions: int | None = None


class OllamaShowBody(OllamaBody):
    name: str | None = None  # an older name of `model`


class OllamaPullBody(OllamaShowBody):
    stream: bool | None = None


def parsed(kind: type[Parsed], fields: dict[str, Any]) -> Parsed:
    """The body of another API. Raises RequestValidationError, which names the field."""
    try:
        return kind.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise wrong_fields(error) from error
