"""Request bodies of OpenAI's Responses API, which become chat requests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from moe_infinity.server.agent_messages import AgentMessage
from moe_infinity.server.chat import ChatBody, Message, require_readable
from moe_infinity.server.efforts import ReasoningFields
from moe_infinity.server.fields import Body, Items, ToolOfType, refused_field, short
from moe_infinity.server.functions import AllowedTools, of_known_type
from moe_infinity.server.limits import LOGPROBS, MESSAGES, METADATA
from moe_infinity.server.parts import Part
from moe_infinity.server.protocol import (
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    SampledBody,
    TextFormat,
)
from moe_infinity.server.refusals import BadRequest

# What this API calls fields of a chat request.
NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.schema": "text.format.schema",
    "response_format.grammar": "text.format.grammar",
    "function.parameters": "parameters",
}
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which a model knows a function: chat templates have no namespaces."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


class ResponseTool(ToolOfType):
    """A tool. All but functions are tools of OpenAI's own servers, or of a certain client."""

    known_type = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # without effect: calls that are required fit the schema

    def for_chat(self, namespace: str | None) -> dict[str, Any]:
        function = self.model_dump(include={"description", "parameters"}, exclude_none=True)
        name = full_name(namespace, self.name or "")
        return {"type": "function", "function": {"name": name, "parameters": {}} | function}

    def echoed(self) -> dict[str, Any]:
        return {"type": "function"} | self.model_dump(exclude={"type"})


class Namespace(Body):
    """A group of tools, those of one MCP server say."""

    type: Literal["namespace"]
    name: str
    description: str = ""  # without effect: chat templates have no place for it
    tools: Items[ResponseTool] = Field(default_factory=list)

    def echoed(self) -> dict[str, Any]:
        tools = [tool.echoed() for tool in self.tools if tool.left_out() is None]
        return self.model_dump(exclude={"tools"}) | {"tools": tools}


def kind_of_tool(tool: Any) -> str:
    """The tag in ToolOrNamespace of a tool."""
    is_namespace = isinstance(tool, dict) and tool.get("type") == "namespace"
    return "namespace" if is_namespace else "tool"


ToolOrNamespace = Annotated[
    Annotated[ResponseTool, Tag("tool")] | Annotated[Namespace, Tag("namespace")],
    Discriminator(kind_of_tool),
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Items[Part] | str

    def for_chat(self) -> Message:
        return Message(role=self.role, content=self.content)


class FunctionCall(Body):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    namespace: str | None = None
    name: str
    arguments: str = ""

    def for_chat(self) -> Message:
        name = full_name(self.namespace, self.name)
        function = {"name": name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return Message.model_validate({"role": "assistant", "tool_calls": [call]})


class CustomToolCall(Body):
    """A call of a tool whose input is a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str = ""

    def for_chat(self) -> Message:
        custom = {"name": self.name, "input": self.input}
        call = {"id": self.call_id, "type": "custom", "custom": custom}
        return Message.model_validate({"role": "assistant", "tool_calls": [call]})


class CallOutput(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = ""
    output: Items[Part] | str

    def for_chat(self) -> Message:
        return Message(role="tool", content=self.output, tool_call_id=self.call_id)


class ReasoningText(Body):
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None

    def for_chat(self) -> Message:
        text = "".join(each.text for each in self.content or ())
        return Message(role="assistant", reasoning_content=text or None)


class AdditionalTools(Body):
    """Tools that are offered from this item on."""

    type: Literal["additional_tools", "tool_search_output"]
    tools: Items[ToolOrNamespace] = Field(default_factory=list)

    def for_chat(self) -> None:
        return None


class OtherItem(Body):
    """A call of a tool of OpenAI's own servers, or its result."""

    type: str

    def for_chat(self) -> None:
        return None

    def left_out(self) -> str | None:
        return f"an input item of type {short(self.type)}"


class ItemReference(Body):
    """The id of an item of an earlier answer. `kept` puts the item in its place."""

    type: Literal["item_reference"] = "item_reference"
    id: str

    def for_chat(self) -> None:
        return None


def kind_of(item: Any) -> str:
    """The tag in ITEMS of an input item."""
    if not isinstance(item, dict):
        return "message"
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    return kind if kind in KINDS else "other"


KINDS = (
    "message", "function_call", "custom_tool_call", "function_call_output",
    "custom_tool_call_output", "reasoning", "item_reference", "additional_tools",
    "tool_search_output", "agent_message",
)  # fmt: skip
InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[AdditionalTools, Tag("additional_tools")]
    | Annotated[AdditionalTools, Tag("tool_search_output")]
    | Annotated[AgentMessage, Tag("agent_message")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(kind_of),
]


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """The messages of items. What makes one answer of a model becomes one message."""
    messages: list[Message] = []
    for item in items:
        new = item.for_chat()
        if new is None:
            continue
        if messages and _is_one_answer(messages[-1], new):
            new = _joined(messages.pop(), new)
        messages.append(new)
    return messages


def _is_one_answer(last: Message, new: Message) -> bool:
    is_answer = last.role == new.role == "assistant"
    return is_answer and bool(new.tool_calls or not (last.tool_calls or last.content))


def _joined(last: Message, new: Message) -> Message:
    reasoning = (last.reasoning_content or "") + (new.reasoning_content or "")
    changed = {
        "content": new.content or last.content,
        "tool_calls": [*(last.tool_calls or ()), *(new.tool_calls or ())] or None,
        "reasoning_content": reasoning or None,
    }
    return last.model_copy(update=changed)


class FlatSchemaFormat(JsonSchema):
    type: Literal["json_schema"]

    def for_chat(self) -> dict[str, Any]:
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": "json_schema", "json_schema": schema}


class TextConfig(Body):
    format: Annotated[
        TextFormat | JsonObjectFormat | FlatSchemaFormat | GrammarFormat | None,
        Field(discriminator="type"),
    ] = None

    def for_chat(self) -> dict[str, Any] | None:
        if isinstance(self.format, FlatSchemaFormat):
            return self.format.for_chat()
        return None if self.format is None else self.format.model_dump(by_alias=True)


class NamedChoice(Body):
    type: Literal["function"]
    name: str

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class AllowedChoice(AllowedTools):
    type: Literal["allowed_tools"]

    def for_chat(self) -> dict[str, Any]:
        tools = [{"name": name} for name in self.names]
        return {"type": self.type, self.type: {"mode": self.mode, "tools": tools}}


class EventOptions(Body):
    include_obfuscation: Any = None  # without effect


class ResponsesBody(ReasoningFields, SampledBody):
    """The body of /v1/responses."""

    # The list is first: an error in a message then names the message.
    input: Annotated[Items[InputItem], Field(min_length=1, max_length=MESSAGES.most)] | str
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=LOGPROBS.most)
    include: Items[str] | None = None  # only message.output_text.logprobs has an effect
    tools: Items[ToolOrNamespace] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None,
        BeforeValidator(of_known_type),
    ] = None
    stream_options: EventOptions | None = None
    previous_response_id: str | None = None  # `kept` puts its items in front of the input
    metadata: (
        Annotated[dict[MetadataKey, MetadataValue], Field(max_length=METADATA.most)] | None
    ) = None
    parallel_tool_calls: bool | None = None
    # For the server's own use, without effect: prefixes are kept in any case.
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    text: TextConfig | None = None
    truncation: Any = None  # without effect: a prompt that is too long is refused

    @field_validator("max_output_tokens", mode="before")
    @classmethod
    def _negative_is_any_number(cls, value: Any) -> Any:
        return None if value == -1 else value

    def for_chat(self) -> ChatBody:
        messages = []
        if self.instructions is not None:
            messages.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages += messages_of(self.input)
        if not messages:
            raise BadRequest("this has no messages", param="input")
        require_readable(messages, "input")
        choice = self.tool_choice
        wants_logprobs = "message.output_text.logprobs" in (self.include or ())
        has_logprobs = wants_logprobs or bool(self.top_logprobs)
        chat = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": has_logprobs,
            "top_logprobs": self.top_logprobs if has_logprobs else None,
            "tools": [tool.for_chat(namespace) for namespace, tool in self._functions] or None,
            "tool_choice": choice.for_chat() if isinstance(choice, Body) else choice,
            "response_format": self._response_format,
            "parallel_tool_calls": self.parallel_tool_calls,
            "add_generation_prompt": True,  # an answer at the end is complete
        }
        return ChatBody.model_validate(self.sampling_fields() | self.reasoning_fields() | chat)

    @property
    def _response_format(self) -> Any:
        """The form of the text. Raises BadRequest where chat's word for it says another."""
        form = None if self.text is None else self.text.for_chat()
        if form is not None and self.response_format is not None:
            raise BadRequest("give either this or text.format", param="response_format")
        return form or self.response_format

    @property
    def _functions(self) -> list[tuple[str | None, ResponseTool]]:
        """Functions, each with the name of its namespace."""
        items = [] if isinstance(self.input, str) else self.input
        later = [item.tools for item in items if isinstance(item, AdditionalTools)]
        functions = []
        for tool in chain(self.tools or (), *later):
            namespace = tool.name if isinstance(tool, Namespace) else None
            tools = tool.tools if isinstance(tool, Namespace) else [tool]
            functions += [(namespace, each) for each in tools if each.left_out() is None]
        for at, (_, function) in enumerate(functions):
            if function.name is None:
                raise refused_field(("tools", str(at), "name"), "Field required")
        return functions

    def names_in_namespaces(self) -> dict[str, dict[str, str]]:
        """The fields that name a function in a call, by the name that the model knows."""
        return {
            full_name(namespace, str(tool.name)): {"namespace": namespace, "name": str(tool.name)}
            for namespace, tool in self._functions
            if namespace is not None
        }

    def echoed_fields(self) -> dict[str, Any]:
        """The fields of the request that an answer repeats."""
        choice = self.tool_choice or "auto"
        reasoning = self.reasoning and {"effort": self.reasoning.effort, "summary": None}
        text_format = (self.text and self.text.format) or TextFormat(type="text")
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": reasoning,
            "service_tier": "default",
            "text": {"format": text_format.model_dump(by_alias=True)},
            "tool_choice": choice.model_dump(exclude_none=True)
            if isinstance(choice, Body)
            else choice,
            "tools": [tool.echoed() for tool in self.tools or () if tool.left_out() is None],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "user": self.user if isinstance(self.user, str) else None,
        }
