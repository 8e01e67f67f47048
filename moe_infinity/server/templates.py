"""Conversations in the form that a model's chat template takes.

Templates differ in what they take: some raise for a second system message, some leave calls out
without a word. A template is therefore tried once on small conversations, and the first form is
taken in which nothing of them is lost. What it then raises for is repaired, step by step.

    messages --Forms--> shaped --template--> prompt, or else again with some of the REPAIRS
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from moe_infinity.server.declared import declaration
from moe_infinity.server.formats import HERMES, CallForm, shows_tools
from moe_infinity.server.image_marks import ImageMarks
from moe_infinity.server.limits import RENDERING_S
from moe_infinity.server.rendering import TemplateRaised, TemplateTooSlow, shared_renderers
from moe_infinity.server.shapes import REASONING, REPAIRS, Forms, Messages, shaped

logger = logging.getLogger(__name__)
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
# Words of the conversations on which templates are tried.
SYSTEM = "Pearls"
LATE = "Quinces"
ASKED = "Raisins"
ANSWERED = "Saffron"
ASKED_AGAIN = "Truffles"
THOUGHT = "Walnuts"
RESULT = "Zucchini"
FUNCTION = "fetch_plums"
KEY = "kumquat"
VALUE = "Vanilla"
CALL_WORDS = (FUNCTION, KEY, VALUE, RESULT)
NAMES = (FUNCTION, RESULT)
USER = {"role": "user", "content": ASKED}
TOOL = {
    "type": "function",
    "function": {
        "name": "other",
        "description": "Other.",
        "parameters": {"type": "object", "properties": {}},
    },
}


# Few repairs come first, and each is tried alone before it is tried with others.
SUBSETS = [repairs for size in range(len(REPAIRS) + 1) for repairs in combinations(REPAIRS, size)]


def call_of(idx: int) -> dict[str, Any]:
    """Return a call. Mistral's templates want ids of nine letters or digits."""
    function = {"name": f"{FUNCTION}{idx}", "arguments": f'{{"{KEY}{idx}": "{VALUE}{idx}"}}'}
    return {"id": f"abcdefgh{idx}", "type": "function", "function": function}


class Rendering:
    """Renders the chat template of a tokenizer, within a time of its own for each conversation.

    A template of the checkpoint runs in a process of its own, if the system lets us have one.
    Mistral's tokenizers have none: they bring code of a library.
    """

    def __init__(self, tokenizer: Any, marks: ImageMarks | None = None) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._is_jinja = (
            getattr(type(tokenizer), "apply_chat_template", None)
            is PreTrainedTokenizerBase.apply_chat_template
        )
        if self._is_jinja:
            try:
                shared_renderers().start()
            except OSError as error:
                logger.warning("chat templates run without limits of time and memory: %s", error)
                self._is_jinja = False
        self._deadline = time.monotonic() + RENDERING_S.most

    def text(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """Return the text. Raises TemplateRaised; TemplateTooSlow if the time is over."""
        if self._marks is not None:
            messages = self._marks.taken_apart(messages)
        if self._is_jinja:
            arguments = {
                **self._tokenizer.special_tokens_map,
                **options,
                "conversations": [messages],
                "tools": tools,
                "chat_template": self._tokenizer.get_chat_template(None, tools),
            }
            return shared_renderers().render(arguments, self._deadline)
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, tools=tools, **options
            )
        except Exception as error:  # it may raise anything
            raise TemplateRaised(str(error)) from error
        return text


class ChatTemplate:
    """The chat template of a tokenizer. Safe to call from several threads."""

    def __init__(self, tokenizer: Any, call_form: CallForm = HERMES.calls) -> None:
        """`call_form`: in which the model writes calls, for templates that know none."""
        self._tokenizer = tokenizer
        self._call_form = call_form
        self._tried: dict[str, Forms] = {}  # template -> what was found by trying it
        self._trying = threading.Lock()
        self._was_slow = False  # a trial ended because a text took too long
        self._words: dict[str, frozenset[str]] = {}  # template -> all that may be a variable

    @property
    def is_there(self) -> bool:
        return self._tokenizer.chat_template is not None

    def has_variable(self, name: str) -> bool:
        """Return True if the template names such a variable."""
        template = str(self._tokenizer.chat_template)
        if template not in self._words:
            self._words = {template: frozenset(re.findall(r"\w+", template))}
        return name in self._words[template]

    def text(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
        *,
        is_continued: bool = False,
        begins_answer: bool = True,
        marks: ImageMarks | None = None,
    ) -> str:
        """Return the prompt for messages in OpenAI's form, whose contents are text.

        `is_continued`: the last message is the beginning of the answer. `begins_answer`: otherwise
        the prompt ends with what begins one. `marks`: of the images in these texts, which are then
        in the order of the prompt's. Raises TemplateRaised with the template's words.
        """
        forms = self.forms()
        if tools and not shows_tools(self._tokenizer.chat_template):
            messages = [declaration(tools, self._call_form), *messages]
            tools = None
        options = {"tools": tools, "add_generation_prompt": begins_answer, **variables}
        rendering = Rendering(self._tokenizer, marks)
        if is_continued:
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        try:
            text = self._repaired(rendering, messages, forms, options)
        except TemplateRaised as error:
            if not is_continued or isinstance(error, TemplateTooSlow):
                raise
            # The template changes the text, so that its end is not found in the prompt.
            options |= {"add_generation_prompt": True, "continue_final_message": False}
            text = self._repaired(rendering, messages[:-1], forms, options)
            return text + str(messages[-1]["content"])
        if not is_continued:
            return text
        said: str = messages[-1]["content"]
        return text if text.endswith(said) else text + said[len(said.rstrip()) :]

    def try_out(self) -> None:
        """Find the forms before they are asked for. One that takes too long is tried again then."""
        with suppress(TemplateTooSlow):
            self.forms()

    def forms(self) -> Forms:
        """The forms that the template takes, which are found once. Raises TemplateTooSlow the first
        time; then the machine may be busy.
        """
        template = str(self._tokenizer.chat_template)
        with self._trying:
            if template not in self._tried:
                trial = TemplateTrial(self._tokenizer, passes_over_slow=self._was_slow)
                try:
                    forms = replace(trial.forms, call_form=self._call_form)
                    self._tried = {template: forms}
                except TemplateTooSlow:
                    self._was_slow = True
                    raise
            return self._tried[template]

    def _repaired(
        self, rendering: Rendering, messages: Messages, forms: Forms, options: dict[str, Any]
    ) -> str:
        first: Exception | None = None
        for repairs in SUBSETS:
            try:
                taken = shaped(messages, forms)
                for repair in repairs:
                    taken = repair(taken)
                return rendering.text(taken, **options)
            except TemplateTooSlow:
                raise
            except Exception as error:  # also of a repair that does not fit
                first = first or error
        raise TemplateRaised(str(first)) from first


class TemplateTrial:
    """Finds the forms that a template takes, by rendering."""

    def __init__(self, tokenizer: Any, *, passes_over_slow: bool) -> None:
        """`passes_over_slow`: a text that takes too long is one that the template does not take."""
        self._tokenizer = tokenizer
        self._passes_over_slow = passes_over_slow

    @property
    def forms(self) -> Forms:
        forms = Forms(has_parts=self._wants_parts())
        if self._render([USER], forms) is None:
            return forms  # it takes more than it is given here
        tried = self._forms(forms)
        logger.debug("the chat template takes %s", tried)
        return tried

    def _forms(self, forms: Forms) -> Forms:
        has_developer = self._has_developer(forms)
        has_system = self._keeps([{"role": "system", "content": SYSTEM}, USER], forms, SYSTEM)
        forms = replace(forms, has_developer=has_developer, has_system=has_system)
        late = has_system and self._has_late_system(forms)
        forms = replace(forms, has_late_system=late)
        forms = self._with_calls(forms)
        return replace(forms, reasoning=self._name_of_reasoning(forms))

    def _render(self, messages: Messages, forms: Forms, **options: Any) -> str | None:
        """Return the text; None if the template raises."""
        try:
            rendering = Rendering(self._tokenizer)
            return rendering.text(shaped(messages, forms), add_generation_prompt=True, **options)
        except TemplateRaised as error:
            if isinstance(error, TemplateTooSlow) and not self._passes_over_slow:
                raise
            return None

    def _keeps(self, messages: Messages, forms: Forms, *words: str) -> bool:
        text = self._render(messages, forms)
        return text is not None and all(word in text for word in words)

    def _wants_parts(self) -> bool:
        as_text = self._keeps([USER], Forms(), ASKED)
        return not as_text and self._keeps([USER], Forms(has_parts=True), ASKED)

    def _has_developer(self, forms: Forms) -> bool:
        """Return True if the role means another thing than one that nobody has heard of."""
        roles = ("developer", "gardener")
        as_it_is = replace(forms, has_developer=True)
        asked = [[{"role": role, "content": SYSTEM}, USER] for role in roles]
        named, unheard = (self._render(messages, as_it_is) for messages in asked)
        if named is None or SYSTEM not in named:
            return False
        return unheard is None or named.replace(*roles) != unheard

    def _has_late_system(self, forms: Forms) -> bool:
        first = {"role": "system", "content": SYSTEM}
        late = {"role": "system", "content": LATE}
        said = [USER, {"role": "assistant", "content": ANSWERED}]
        again = {"role": "user", "content": ASKED_AGAIN}
        as_it_is = replace(forms, has_late_system=True)
        return all(
            self._keeps(messages, as_it_is, *(each["content"] for each in messages))
            for messages in ([USER, late], [*said, late, again], [first, *said, late, again])
        )

    def _with_calls(self, forms: Forms) -> Forms:
        """Return the first form in which calls and their results are all there, or else the first
        in which the names are.
        """
        options = [
            replace(
                forms, has_named_ids=named, has_text_arguments=as_text, has_null_beside_calls=null
            )
            for named, as_text, null in product((False, True), repeat=3)
        ]
        for words, calls in product((CALL_WORDS, NAMES), options):
            if self._keeps_calls(calls, words):
                alone = not self._keeps_calls(calls, words, num_calls=2)
                calls = replace(calls, has_one_call=alone)
                apart = replace(calls, has_calls_apart=True)
                beside, better = (
                    self._keeps_calls(each, words, content=ANSWERED) for each in (calls, apart)
                )
                return apart if better and not beside else calls
        return replace(forms, has_calls=False)

    def _keeps_calls(
        self, forms: Forms, words: Sequence[str], *, content: str = "", num_calls: int = 1
    ) -> bool:
        calls = [call_of(idx) for idx in range(num_calls)]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{RESULT}{idx}"}
            for idx, call in enumerate(calls)
        ]
        messages: Messages = [
            USER,
            {"role": "assistant", "content": content, "tool_calls": calls},
            *results,
        ]
        wanted = [content, *(f"{each}{idx}" for each in words for idx in range(num_calls))]
        for tools in (None, [TOOL]):
            text = self._render(messages, forms, tools=tools)
            # Neither an object as Python prints it, nor a text as JSON quotes it.
            wrong = (f"{{'{KEY}", f'\\"{KEY}')
            if text is not None and all(word in text for word in wanted):
                return not any(each in text for each in wrong)
        return False

    def _name_of_reasoning(self, forms: Forms) -> str:
        for name in REASONING:
            tried = replace(forms, reasoning=name)
            call = call_of(0)
            said = {"role": "assistant", "content": "", "reasoning_content": THOUGHT}
            result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
            if self._keeps([USER, said | {"tool_calls": [call]}, result], tried, THOUGHT):
                return name
        return REASONING[0]
