"""The parser of what a model wrote: reasoning, content and calls of tools.

transformers' ResponseParser does it, as the tokenizer's `response_template` says or, where it has
none, as transformers or this file know of the kind of model. Without any, all is content.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken
from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS
from transformers.utils.chat_parsing.response_templates import load_response_template

from moe_infinity.server.declared import text_of_calls
from moe_infinity.server.formats import (
    HERMES,
    THINK,
    TOLD,
    AnswerForm,
    CallForm,
    Family,
    family_of,
    shows_tools,
    with_told_calls,
)
from moe_infinity.server.response_templates import (
    THOUGHTS,
    is_marked,
    known_in,
    loaded,
    quick_to_scan,
    without_calls,
)
from moe_infinity.server.schemas import with_plain_types
from moe_infinity.server.thoughts import ThoughtBudget, ThoughtForm

logger = logging.getLogger(__name__)
MOST_BEGUN = 1 << 15  # characters at the end of a prompt, which may begin the message
NUM_NEWEST = 64  # characters, at least those of any mark
# What parsing a text that is no call raises.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the client has."""

    name: str
    arguments: str  # JSON
    id: str

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Parts:
    """The contents of a message, or what was added to one."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def is_readable(family: Family | None) -> bool:
    """Return True unless a format of ours needs what the installed transformers lacks: 5.17 does
    not know lists of calls as Python writes them.
    """
    fields = {} if family is None or family.read is None else family.read["fields"]
    return {field.get("content", "text") for field in fields.values()} <= set(CONTENT_PARSERS)


class MessageFormat:
    """How the model of a server writes messages. Raises ValueError for a `response_template` that
    is none.
    """

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        template = str(getattr(tokenizer, "chat_template", None) or "")
        family = family_of(model.config.model_type, template)
        spec = getattr(tokenizer, "response_template", None)
        if not is_readable(family):
            family = None
        if spec is None and family is not None:
            spec = family.read
        if spec is None:
            spec = get_response_template(tokenizer, model)
        if family is None and template and not shows_tools(template):
            family = TOLD
            spec = with_told_calls(spec)
        if spec is not None:
            load_response_template(spec)
            spec = spec | {"fields": quick_to_scan(spec["fields"])}
        text_spec = without_calls(spec, family)
        self._template = loaded(spec, "" if family is None else family.ends_thought)
        self._text_template = loaded(text_spec)
        fields = {} if spec is None else spec["fields"]
        added = added_tokens_of(tokenizer)
        known = known_in(spec)
        self._marks = [each.content for each in added.values() if each.content in known]
        text_known = known_in(text_spec)
        self._text_marks = [mark for mark in self._marks if mark in text_known]
        # Special tokens that are no part of the format, and so of no answer.
        self.hidden_ids = frozenset(
            token_id
            for token_id, each in added.items()
            if each.special and each.content not in known
        )
        self.answer_form = None if family is None else family.written
        self._thoughts = thought_form_of(fields, self.answer_form)
        # Others are seen to be complete, where the token that ends them ends the answer.
        self._has_marked_content = is_marked(fields.get("content", {}))
        has_tags = fields.get("tool_calls", {}).get("content") == "xml-inline"
        calls = CallForm(open="", close="") if family is None else family.written.calls
        self._close = calls.close.strip().rpartition("\n")[2] if has_tags else ""
        self._opening = calls.open.partition("NAME")[0]

    @property
    def is_known(self) -> bool:
        return self._template is not None

    @property
    def call_form(self) -> CallForm:
        """The form of calls of models of this kind, or else the most usual one."""
        return HERMES.calls if self.answer_form is None else self.answer_form.calls

    def has_begun_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return True if a prompt ends with a tag behind which the model thinks."""
        text: str = self._tokenizer.decode(prompt_ids[-8:])
        return self.is_known and text.rstrip().endswith(THINK[0])

    def budget(
        self, prompt_ids: Sequence[int], num_tokens: int, *, message: str = "", has_grammar: bool
    ) -> ThoughtBudget | None:
        """Return a budget of thoughts for one answer to this prompt; None for a model whose
        thoughts are not known. Under a grammar some models begin no thought by themselves.
        """
        has_begun = self.has_begun_reasoning(prompt_ids)
        begins = self.answer_form is not None and self.answer_form.reasoning is not None
        if self._thoughts is None or not (has_begun or begins or not has_grammar):
            return None
        return ThoughtBudget(
            self._tokenizer, self._thoughts, num_tokens, prompt_ids,
            has_begun=has_begun, message=message,
        )  # fmt: skip

    def reads_calls(self, prompt_ids: Sequence[int], name: str) -> bool:
        """Return True if a call in the form that this kind of model writes is found as one."""
        if self.answer_form is None:
            return False
        reader = self.reader(prompt_ids, None, max_calls=None)
        if self.has_begun_reasoning(prompt_ids):
            reader.add(THINK[1], is_last=False)
        reader.add(text_of_calls(self.answer_form.calls, [(name, {})]), is_last=True)
        return [call.name for call in reader.message.calls] == [name]

    def reader(
        self,
        prompt_ids: Sequence[int],
        tools: list[dict[str, Any]] | None,
        *,
        max_calls: int | None,
        has_calls: bool = True,
    ) -> MessageReader:
        """For one answer to this prompt, which may have begun the message. Later calls than the
        first `max_calls` are left out. Without `has_calls` they are content, but where all content
        has marks around it.
        """
        parser = None
        template = self._template if has_calls else self._text_template
        if template is not None:
            prompt = self._begun(template, self._tokenizer.decode(prompt_ids))
            if prompt.rstrip().endswith(THINK[1]):
                prompt = prompt.rstrip()  # else the parser takes the rest for content
            try:
                plain = with_plain_types(tools or ())
                parser = ResponseParser(template, prefix=prompt, tools=plain)
            except MALFORMED as error:
                logger.info("a prompt could not be parsed: %s", type(error).__name__)
        return MessageReader(
            parser,
            max_calls,
            self._marks if has_calls else self._text_marks,
            opening=self._opening,
            close=self._close,
            has_marked_content=self._has_marked_content,
        )

    def _begun(self, template: Any, prompt: str) -> str:
        """Return a prompt, of which the message that it begins has an end only if it is long."""
        begun: str = template.truncate_past_last_anchor(prompt)
        if len(begun) <= MOST_BEGUN:
            return prompt
        marks = self._thoughts
        if marks is None or begun.rfind(marks.begin) <= begun.rfind(marks.end):
            return begun[-MOST_BEGUN:]
        return marks.begin + begun[-MOST_BEGUN:]  # within a thought


def thought_form_of(
    fields: Mapping[str, Any], answer_form: AnswerForm | None
) -> ThoughtForm | None:
    """Return how thoughts begin and end by the fields of a response template, if it says so."""
    found = [fields[name] for name in THOUGHTS if name in fields]
    if not found or not {"open", "close"} <= found[0].keys():
        return None
    marks = [found[0][name] for name in ("open", "close")]
    begin, end = (each if isinstance(each, str) else each[0] for each in marks)
    reasoning = None if answer_form is None else answer_form.reasoning
    return ThoughtForm(begin, end, f"\n{end}" if reasoning is None else reasoning[1])


def added_tokens_of(tokenizer: Any) -> dict[int, AddedToken]:
    """Return the tokens that a tokenizer knows beside those of its model."""
    try:
        added: dict[int, AddedToken] = tokenizer.added_tokens_decoder
    except NotImplementedError:  # Mistral's own tokenizers
        pairs = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        added = {token_id: AddedToken(text, special=True) for token_id, text in pairs}
    return added


class MessageReader:
    """One answer, as its text comes. A call that is not complete is nothing. One that cannot be
    parsed is content, as is all behind it, without marks.
    """

    def __init__(
        self,
        parser: ResponseParser | None,
        max_calls: int | None,
        marks: Sequence[str],
        *,
        opening: str = "",
        close: str = "",
        has_marked_content: bool = False,
    ) -> None:
        """`marks`: tokens that begin or end the fields of a message. `opening`: what a call begins
        with. `close`: what one that is complete ends with. `has_marked_content`: some of the marks
        are around all content.
        """
        self._parser = parser
        self._marks = marks
        self._opening = opening
        self._close = close
        self._has_marked_content = has_marked_content
        self._newest = ""  # the last characters
        self._is_broken = False  # there was a parser
        self._max_calls = max_calls
        self._unsure = ""  # text of a call that is not complete
        self.message = Parts()  # so far

    def add(self, text: str, *, is_last: bool, is_cut: bool = False) -> Parts:
        """Return what this text adds. `is_cut`: the model would have written more."""
        new = Parts()
        if self._parser is None:
            new.content = self._without_marks(text) if self._is_broken else text
        else:
            self._unsure += text
            self._newest = (self._newest + text).rstrip()[-NUM_NEWEST:]
            try:
                events = self._parser.feed(text)
                self._apply(events, new)
                if is_last:
                    has_calls = bool(self.message.calls or new.calls)
                    events = self._last_events(is_cut=is_cut, has_calls=has_calls)
                    self._apply(events, new)
                    if self._is_unmarked(new):
                        new.content = self._unsure
            except MALFORMED as error:
                logger.info("a message could not be parsed: %s", type(error).__name__)
                self._parser = None
                self._is_broken = True
                new.content += self._without_marks(self._unsure)
        self.message.content += new.content
        self.message.reasoning += new.reasoning
        self.message.calls += new.calls
        return new

    def _is_unmarked(self, new: Parts) -> bool:
        """True for an answer without any mark, where content has some around it."""
        if not self._has_marked_content:
            return False
        parts = (self.message, new)
        is_empty = not any(each.content or each.reasoning or each.calls for each in parts)
        return is_empty and not any(mark in self._unsure for mark in self._marks)

    def _last_events(self, *, is_cut: bool, has_calls: bool) -> list[dict[str, Any]]:
        """The events of the end, without those of a call that is not complete."""
        assert self._parser is not None
        try:
            events: list[dict[str, Any]] = self._parser.finalize()[1]
        except ValueError as error:
            logger.info("a call is not complete: %s", type(error).__name__)
            return []
        if is_cut or not self._newest.endswith(self._close):
            events = [event for event in events if event["field"] != "tool_calls"]
        if has_calls:  # what follows may be the next, or nothing
            is_none = self._begins_call if is_cut else is_blank
            events = [event for event in events if not is_none(event)]
        return [self._before_marks(event) for event in events]

    def _begins_call(self, event: dict[str, Any]) -> bool:
        """True for text behind a call that is the beginning of another, up to its name, or what is
        between two.
        """
        text = event.get("text", "").lstrip()
        num = min(len(text), len(self._opening))
        return bool(self._opening) and text[:num] == self._opening[:num]

    def _before_marks(self, event: dict[str, Any]) -> dict[str, Any]:
        """An event of the end without the beginning of a call in its text."""
        begins = [event["text"].find(mark) for mark in self._marks] if "text" in event else []
        begin = min((each for each in begins if each >= 0), default=None)
        return event if begin is None else event | {"text": event["text"][:begin]}

    def _without_marks(self, text: str) -> str:
        return re.sub("|".join(map(re.escape, self._marks)) or r"(?!)", "", text)

    def _apply(self, events: list[dict[str, Any]], new: Parts) -> None:
        for event in events:
            kind = event["type"]
            if event["field"] == "tool_calls":
                if kind == "region_close":
                    value = event["value"]
                    self._add_calls(value if isinstance(value, list) else [value], new)
                    self._unsure = ""
            elif kind == "region_chunk":
                text = event["text"]
                is_reasoning = event["field"] in THOUGHTS
                new.reasoning += text if is_reasoning else ""
                if self.message.calls or new.calls:  # of a thought that ended with a call
                    text = text.replace(THINK[1], "")
                new.content += "" if is_reasoning else text
                self._unsure = ""

    def _add_calls(self, values: list[dict[str, Any]], new: Parts) -> None:
        for value in values:
            function = value["function"]
            arguments = function.get("arguments", function.get("parameters", {}))
            if not isinstance(arguments, str):
                arguments = json_of(arguments)
            has_room = self._max_calls is None or (
                len(self.message.calls) + len(new.calls) < self._max_calls
            )
            if has_room:
                name = required_name(function["name"])
                new.calls.append(ToolCall(name, arguments, f"call_{uuid.uuid4().hex[:24]}"))


def is_blank(event: Mapping[str, Any]) -> bool:
    """True for text that is nothing but white space."""
    return "text" in event and not event["text"].strip()


def required_name(name: Any) -> str:
    """Return the name of a function. Raises ValueError if it is none."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call without a name")
    return name.strip()


def json_of(value: Any) -> str:
    """Return JSON in UTF-8, in which lone surrogates are U+FFFD. Raises ValueError for numbers that
    JSON has not.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
