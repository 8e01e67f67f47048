"""Request bodies of OpenAI's chat API. Those of other APIs become such a body."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator

from moe_infinity.server.efforts import ReasoningFields
from moe_infinity.server.field_tables import ONLY_TEXT
from moe_infinity.server.fields import (
    KEEPS_EMPTY,
    Body,
    Items,
    refused_field,
)
from moe_infinity.server.functions import (
    AllowedToolsChoice,
    Function,
    FunctionChoice,
    FunctionName,
    OfferedTool,
    ToolChoice,
)
from moe_infinity.server.grammars import Structure
from moe_infinity.server.image_marks import ImageMarks
from moe_infinity.server.limits import LOGPROBS
from moe_infinity.server.parts import ImagePart, MediaPart, Part, ThinkingPart
from moe_infinity.server.protocol import GenerationBody
from moe_infinity.server.refusals import BadRequest


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = ""

    @property
    def as_text(self) -> str:
        given = self.arguments or {}
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


class CustomInput(Body):
    name: str
    input: str = ""


class EarlierCall(Body):
    """A tool call of an earlier answer."""

    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CustomInput | None = None

    def for_template(self) -> dict[str, Any]:
        called = self.function
        if called is None:
            assert self.custom is not None
            called = CalledFunction(name=self.custom.name, arguments={"input": self.custom.input})
        function = {"name": called.name, "arguments": called.as_text}
        return {"id": self.id, "type": "function", "function": function}

    @model_validator(mode="after")
    def _calls_something(self) -> EarlierCall:
        if self.function is None and self.custom is None:
            raise BadRequest("a call without `function`", param="messages")
        return self


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | Items[Part] | None, KEEPS_EMPTY] = None
    name: str | None = None
    tool_calls: Items[EarlierCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Annotated[
        str | None,
        Field(validation_alias=AliasChoices("reasoning_content", "reasoning", "thinking")),
    ] = None
    refusal: str | None = None
    function_call: CalledFunction | None = None  # what tool_calls were before

    def for_template(self, marks: ImageMarks | None = None) -> dict[str, Any]:
        """The message as `shapes` expects it: `content` is a string, as are arguments of calls.
        `marks` get its images; without them words say that they are left out.
        """
        content = self._text(marks) or self.refusal or ""
        message: dict[str, Any] = {"role": self.role, "content": content}
        message |= self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        calls = [call.for_template() for call in self.tool_calls or ()]
        if self.function_call is not None:
            only = EarlierCall(id=f"call_{self.function_call.name}", function=self.function_call)
            calls.append(only.for_template())
        if calls:
            message["tool_calls"] = calls
        if self.role == "function":
            message |= {"role": "tool", "tool_call_id": f"call_{self.name}"}
        if reasoning := self.reasoning_content or self._thoughts:
            message["reasoning_content"] = reasoning
        return message

    @property
    def images(self) -> list[ImagePart]:
        parts = self.content if isinstance(self.content, list) else ()
        return [part for part in parts if isinstance(part, ImagePart)]

    def _text(self, marks: ImageMarks | None) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        parts = [part for part in self.content if not isinstance(part, ThinkingPart)]
        if marks is None:
            return "\n".join(part.text for part in parts)
        return marks.join(
            [marks.put(part) if isinstance(part, ImagePart) else part.text for part in parts]
        )

    @property
    def _thoughts(self) -> str:
        parts = self.content if isinstance(self.content, list) else ()
        thoughts = [part.thinking for part in parts if isinstance(part, ThinkingPart)]
        texts = [[each] if isinstance(each, str) else [p.text for p in each] for each in thoughts]
        return "".join(text for each in texts for text in each)


class ChatBody(ReasoningFields, GenerationBody):
    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=LOGPROBS.most)
    tools: Items[OfferedTool] | None = None
    tool_choice: ToolChoice | None = None
    # What tools and tool_choice were before.
    functions: Items[Function] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    parallel_tool_calls: bool | None = None
    # For the server's own use, without effect: prefixes are kept in any case.
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    # In vLLM's words. An assistant's message at the end is continued unless one of them says no.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: Items[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("this needs logprobs=true", param="top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            message = "give either this or add_generation_prompt"
            raise BadRequest(message, param="continue_final_message")
        for at, tool in enumerate(self.tools or ()):
            if tool.left_out() is None and tool.function is None:
                raise refused_field(("tools", str(at), "function"), "Field required")
        if self.must_call and not self.template_tools:
            raise BadRequest("there are no tools", param="tool_choice")
        self._require_messages()
        require_readable(self.messages, "messages", is_continued=self.is_continued)
        return self

    def _require_messages(self) -> None:
        """Raise Refused for messages that ask for nothing."""
        for at, message in enumerate(self.messages):
            if message.content is None and message.role in ("system", "developer", "user"):
                raise refused_field(("messages", str(at), "content"), "Field required")
        two = [message.role for message in self.messages[-2:]] == ["assistant"] * 2
        if two and self.is_continued and self.continue_final_message is None:
            problem = "there are two answers at the end: which of them is to be continued?"
            raise BadRequest(problem, param="messages")

    @property
    def is_continued(self) -> bool:
        """True if the last message is the beginning of the answer."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = self.messages[-1]
        is_answer = last.role == "assistant" and not (last.tool_calls or last.function_call)
        return is_answer and not self.add_generation_prompt

    @property
    def max_answer_tokens(self) -> int | None:
        """The lower of both limits."""
        given = (self.max_completion_tokens, self.max_tokens)
        return min((each for each in given if each is not None), default=None)

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a call."""
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        has_name = isinstance(self.function_call, FunctionName)
        return has_name or self.tool_choice not in (None, "none", "auto")

    @property
    def called_name(self) -> str | None:
        """The name of the tool that has to be called; None if it may be any."""
        if isinstance(self.function_call, FunctionName):
            return self.function_call.name
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, FunctionChoice) else None

    @property
    def structure(self) -> Structure | None:
        return None if self.must_call else super().structure  # a call is no text

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_calls(self) -> int | None:
        """The most tool calls in one answer; None for any number."""
        has_one = self.parallel_tool_calls is False or self.calls_one_function
        return 1 if has_one or self.called_name is not None else None

    @property
    def calls_one_function(self) -> bool:
        """True if the answer's call is a `function_call`, as it was before there were tools."""
        return bool(self.functions) and not self.tools

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        if "none" in (self.tool_choice, self.function_call):
            return None
        functions = [tool.function for tool in self.tools or () if tool.left_out() is None]
        tools = [each.for_template() for each in (*functions, *(self.functions or ())) if each]
        if isinstance(self.tool_choice, AllowedToolsChoice):
            names = self.tool_choice.allowed_tools.names
            tools = [tool for tool in tools if tool["function"]["name"] in names]
        return tools or None


def asked_last(messages: Sequence[Message], *, is_continued: bool) -> Iterator[MediaPart]:
    """Yield the parts that are no text of what a user asks last. What was said before is over: a
    conversation in which another model saw an image can go on. So can one in which a tool gave
    something: some clients put a file that it read beside its result.
    """
    turns = reversed(messages[:-1] if is_continued else messages)
    last = list(takewhile(lambda message: message.role != "assistant", turns))
    if any(message.role in ("tool", "function") for message in last):
        return
    for message in last:
        parts = message.content if message.role == "user" else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, MediaPart):
                yield part


def require_readable(
    messages: Sequence[Message], param: str, *, is_continued: bool = False
) -> None:
    """Raise BadRequest if what a user asks last has parts that are neither text nor images."""
    for part in asked_last(messages, is_continued=is_continued):
        if not isinstance(part, ImagePart):
            raise BadRequest(f"{ONLY_TEXT}, not a part of type {part.type!r}", param=param)


class TokenizeBody(ReasoningFields):
    """The body of /tokenize: a text, or what makes the prompt of a chat."""

    prompt: Annotated[str | None, KEEPS_EMPTY] = None
    content: Annotated[str | None, KEEPS_EMPTY] = None  # the same in llama.cpp's words
    with_pieces: bool | None = None  # the text of each token beside its id, as in llama.cpp
    add_special_tokens: bool | None = None  # left out: for `prompt`, but not for `content`
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Items[OfferedTool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> TokenizeBody:
        if [self.prompt, self.content, self.messages].count(None) != 2:
            raise BadRequest("give either this or messages", param="prompt")
        return self

    @property
    def has_special(self) -> bool:
        """True if the tokens that the tokenizer puts around a text are wanted."""
        given = self.add_special_tokens
        return self.content is None if given is None else given

    def for_chat(self) -> ChatBody:
        """The chat request with this prompt."""
        names = (
            "messages", "tools", "add_generation_prompt", "continue_final_message",
        )  # fmt: skip
        fields = {name: getattr(self, name) for name in names}
        return ChatBody.model_validate(fields | self.reasoning_fields())
