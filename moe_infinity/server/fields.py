"""Rules for the fields of a request.

A body declares the fields that have an effect here, or that the answer repeats. A field that is
null, or an optional one that is empty, is as absent. Any other field falls into one of three
classes, of which this file has the tables:

    HARMLESS   cannot change the text of an answer: left out
    REFUSED    would change what is asked for, and cannot be done: a 400 that names the field,
    SAMPLERS   unless its value is one without effect
    the rest   left out, with a line in the log for the first request that has such a field

With `--strict-fields` every field that is not declared is a 400.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moe_infinity.server.limits import LENGTHS, NAME_CHARACTERS
from moe_infinity.server.refusals import Refused, require_within

logger = logging.getLogger(__name__)
MAX_LOGGED = 1000  # names come from clients, and each is kept to be logged once
KEEPS_EMPTY = "an empty value of this field means something"  # to be put into an annotation
EMPTY: tuple[Any, ...] = (None, "", [], {})

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]  # the first wrong one ends the check of all

# At any level of a body.
HARMLESS = {
    # bookkeeping of clients and of those who forward requests
    "client_metadata", "created", "created_at", "created_by", "diagnostics", "extra_body",
    "extra_headers", "extra_query", "id", "inference_geo", "keep_alive", "litellm_metadata",
    "metadata", "moderation", "phase", "priority", "provider", "provider_specific_fields",
    "request_id", "safety_identifier", "service_tier", "session_id", "speed", "status", "store",
    "tags", "timeout", "timestamp", "trace_id", "transforms", "user", "user_id",
    "user_profile_id", "workspace_id", "access_programs", "billing_policy", "background_options",
    "fallback_credit_token", "fallbacks",
    # hints for caches and speed: prefixes are kept in any case
    "cache_control", "cache_prompt", "cache_salt", "id_slot", "kv_transfer_params", "n_keep",
    "prediction", "prompt_cache_breakpoint", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "slot_id",
    # of earlier answers, beside their text
    "annotations", "block_binding", "caller", "citations", "encrypted_content", "index", "logprobs",
    "parsed", "parsed_arguments", "reasoning_details", "signature", "summary", "thinking_blocks",
    "toolset_name",
    # how tools are sent, and who may call them
    "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples",
    # what a stream or an answer has beside the text
    "betas", "display", "exclude", "include_obfuscation", "include_reasoning", "timings_per_token",
}  # fmt: skip
NOT_KEPT = "nothing is kept between requests: send the whole conversation"
ONLY_TEXT = "this server reads and writes text only"
# At the top of a body, unless the body declares the field.
REFUSED = {
    "audio": ONLY_TEXT,
    "image": ONLY_TEXT,
    "images": ONLY_TEXT,
    "previous_response_id": NOT_KEPT,
    "conversation": NOT_KEPT,
    "thread": NOT_KEPT,
    "prompt": "no prompts are stored here: send the text",
    "background": "no answer is kept for later: use stream=true",
    "suffix": "no model here fills in text",
    "chat_template": "the template is the model's: chat_template_kwargs sets its variables",
    "documents": "put the texts into a message",
    "truncate_prompt_tokens": "shorten the prompt",
    "prompt_embeds": ONLY_TEXT,
    "input_embeds": ONLY_TEXT,
    "use_beam_search": "answers are sampled",
    "allowed_token_ids": "logit_bias and structured_outputs limit an answer",
    "bad_words": "logit_bias makes tokens unlikely",
    "logits_processors": "logit_bias and structured_outputs limit an answer",
    "custom_logit_processor": "logit_bias and structured_outputs limit an answer",
    "stop_regex": "stop takes strings",
    "lora": "adapters are not chosen by requests",
    "lora_path": "adapters are not chosen by requests",
    "adapter_id": "adapters are not chosen by requests",
    "structural_tag": "structured_outputs has json, regex, choice and grammar",
    "include_stop_str_in_output": "a stop string is never part of the answer",
}
# Samplers that this server has not, and the values with which each has no effect.
SAMPLERS: dict[str, tuple[float, ...]] = {
    "adaptive_target": (-1,),
    "diversity_penalty": (0,),
    "dry_multiplier": (0,),
    "dynamic_temperature": (0,),
    "dynatemp_range": (0,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
}
NO_SAMPLER = "this sampler is not supported: leave it out"


class BoundedBody(BaseModel):
    """A JSON object whose lists and objects have limits."""

    @model_validator(mode="before")
    @classmethod
    def _require_lengths(cls, fields: Any) -> Any:
        """Raises Refused, before any of the fields is looked into."""
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if name in LENGTHS and isinstance(value, list | dict):
                require_within(LENGTHS[name], len(value), name)
        return fields


def whole(value: Any) -> Any:
    """Return a number without a fraction as an integer: JSON has one kind of numbers, and some
    languages write 4 as 4.0.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Body(BoundedBody):
    """A JSON object, without conversions, without NaN or infinity. FieldCheck decides on fields
    that it does not declare.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {
            name: whole(value) for name, value in fields.items() if not cls._is_absent(name, value)
        }

    @classmethod
    def _is_absent(cls, name: str, value: Any) -> bool:
        if value is None:
            return True
        if value not in EMPTY:
            return False
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        if name not in known:
            return True
        field = known[name]
        return not field.is_required() and KEEPS_EMPTY not in field.metadata

    def left_out(self) -> str | None:
        """Return what this is, if it is left out of the request as a whole; otherwise None."""
        return None


class RequestBody(Body):
    """The body of a request for a model."""

    model: Annotated[str | None, Field(max_length=NAME_CHARACTERS.most)] = None


class ToolOfType(Body):
    """A tool, which is left out unless it is of the one type that is known."""

    known_type: ClassVar[str]
    type: str | None = None  # None: of the known one

    @model_validator(mode="before")
    @classmethod
    def _read_no_fields_of_other_types(cls, fields: Any) -> Any:
        kind = fields.get("type") if isinstance(fields, dict) else None
        return fields if kind in (None, "", cls.known_type) else {"type": kind}

    def left_out(self) -> str | None:
        is_known = self.type in (None, self.known_type)
        return None if is_known else f"a tool of type {short(str(self.type))}"


class FieldCheck:
    """Decides on fields that bodies do not declare."""

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def apply(self, body: Body) -> None:
        """Remove such fields from a body. Raises Refused for those that cannot be left out."""
        for path, part in parts_of(body):
            extra = part.__pydantic_extra__ or {}
            if (what := part.left_out()) is not None:
                self._leave_out(path, what)
            else:
                for name, value in extra.items():
                    self._decide((*path, name), value)
            extra.clear()

    def _decide(self, path: tuple[str, ...], value: Any) -> None:
        name = path[-1]
        if self._is_strict:
            raise refused_field(path, "this field is not supported")
        if len(path) == 1 and (problem := problem_of(name, value)) is not None:
            raise refused_field(path, problem)
        if name not in HARMLESS:
            self._leave_out(path, f"the field {short(name)}")

    def _leave_out(self, path: tuple[str, ...], what: str) -> None:
        if self._is_strict:
            raise refused_field(path, f"not supported: {what}")
        if what not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(what)
            logger.warning("requests have %s, which has no effect here", what)


def problem_of(name: str, value: Any) -> str | None:
    """Return why a field cannot be left out; None if it can."""
    if value in (False, *EMPTY):
        return None
    if name in SAMPLERS:
        return None if value in SAMPLERS[name] else NO_SAMPLER
    return None if value == 0 else REFUSED.get(name)


def short(name: str) -> str:
    """Return a name that a client sent, for a log."""
    return repr(name[:80])


def refused_field(path: tuple[str, ...], message: str) -> Refused:
    """Return a refusal of the field at a path of names and positions."""
    return Refused(400, f"{'.'.join(path)}: {message}", param=path[0])


def parts_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Body]]:
    """Yield the bodies within a value, itself included, with their paths."""
    if isinstance(value, Body):
        yield path, value
        for name, field in type(value).model_fields.items():
            yield from parts_of(getattr(value, name), (*path, field.alias or name))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from parts_of(item, (*path, str(at)))
