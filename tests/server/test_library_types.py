"""Every message, item, block and tool that the official libraries know, with each of its fields
alone, is taken, unless it is no text or refers to what is not here.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import typing_extensions
from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
from anthropic.types.beta.beta_message_param import BetaMessageParam
from anthropic.types.beta.beta_output_config_param import BetaOutputConfigParam
from anthropic.types.beta.beta_thinking_config_param import BetaThinkingConfigParam
from anthropic.types.beta.beta_tool_choice_param import BetaToolChoiceParam
from anthropic.types.beta.beta_tool_union_param import BetaToolUnionParam
from fastapi.exceptions import RequestValidationError
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageParam
from openai.types.chat.chat_completion_tool_union_param import ChatCompletionToolUnionParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam
from pydantic import ValidationError

from moe_infinity.server.anthropic_body import MessagesBody
from moe_infinity.server.chat import ChatBody
from moe_infinity.server.fields import FieldCheck
from moe_infinity.server.refusals import Refused
from moe_infinity.server.responses_body import ResponsesBody

QUALIFIERS = (
    typing_extensions.Required,
    typing_extensions.NotRequired,
    typing_extensions.Annotated,
)
LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)
UNIONS = (Union, UnionType)


def is_object(kind: Any) -> bool:
    return hasattr(kind, "__required_keys__")


def example(kind: Any) -> Any:
    """A value of a type, with nothing that it does not need."""
    origin = get_origin(kind)
    if is_object(kind):
        return smallest(kind)
    if origin in QUALIFIERS or origin in UNIONS:
        return example(next(each for each in get_args(kind) if each is not type(None)))
    if origin is Literal:
        return get_args(kind)[0]
    if origin in LISTS:
        return [example(get_args(kind)[0])]
    if kind is dict or origin is dict:
        return {"key": "x"}
    return {int: 3, float: 0.5, bool: True}.get(kind, "x")


def smallest(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    marked = get_type_hints(kind, include_extras=True)
    needed = [
        name
        for name, hint in marked.items()
        if get_origin(hint) is typing_extensions.Required or name in kind.__required_keys__
    ]
    return {name: example(hints[name]) for name in needed}


def examples(kind: Any) -> Iterator[Any]:
    """An example of each member of a type."""
    origin = get_origin(kind)
    if origin in QUALIFIERS or origin in UNIONS:
        for each in get_args(kind)[: 1 if origin in QUALIFIERS else None]:
            yield from examples(each)
    elif origin is Literal:
        yield from get_args(kind)
    else:
        yield None if kind is type(None) else example(kind)


def variants(kind: Any) -> Iterator[dict[str, Any]]:
    """The smallest object of a type, and others with one field more or of another kind."""
    base = smallest(kind)
    yield base
    for name, hint in get_type_hints(kind).items():
        for value in examples(hint):
            yield base | {name: value}


def objects_in(union: Any) -> Iterator[Any]:
    for kind in get_args(union):
        if get_origin(kind) in (*UNIONS, typing_extensions.Annotated):
            yield from objects_in(kind)
        elif is_object(kind):
            yield kind


def is_taken(body: type[Any], fields: dict[str, Any]) -> bool:
    try:
        made = body.model_validate(fields)
        FieldCheck(is_strict=False).apply(made)
        chat = made if isinstance(made, ChatBody) else made.for_chat()
    except (Refused, RequestValidationError, ValidationError):
        return False
    return all(message.for_template()["role"] for message in chat.messages)


SAID = {"role": "user", "content": "hi"}
ASKED = {"messages": [SAID], "max_tokens": 1}
CALLED = {"name": "x", "input_schema": {"type": "object"}}


def is_text(source: Any) -> bool:
    """True for the source of a document that can be read."""
    return isinstance(source, dict) and source["type"] in ("text", "content")


def in_turns(role: str) -> Callable[[Any], dict[str, Any]]:
    return lambda block: ASKED | {"messages": [SAID, {"role": role, "content": [block]}, SAID]}


CASES: dict[str, tuple[Any, type[Any], Callable[[Any], dict[str, Any]], set[str]]] = {
    "messages of chat": (
        ChatCompletionMessageParam,
        ChatBody,
        lambda message: {"messages": [SAID, message, SAID]},
        set(),
    ),
    "parts of chat": (
        ChatCompletionContentPartParam,
        ChatBody,
        lambda part: {"messages": [{"role": "user", "content": [part]}]},
        {"input_audio", "file"},
    ),
    "tools of chat": (
        ChatCompletionToolUnionParam,
        ChatBody,
        lambda tool: ASKED | {"tools": [tool]},
        set(),
    ),
    "items of responses": (
        ResponseInputItemParam,
        ResponsesBody,
        lambda item: {"input": [SAID, item, SAID]},
        set(),
    ),
    "tools of responses": (
        ToolParam,
        ResponsesBody,
        lambda tool: {"input": "hi", "tools": [tool]},
        set(),
    ),
    "blocks of a user": (
        BetaContentBlockParam,
        MessagesBody,
        in_turns("user"),
        {"document", "container_upload", "tool_use"},
    ),
    "blocks of an assistant": (
        BetaContentBlockParam,
        MessagesBody,
        in_turns("assistant"),
        set(),
    ),
    "tools of messages": (
        BetaToolUnionParam,
        MessagesBody,
        lambda tool: ASKED | {"tools": [tool]},
        set(),
    ),
    "turns of messages": (
        BetaMessageParam,
        MessagesBody,
        lambda turn: ASKED | {"messages": [SAID, turn, SAID]},
        set(),
    ),
    "thinking of messages": (
        BetaThinkingConfigParam,
        MessagesBody,
        lambda thinking: ASKED | {"thinking": thinking},
        set(),
    ),
    "choices of messages": (
        BetaToolChoiceParam,
        MessagesBody,
        lambda choice: ASKED | {"tool_choice": choice, "tools": [CALLED]},
        set(),
    ),
    "output of messages": (
        Union[BetaOutputConfigParam, None],  # noqa: UP007
        MessagesBody,
        lambda config: ASKED | {"output_config": config},
        set(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_library_can_send_is_taken(case):
    union, body, around, refused = CASES[case]
    num_tried = 0
    for kind in objects_in(union):
        for fields in variants(kind):
            num_tried += 1
            without_type = "message" if "role" in fields else "item_reference"
            name = fields.get("type") or without_type
            is_refused = name in refused and not is_text(fields.get("source"))
            assert is_taken(body, around(fields)) != is_refused, fields
    assert num_tried > 1
