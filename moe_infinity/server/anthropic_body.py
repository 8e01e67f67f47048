"""Request bodies of Anthropic's Messages API, which become chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from moe_infinity.server.chat import ChatBody, Message
from moe_infinity.server.efforts import BUDGETS, BudgetTokens, Effort, Thinking
from moe_infinity.server.fields import (
    KEEPS_EMPTY,
    Body,
    Items,
    RequestBody,
    ToolOfType,
    refused_field,
    short,
)
from moe_infinity.server.parts import ImagePart, MediaPart, TextPart
from moe_infinity.server.protocol import SampledBody, Stop
from moe_infinity.server.refusals import BadRequest, wrong_fields

# What this API calls fields of a chat request.
NAMES = {
    "function.parameters": "input_schema",
    "response_format.json_schema.schema": "output_config.format.schema",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools, in words of the chat API
# So begins the first block of Claude Code's system prompt. It is left out, because it differs from
# conversation to conversation: no two would begin with the same tokens.
ATTRIBUTION = "x-anthropic-billing-header:"


class Cacheable(Body):
    cache_control: Any = None  # without effect: prefixes are kept in any case


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str


class TextSource(Body):
    """The text of a document."""

    type: Literal["text", "content"]
    data: str = ""
    content: Items[TextBlock] | str = ""


class DocumentBlock(Cacheable):
    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        texts = (self.title, self.context, self.source.data, text_of(self.source.content))
        return "\n".join(filter(None, texts))


class SearchResultBlock(Cacheable):
    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextBlock]

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, text_of(self.content)))


class CompactionBlock(Cacheable):
    """A summary of what was said before."""

    type: Literal["compaction"]
    text: str = Field("", alias="content")


class ThinkingBlock(Body):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Any = None  # without effect


class RedactedThinkingBlock(Body):
    """Reasoning that only another server can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Cacheable):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


class OtherBlock(Body):
    """A call of a tool of Anthropic's own servers, its result, or another block without text."""

    type: str

    def left_out(self) -> str | None:
        return f"a block of type {short(self.type)}"


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Items[Block] | str = ""
    is_error: bool | None = None  # without effect: chat templates have no place for it

    def for_chat(self) -> Message:
        has_images = any(isinstance(block, ImagePart) for block in self.content)
        content = parts_of(self.content) if has_images else text_of(self.content)
        return Message(role="tool", content=content, tool_call_id=self.tool_use_id)


def kind_of(block: Any) -> str:
    """The tag of a block in Block."""
    if not isinstance(block, dict):
        return "other"
    kind = block.get("type")
    source = block.get("source")
    if kind == "document" and isinstance(source, dict):
        is_text = source.get("type") in ("text", "content")
        return "document" if is_text else "media"
    if kind == "container_upload":
        return "media"
    return kind if kind in KINDS else "other"


KINDS = (
    "text", "document", "search_result", "compaction", "thinking", "redacted_thinking", "tool_use",
    "tool_result", "image",
)  # fmt: skip
Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[CompactionBlock, Tag("compaction")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ImagePart, Tag("image")]
    | Annotated[MediaPart, Tag("media")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(kind_of),
]
TEXTS = (TextBlock, DocumentBlock, SearchResultBlock, CompactionBlock)


def text_of(content: Sequence[Any] | str) -> str:
    """The text of a content."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, (*TEXTS, MediaPart)))


def parts_of(content: Sequence[Any] | str) -> list[Any]:
    """The content of a chat message."""
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    return [
        TextPart(type="text", text=block.text) if isinstance(block, TEXTS) else block
        for block in content
        if isinstance(block, (*TEXTS, MediaPart))
    ]


class ConversationTurn(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Items[Block] | str

    def for_chat(self) -> list[Message]:
        """For a user: a message for each result of a tool, then one for the text."""
        if self.role == "assistant":
            return [self._answer()]
        blocks = [] if isinstance(self.content, str) else self.content
        if any(isinstance(each, ToolUseBlock) for each in blocks):
            raise BadRequest("only an assistant uses tools", param="messages")
        results = [each.for_chat() for each in blocks if isinstance(each, ToolResultBlock)]
        if (parts := parts_of(self.content)) or not results:
            results.append(Message(role=self.role, content=parts))
        return results

    def _answer(self) -> Message:
        blocks = [] if isinstance(self.content, str) else self.content
        thinking = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
        fields = {
            "role": "assistant",
            "content": text_of(self.content),
            "reasoning_content": "".join(thinking),
            "tool_calls": [each.for_chat() for each in blocks if isinstance(each, ToolUseBlock)],
        }
        return Message.model_validate(fields)


class ClientTool(ToolOfType, Cacheable):
    """A tool. All but custom ones are tools of Anthropic's own."""

    known_type = "custom"
    name: str | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, KEEPS_EMPTY] = None
    strict: bool | None = None  # without effect: calls that are required fit the schema

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


class SchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type, "json_schema": {"schema": self.schema_}}


class OutputConfig(Body):
    effort: Effort | None = None
    format: SchemaFormat | None = None


class CountTokensBody(RequestBody, Cacheable):
    """The body of /v1/messages/count_tokens: what makes a prompt."""

    messages: Annotated[Items[ConversationTurn], Field(min_length=1)]
    system: Items[TextBlock] | str | None = None
    tools: Items[ClientTool] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    reasoning_budget_tokens: BudgetTokens | None = Field(None, validation_alias=BUDGETS)
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None  # what output_config.format was before

    def for_chat(self) -> ChatBody:
        """Raises BadRequest for what it could not answer, and RequestValidationError for what the
        chat body does not take.
        """
        messages = [message for each in self.messages for message in each.for_chat()]
        if system := self._system:
            messages.insert(0, Message(role="system", content=system))
        try:
            return ChatBody.model_validate({"messages": messages} | self._chat_fields())
        except ValidationError as error:
            raise wrong_fields(error) from error

    @property
    def _system(self) -> str:
        if isinstance(self.system, str):
            first, _, rest = self.system.partition("\n")
            return rest if first.startswith(ATTRIBUTION) else self.system
        blocks = self.system or []
        return text_of([each for each in blocks if not each.text.startswith(ATTRIBUTION)])

    def _chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"tools": [tool.for_chat() for tool in self._functions]}
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.for_chat()
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        config = self.output_config or OutputConfig()
        if structure := config.format or self.output_format:
            fields["response_format"] = structure.for_chat()
        effort = None if self.thinking is None else self.thinking.effort()
        fields["reasoning_effort"] = effort if effort == "none" else config.effort or effort
        fields["thinking"] = self.thinking
        fields["reasoning_budget_tokens"] = self.reasoning_budget_tokens
        return fields

    @property
    def _functions(self) -> list[ClientTool]:
        functions = []
        for at, tool in enumerate(self.tools or ()):
            if tool.left_out() is not None:
                continue
            for name in ("name", "input_schema"):
                if getattr(tool, name) is None:
                    raise refused_field(("tools", str(at), name), "Field required")
            functions.append(tool)
        return functions


class MessagesBody(CountTokensBody, SampledBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)  # 0: all
    stop_sequences: Items[Stop] | None = None
    metadata: Any = None  # for the client's own use: it has no effect

    def _chat_fields(self) -> dict[str, Any]:
        fields = super()._chat_fields() | self.sampling_fields() | {"max_tokens": self.max_tokens}
        return fields | ({"stop": self.stop_sequences} if self.stop_sequences else {})
