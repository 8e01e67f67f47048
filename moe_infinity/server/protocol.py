"""Request bodies of OpenAI's API. Every field has an effect, or is refused with its name.

Some fields allow a single value: clients send it as their default, and any other value asks for
what this server cannot do. A conflict of two fields raises BadRequest, because pydantic's own error
would name neither field.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moe_infinity.server.grammars import Structure
from moe_infinity.server.refusals import BadRequest
from moe_infinity.server.sequences import Pooling

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_LOGPROBS = 20

TokenId = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
# Nine digits are enough for any vocabulary. int() raises for thousands of digits: status 500.
TokenIdText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]  # of reasoning
Encoding = Literal["float", "base64"]  # of a vector
Prompts = str | list[str] | list[TokenId] | list[list[TokenId]]


class Body(BaseModel):
    """A JSON object without unknown fields, without conversions, without NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False


class SampledBody(Body):
    """The fields that all three kinds of generation share."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)  # 0: the likeliest token
    stream: bool | None = None
    user: str | None = None  # for the client's own use: it has no effect


class StructuredOutputs(Body):
    """The structure that the text of an answer must have, in vLLM's words."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")  # a JSON schema
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None  # in Lark or GBNF

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(self.model_dump(exclude_none=True)) != 1:
            message = "give one of json, regex, choice and grammar"
            raise BadRequest(message, param="structured_outputs")
        return self

    @property
    def structure(self) -> Structure:
        ((kind, value),) = self.model_dump(exclude_none=True, by_alias=True).items()
        return Structure(kind, value, f"structured_outputs.{kind}")


# What vLLM called these before.
OLDER_NAMES = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}


class GenerationBody(SampledBody):
    """The fields that completions and chat completions share."""

    max_tokens: int | None = Field(None, ge=1)
    top_k: int | None = Field(None, ge=-1)  # 0 or -1: all
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenIdText, Bias] | None = None
    structured_outputs: StructuredOutputs | None = None
    return_progress: bool | None = None  # a field of llama.cpp: chunks for how far a prompt is

    @model_validator(mode="before")
    @classmethod
    def _read_older_names(cls, fields: Any) -> Any:
        """`guided_regex` is `structured_outputs.regex`, and so on."""
        if not isinstance(fields, dict) or not OLDER_NAMES.keys() & fields.keys():
            return fields
        older = {name: fields[name] for name in OLDER_NAMES if fields.get(name) is not None}
        rest = {name: value for name, value in fields.items() if name not in OLDER_NAMES}
        if not older:
            return rest
        if len(older) > 1 or rest.get("structured_outputs") is not None:
            message = "give one of these and structured_outputs"
            raise BadRequest(message, param=list(older)[-1])
        structured = {OLDER_NAMES[name]: value for name, value in older.items()}
        return rest | {"structured_outputs": structured}

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("this is for stream=true", param="stream_options")
        return self

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives to list with each token; None: no log-probabilities at all."""

    @property
    def structure(self) -> Structure | None:
        """The structure that the text of the answer must have."""
        return None if self.structured_outputs is None else self.structured_outputs.structure

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


def each_of(prompts: Prompts) -> list[str] | list[list[int]]:
    """Its prompts, where one need not be in a list."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return prompts  # type: ignore[return-value]


class CompletionBody(GenerationBody):
    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _something_is_to_be_answered(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("0 is for echo=true", param="max_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation. A chat template ignores the fields that it does not know."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: `content` is a string, and the arguments of a
        call are an object.
        """
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        message.setdefault("content", "")
        for call in message.get("tool_calls", ()):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(function["arguments"] or "{}")
                except ValueError as error:
                    problem = f"the arguments of a call are no JSON: {error}"
                    raise BadRequest(problem, param="messages") from error
        return message


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None  # without effect
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # without effect: answers fit the schema in any case


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class FunctionName(Body):
    name: str


class FunctionToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    # For the server's own use, without effect: prefixes are kept in any case.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    response_format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaFormat | None, Field(discriminator="type")
    ] = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("this needs logprobs=true", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            message = "this is the same as max_completion_tokens: give one of them"
            raise BadRequest(message, param="max_tokens")
        has_format = self.response_format is not None and self.response_format.type != "text"
        if has_format and self.structured_outputs is not None:
            raise BadRequest("give either this or response_format", param="structured_outputs")
        if self.must_call:
            if self.structure is not None:
                message = "give either this or a form of the text"
                raise BadRequest(message, param="tool_choice")
            if not self.tools:
                raise BadRequest("there are no tools", param="tool_choice")
        return self

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def called_name(self) -> str | None:
        """The name of the tool that has to be called; None if it may be any."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, FunctionToolChoice) else None

    @property
    def structure(self) -> Structure | None:
        if isinstance(self.response_format, JsonSchemaFormat):
            schema = self.response_format.json_schema.schema_
            return Structure("json", schema, "response_format.json_schema.schema")
        if isinstance(self.response_format, JsonObjectFormat):
            return Structure("json", {"type": "object"}, "response_format")
        return super().structure

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_calls(self) -> int | None:
        """The most tool calls in one answer; None for any number."""
        return 1 if self.parallel_tool_calls is False else None

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    @property
    def template_hints(self) -> dict[str, Any]:
        """Variables of chat templates for how much a model reasons: gpt-oss has the first, Qwen and
        GLM the second, DeepSeek the third.
        """
        effort = self.reasoning_effort
        if effort is None:
            return {}
        known = {"none": "low", "minimal": "low", "xhigh": "high"}.get(effort, effort)
        thinks = effort != "none"
        return {"reasoning_effort": known, "enable_thinking": thinks, "thinking": thinks}


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give either this or messages", param="prompt")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


class EmbeddingsBody(Body):
    """The body of /v1/embeddings."""

    input: Prompts
    model: str | None = None
    encoding_format: Encoding | None = None
    dimensions: int | None = Field(None, ge=1)
    pooling: Pooling = "mean"  # a field that OpenAI's API has not
    user: str | None = None  # for the client's own use: it has no effect
