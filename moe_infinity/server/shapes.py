"""Messages, and how they are reshaped for a chat template. Nothing here changes its argument.

A message is an object of OpenAI's chat API: `content` is a text, `arguments` of calls are a text,
and reasoning is in `reasoning_content`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from moe_infinity.server.bodies import without_lone_surrogates
from moe_infinity.server.declared import text_of_calls
from moe_infinity.server.formats import HERMES, CallForm

Message = dict[str, Any]
Messages = list[Message]
REASONING = ("reasoning_content", "reasoning", "thinking")  # what templates call it


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """The forms of messages that a chat template takes."""

    has_parts: bool = False  # contents are lists of parts
    has_developer: bool = False  # the role means something
    has_system: bool = True  # as the first message
    has_late_system: bool = True  # also later
    has_calls: bool = True  # and their results
    call_form: CallForm = HERMES.calls  # of calls that are part of a text, where it takes none
    has_text_arguments: bool = False  # of calls: JSON, not an object
    has_null_beside_calls: bool = False  # for an empty content
    has_calls_apart: bool = False  # a message has either content or calls
    has_one_call: bool = False  # a message has at most one
    has_named_ids: bool = False  # the name of a function is read from the id of its call
    reasoning: str = "reasoning_content"  # the name of the field


def shaped(messages: Messages, forms: Forms) -> Messages:
    """Return the messages in these forms."""
    if not forms.has_developer:
        messages = _in_role(messages, "developer", "system")
    messages = _with_one_system(messages, forms)
    messages = _in_order_of_calls(messages)
    if forms.has_named_ids:
        messages = _with_ids(messages, lambda name, idx: f"functions.{name}:{idx}")
    if forms.has_one_call:
        messages = _with_one_call_each(messages)
    if forms.has_calls:
        messages = _with_calls(messages, forms)
    else:
        messages = _with_written_calls(messages, forms.call_form)
    if forms.reasoning != "reasoning_content":
        messages = [_renamed(each, "reasoning_content", forms.reasoning) for each in messages]
    if forms.has_parts:
        messages = [_in_parts(each) for each in messages]
    return messages


def object_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. What is none becomes its only value."""
    try:
        values = json.loads(without_lone_surrogates(arguments.encode()) or "{}")
    except (ValueError, RecursionError):
        values = arguments
    return values if isinstance(values, dict) else {"arguments": values}


def joined(first: Message, second: Message) -> Message:
    """Return one message of two of the same role."""
    both = first | second
    both["content"] = "\n\n".join(filter(None, (first["content"], second["content"])))
    for name, between in (("tool_calls", []), ("reasoning_content", "")):
        if first.get(name) and second.get(name):
            both[name] = first[name] + between + second[name]
    return both


def _in_role(messages: Messages, old: str, new: str) -> Messages:
    return [each | {"role": new} if each["role"] == old else each for each in messages]


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _with_one_system(messages: Messages, forms: Forms) -> Messages:
    """Join the system messages at the beginning, and let later ones be a user's if they must."""
    begin = next((at for at, each in enumerate(messages) if not _is_system(each)), len(messages))
    first: Messages = []
    for message in messages[:begin]:
        first = [joined(first[0], message) | {"role": first[0]["role"]}] if first else [message]
    rest = messages[begin:]
    if not forms.has_late_system:
        rest = _in_role(_in_role(rest, "system", "user"), "developer", "user")
    if first and not forms.has_system:
        as_user = {"role": "user", "content": first[0]["content"]}
        if rest and rest[0]["role"] == "user":
            return [joined(as_user, rest[0]), *rest[1:]]
        return [as_user, *rest]
    return [*first, *rest]


def _in_order_of_calls(messages: Messages) -> Messages:
    """Put the results of several calls into the order of the calls: many templates write no ids."""
    result: Messages = []
    order: dict[str, int] = {}  # of the ids of the calls before
    for is_results, group in groupby(messages, lambda each: each["role"] == "tool"):
        run = list(group)
        if is_results:
            places = [order.get(each.get("tool_call_id", ""), len(order)) for each in run]
            run = [run[at] for at in sorted(range(len(run)), key=places.__getitem__)]
        else:
            order = {call["id"]: at for at, call in enumerate(run[-1].get("tool_calls", ()))}
        result += run
    return result


def _with_ids(messages: Messages, id_of: Callable[[str, int], str]) -> Messages:
    """Give each call the id that `id_of` makes of its name and number, and its result the same."""
    new: dict[str, str] = {}  # by the old ids
    numbers = count()
    result: Messages = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            new[call["id"]] = id_of(call["function"]["name"], next(numbers))
            calls.append(call | {"id": new[call["id"]]})
        if calls:
            message = message | {"tool_calls": calls}
        if message.get("tool_call_id") in new:
            message = message | {"tool_call_id": new[message["tool_call_id"]]}
        result.append(message)
    return result


def _with_one_call_each(messages: Messages) -> Messages:
    """Give each call a message of its own, with its result behind it."""
    rest = deque(messages)
    result: Messages = []
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            result.append(message)
            continue
        answers: Messages = []
        while rest and rest[0]["role"] == "tool":
            answers.append(rest.popleft())
        for call in calls:
            mine = [each for each in answers if each.get("tool_call_id") == call["id"]][:1]
            answers = [each for each in answers if each not in mine]
            result += [message | {"tool_calls": [call]}, *mine]
            message = {"role": "assistant", "content": ""}
        result += answers
    return result


def _with_calls(messages: Messages, forms: Forms) -> Messages:
    result: Messages = []
    for message in messages:
        calls = message.get("tool_calls")
        if not calls:
            result.append(message)
            continue
        if not forms.has_text_arguments:
            calls = [_with_object(call) for call in calls]
        if message["content"] and forms.has_calls_apart:
            said = {name: value for name, value in message.items() if name != "tool_calls"}
            result.append(said)
            message = {"role": message["role"], "content": ""}
        empty = None if forms.has_null_beside_calls else ""
        result.append(message | {"content": message["content"] or empty, "tool_calls": calls})
    return result


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": object_of(function["arguments"])}}


def _with_written_calls(messages: Messages, form: CallForm) -> Messages:
    """Let calls be text and results a user's messages, for a template that knows neither."""
    result: Messages = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            functions = [call["function"] for call in calls]
            named = [(each["name"], object_of(each["arguments"])) for each in functions]
            written = text_of_calls(form, named)
            text = "\n".join(filter(None, (message["content"], written)))
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            message = rest | {"content": text}
        elif message["role"] == "tool":
            message = {"role": "user", "content": message["content"]}
        result.append(message)
    return result


def _renamed(message: Message, old: str, new: str) -> Message:
    return {new if name == old else name: value for name, value in message.items()}


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}] if content else []}


# What is tried while a template raises.


def _with_short_ids(messages: Messages) -> Messages:
    """Mistral's templates want ids of nine letters or digits."""
    return _with_ids(messages, lambda name, idx: f"{idx:09d}")


def _without_neighbours(messages: Messages) -> Messages:
    """Many templates want the roles to alternate."""
    result: Messages = []
    for message in messages:
        previous = result[-1] if result else None
        if previous and message["role"] == previous["role"] in ("user", "assistant"):
            result[-1] = joined(previous, message)
        else:
            result.append(message)
    return result


def _with_results_last(messages: Messages) -> Messages:
    """Some want an answer behind results: what a user adds to results becomes part of the last."""
    result: Messages = []
    for message in messages:
        if result and result[-1]["role"] == "tool" and message["role"] == "user":
            both = f"{result[-1]['content']}\n\n{message['content']}"
            result[-1] = result[-1] | {"content": both}
        else:
            result.append(message)
    return result


def _without_reasoning(messages: Messages) -> Messages:
    """gpt-oss takes either reasoning or content beside a call."""
    return [
        {name: value for name, value in each.items() if name not in REASONING} for each in messages
    ]


def _begun_by_user(messages: Messages) -> Messages:
    """Some want a user's message, as the first but for the system's."""
    if not any(each["role"] == "user" for each in messages) and _is_system(messages[-1]):
        return [*messages[:-1], messages[-1] | {"role": "user"}]
    begin = next((at for at, each in enumerate(messages) if not _is_system(each)), len(messages))
    return [*messages[:begin], {"role": "user", "content": ""}, *messages[begin:]]


REPAIRS: tuple[Callable[[Messages], Messages], ...] = (
    _with_short_ids,
    _without_reasoning,
    _without_neighbours,
    _with_results_last,
    _begun_by_user,
)
