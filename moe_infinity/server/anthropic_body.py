"""Request bodies of Anthropic's Messages API, which become chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from moe_infinity.server.anthropic_tools import (
    Cacheable,
    ClientTool,
    NamedToolChoice,
    Path,
    ToolChange,
    ToolChoice,
    offered_at_the_end,
)
from moe_infinity.server.chat import ChatBody, Message
from moe_infinity.server.efforts import Effort, ReasoningFields
from moe_infinity.server.fields import (
    KEEPS_EMPTY,
    Body,
    Items,
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
# So begins the first block of Claude Code's system prompt. It is left out, because it differs from
# conversation to conversation: no two would begin with the same tokens.
ATTRIBUTION = "x-anthropic-billing-header:"


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str


class TextSource(Body):
    """The text of a document."""

    type: Literal["text", "content"]
    data: str = ""
    content: Items[Block] | str = ""


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


class ToolReferenceBlock(Cacheable):
    """A tool that a search for tools has found."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} can be called."


class CompactionBlock(Cacheable):
    """A summary of what was said before."""

    type: Literal["compaction"]
    text: str = Field("", alias="content")
    tool_changes: Items[ToolChange] | None = None  # of what was said before


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
    if kind in ("tool_addition", "tool_removal"):
        return "tool_change"
    return kind if kind in KINDS else "other"


KINDS = (
    "text", "document", "search_result", "compaction", "thinking", "redacted_thinking", "tool_use",
    "tool_result", "tool_reference", "image",
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
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[ToolChange, Tag("tool_change")]
    | Annotated[ImagePart, Tag("image")]
    | Annotated[MediaPart, Tag("media")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(kind_of),
]
TEXTS = (TextBlock, DocumentBlock, SearchResultBlock, ToolReferenceBlock, CompactionBlock)


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


class TurnConfig(Body):
    """Settings of the turn in which a system message comes."""

    effort: Effort | None = None


class ConversationTurn(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Items[Block] | str | None, KEEPS_EMPTY] = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnConfig | None = None

    def for_chat(self) -> list[Message]:
        """For a user: a message for each result of a tool, then one for the text."""
        if self.role == "assistant":
            return [self._answer()]
        if self.role == "system" and not text_of(self.content or ""):
            return []
        blocks = self.blocks
        if any(isinstance(each, ToolUseBlock) for each in blocks):
            raise BadRequest("only an assistant uses tools", param="messages")
        results = [each.for_chat() for each in blocks if isinstance(each, ToolResultBlock)]
        if (parts := parts_of(self.content or "")) or not results:
            results.append(Message(role=self.role, content=parts))
        return results

    def tool_changes(self, path: Path) -> Iterator[tuple[Path, ToolChange]]:
        """Yield the changes of tools with their paths; `path` is that of the message."""
        for at, block in enumerate(self.blocks):
            place = (*path, "content", str(at))
            if isinstance(block, ToolChange):
                yield place, block
            elif isinstance(block, CompactionBlock):
                for number, change in enumerate(block.tool_changes or ()):
                    yield (*place, "tool_changes", str(number)), change

    @property
    def blocks(self) -> list[Block]:
        return self.content if isinstance(self.content, list) else []

    def _answer(self) -> Message:
        blocks = self.blocks
        thinking = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
        fields = {
            "role": "assistant",
            "content": text_of(self.content or ""),
            "reasoning_content": "".join(thinking),
            "tool_calls": [each.for_chat() for each in blocks if isinstance(each, ToolUseBlock)],
        }
        return Message.model_validate(fields)


class SchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type, "json_schema": {"schema": self.schema_}}


class OutputConfig(Body):
    effort: Effort | None = None
    format: SchemaFormat | None = None


class ChatOfMessages(ChatBody):
    """The chat request of such a body. Its answer may have no tokens."""

    max_tokens: int | None = Field(None, ge=0)


class CountTokensBody(ReasoningFields, Cacheable):
    """The body of /v1/messages/count_tokens: what makes a prompt."""

    messages: Annotated[Items[ConversationTurn], Field(min_length=1)]
    system: Items[TextBlock] | str | None = None
    tools: Items[ClientTool] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None  # what output_config.format was before

    compaction: Any = None  # without effect on a count

    def for_chat(self) -> ChatBody:
        """Raises BadRequest for what it could not answer, and RequestValidationError for what the
        chat body does not take.
        """
        messages = [message for each in self._turns() for message in each.for_chat()]
        if system := self._system:
            messages.insert(0, Message(role="system", content=system))
        try:
            return ChatOfMessages.model_validate({"messages": messages} | self._chat_fields())
        except ValidationError as error:
            raise wrong_fields(error) from error

    def _turns(self) -> Iterator[ConversationTurn]:
        """Yield the messages that the model sees. Raises Refused for one that says nothing."""
        for at, turn in enumerate(self.messages):
            if turn.role != "system" and turn.content is None:
                raise refused_field(("messages", str(at), "content"), "Field required")
            if turn.clear_at != "next_user_message" or at > self._last_asked:
                yield turn

    @property
    def _last_asked(self) -> int:
        """The position of the last message of a user; -1 without one."""
        asked = [at for at, turn in enumerate(self.messages) if turn.role == "user"]
        return max(asked, default=-1)

    @property
    def _effort_of_turn(self) -> Effort | None:
        """The effort of this turn, or else of the request."""
        of_turn = [turn.output_config for turn in self.messages[self._last_asked + 1 :]]
        said = [each.effort for each in (self.output_config, *of_turn) if each and each.effort]
        return said[-1] if said else None

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
        if self._form is not None:
            fields["response_format"] = self._form.for_chat()
        effort = None if self.thinking is None else self.thinking.effort()
        effort = effort if effort == "none" else self._effort_of_turn or effort
        return fields | {"reasoning_effort": effort} | self.reasoning_fields()

    @property
    def _form(self) -> SchemaFormat | None:
        config = self.output_config or OutputConfig()
        return config.format or self.output_format

    @property
    def _functions(self) -> list[ClientTool]:
        tools = [(("tools", str(at)), tool) for at, tool in enumerate(self.tools or ())]
        turns = enumerate(self.messages)
        changes = (each for at, turn in turns for each in turn.tool_changes(("messages", str(at))))
        return offered_at_the_end(tools, changes)


class MessagesBody(CountTokensBody, SampledBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=0)  # 0: the prompt is read, and kept as a prefix
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)  # 0: all
    stop_sequences: Items[Stop] | None = None
    metadata: Any = None  # for the client's own use: it has no effect

    def for_chat(self) -> ChatBody:
        if self.compaction is not None:
            message = "no conversation is summarised here: ask for a summary in a message"
            raise BadRequest(message, param="compaction")
        if self.stop_sequences and self.stop not in (None, self.stop_sequences):
            raise BadRequest("this and stop_sequences say different things", param="stop")
        if self.response_format is not None and self._form is not None:
            raise BadRequest("give either this or output_config.format", param="response_format")
        return super().for_chat()

    def _chat_fields(self) -> dict[str, Any]:
        fields = super()._chat_fields() | self.sampling_fields() | {"max_tokens": self.max_tokens}
        return fields | ({"stop": self.stop_sequences} if self.stop_sequences else {})
