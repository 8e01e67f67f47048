"""Request bodies of OpenAI's API but for chat. `fields` says what becomes of other fields.

A conflict of two fields raises BadRequest, because pydantic's own error would name neither field.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from moe_infinity.server.field_tables import problem_of
from moe_infinity.server.fields import KEEPS_EMPTY, Body, Items, RequestBody, whole
from moe_infinity.server.grammars import Structure
from moe_infinity.server.limits import CHOICES, LOGPROBS, NGRAM, PROMPTS, STOP_CHARACTERS
from moe_infinity.server.refusals import BadRequest, require_within
from moe_infinity.server.sequences import Pooling

TokenId = Annotated[int, BeforeValidator(whole), Field(ge=0)]
Stop = Annotated[str, Field(max_length=STOP_CHARACTERS.most)]
# Nine digits are enough for any vocabulary. int() raises for thousands of digits: status 500.
TOKEN_ID = re.compile("[0-9]{1,9}")
MOST_BIAS = 100


def checked_biases(biases: Any) -> Any:
    """Return biases by token id as they are. Raises BadRequest for the first that is wrong."""
    for token_id, bias in biases.items() if isinstance(biases, dict) else ():
        if not TOKEN_ID.fullmatch(token_id):
            raise BadRequest("the names are token ids", param="logit_bias")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -MOST_BIAS <= bias <= MOST_BIAS:
            message = f"the bias of token {token_id} is no number from {-MOST_BIAS} to {MOST_BIAS}"
            raise BadRequest(message, param="logit_bias")
    return biases


Biases = Annotated[dict[str, float], BeforeValidator(checked_biases)]
Encoding = Literal["float", "base64"]  # of a vector
MixedPrompt = Items[TokenId | str]


def few_prompts(prompts: Any, info: ValidationInfo) -> Any:
    """Return prompts as they are. Raises Refused for too many; token ids of one are no prompts."""
    if isinstance(prompts, list):
        num_prompts = sum(not isinstance(each, int | float) for each in prompts)
        require_within(PROMPTS, num_prompts, info.field_name)
    return prompts


Prompts = Annotated[str | Items[TokenId | str | MixedPrompt], BeforeValidator(few_prompts)]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # with each chunk, and not only the last


class StructuredOutputs(Body):
    """The structure that the text of an answer must have, in vLLM's words."""

    json_: Annotated[dict[str, Any] | str | None, KEEPS_EMPTY] = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None  # in Lark or GBNF
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(self._given) != 1:
            message = "give one of json, regex, choice and grammar"
            raise BadRequest(message, param="structured_outputs")
        return self

    @property
    def _given(self) -> list[tuple[str, Any]]:
        given: list[tuple[str, Any]] = [
            ("json", self.json_),
            ("regex", self.regex),
            ("choice", self.choice),
            ("grammar", self.grammar),
            ("json", {"type": "object"} if self.json_object else None),
        ]
        return [(kind, value) for kind, value in given if value is not None]

    @property
    def structure(self) -> Structure:
        ((kind, value),) = self._given
        return Structure(kind, value, f"structured_outputs.{kind}")


# What vLLM called these before, and what llama.cpp, SGLang and TabbyAPI call them.
STRUCTURES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "regex_pattern": "regex",
    "grammar": "grammar",
    "grammar_string": "grammar",
    "ebnf": "grammar",
}


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # as in llama.cpp


class JsonSchema(Body):
    name: str | None = None  # without effect, as is the description
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # without effect: answers fit the schema in any case


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    @model_validator(mode="before")
    @classmethod
    def _read_flat_form(cls, fields: Any) -> Any:
        """In the words of llama.cpp and of the Responses API the schema has no object around it."""
        if not isinstance(fields, dict) or "json_schema" in fields or "schema" not in fields:
            return fields
        return {"type": fields["type"], "json_schema": {"schema": fields["schema"]}}


class GrammarFormat(Body):
    type: Literal["grammar"]
    grammar: str


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | GrammarFormat, Field(discriminator="type")
]


class SampledBody(RequestBody):
    """The fields that all kinds of generation share."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)  # 0: the likeliest token
    top_k: int | None = Field(None, ge=-1)  # 0 or -1: all
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    # Samplers of transformers. Those that it has not are in `fields`.
    typical_p: float | None = Field(None, gt=0, le=1)
    epsilon_cutoff: float | None = Field(None, ge=0, lt=1)
    eta_cutoff: float | None = Field(None, ge=0, lt=1)
    no_repeat_ngram_size: int | None = Field(None, ge=0, le=NGRAM.most)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    do_sample: bool | None = None  # false: temperature 0, as for transformers
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = None
    stop: Stop | Items[Stop] | None = None
    stop_token_ids: Items[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    # Without effect: for the client's own use, and about a server that serves many.
    user: Any = None
    service_tier: Any = None
    store: Any = None

    @model_validator(mode="before")
    @classmethod
    def _read_structure(cls, fields: Any) -> Any:
        """`guided_regex` is `structured_outputs.regex`, and so on. Clients for vLLM of any version
        say the same in both.
        """
        if not isinstance(fields, dict) or not STRUCTURES.keys() & fields.keys():
            return fields
        other = {
            name: fields[name] for name in STRUCTURES if fields.get(name) not in (None, "", [])
        }
        rest = {name: value for name, value in fields.items() if name not in STRUCTURES}
        if not other:
            return rest
        wanted = [{STRUCTURES[name]: value} for name, value in other.items()]
        if rest.get("structured_outputs") is not None:
            wanted.append(rest["structured_outputs"])
        if any(each != wanted[0] for each in wanted):
            message = "give one of these and structured_outputs"
            raise BadRequest(message, param=list(other)[-1])
        return rest | {"structured_outputs": wanted[0]}

    @field_validator("seed", mode="before")
    @classmethod
    def _none_is_random(cls, value: Any) -> Any:
        """Most servers take -1 for a random seed, and their clients send it."""
        return None if value == -1 else value

    @model_validator(mode="after")
    def _may_be_greedy(self) -> SampledBody:
        if self.do_sample is False:
            self.temperature = 0
        return self

    def sampling_fields(self) -> dict[str, Any]:
        """Those of them that shape an answer, as a chat request has them."""
        others = {*RequestBody.model_fields, "user", "service_tier", "store", "do_sample"}
        names = SampledBody.model_fields.keys() - others
        return self.model_dump(include=names, exclude_none=True, by_alias=True)


class GenerationBody(SampledBody):
    """The fields that completions and chat completions share."""

    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=CHOICES.most)
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None  # a field of llama.cpp: chunks for how far a prompt is

    @model_validator(mode="after")
    def _has_one_structure(self) -> GenerationBody:
        has_format = self.response_format is not None and self.response_format.type != "text"
        if has_format and self.structured_outputs is not None:
            raise BadRequest("give either this or response_format", param="structured_outputs")
        return self

    @field_validator("max_tokens", "max_completion_tokens", mode="before", check_fields=False)
    @classmethod
    def _negative_is_any_number(cls, value: Any) -> Any:
        """LM Studio and llama.cpp write -1 for no limit."""
        return None if value == -1 else value

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives to list with each token; None: no log-probabilities at all."""

    @property
    def structure(self) -> Structure | None:
        """The structure that the text of the answer must have."""
        wanted = self.response_format
        if isinstance(wanted, JsonSchemaFormat) and wanted.json_schema.schema_ is not None:
            schema = wanted.json_schema.schema_
            return Structure("json", schema, "response_format.json_schema.schema")
        if isinstance(wanted, JsonObjectFormat) and wanted.schema_ is not None:
            return Structure("json", wanted.schema_, "response_format.schema")
        if isinstance(wanted, JsonObjectFormat | JsonSchemaFormat):
            return Structure("json", {"type": "object"}, "response_format")
        if isinstance(wanted, GrammarFormat):
            return Structure("grammar", wanted.grammar, "response_format.grammar")
        return None if self.structured_outputs is None else self.structured_outputs.structure

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(filter(None, stops))

    @property
    def usage_chunks(self) -> UsageChunks:
        """Which chunks of a stream have token counts."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "none"
        return "all" if options.continuous_usage_stats else "last"


UsageChunks = Literal["none", "last", "all"]


def each_of(prompts: Prompts) -> list[str | MixedPrompt]:
    """Its prompts, where one need not be in a list. With a token id in it, a list is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if any(isinstance(each, int) for each in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


class CompletionBody(GenerationBody):
    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)  # 0: the prompt is read, and kept as a prefix
    logprobs: int | None = Field(None, ge=0, le=LOGPROBS.most)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = Field(None, ge=0)  # of so many answers `n` would be chosen

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        """Servers that take chats' words in completions have clients that send false."""
        return None if value is False else value

    @model_validator(mode="after")
    def _none_is_best(self) -> CompletionBody:
        if self.best_of not in (None, 0, 1, self.n):
            raise BadRequest(problem_of("best_of", self.best_of) or "", param="best_of")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class DetokenizeBody(RequestBody):
    tokens: Items[TokenId]


class EmbeddingsBody(RequestBody):
    """The body of /v1/embeddings."""

    input: Prompts
    encoding_format: Encoding | None = None
    dimensions: int | None = Field(None, ge=1)
    pooling: Pooling = "mean"  # a field that OpenAI's API has not
    user: Any = None  # for the client's own use: it has no effect
