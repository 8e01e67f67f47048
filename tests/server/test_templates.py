"""Conversations reach chat templates of every kind with nothing lost.

The templates here are small, and each behaves as those of some family of models do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from moe_infinity.server.rendering import TemplateRaised, TemplateTooSlow
from moe_infinity.server.templates import ChatTemplate, Rendering

EACH = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BEGIN = "{% if add_generation_prompt %}assistant:{% endif %}"
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}" + BEGIN
)
STRICT_ROLES = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unexpected role') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    + BEGIN
)
OWN_DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}# Instructions\n{{ m.content }}\n"
    "{% elif m.role in ['system', 'user', 'assistant'] %}{{ m.role }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}" + BEGIN
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System must be first') }}{% endif %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}" + BEGIN
)
LAST_SYSTEM = (  # a later system message takes the place of the first
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}\n"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    + BEGIN
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}" + BEGIN
)
ONLY_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}" + BEGIN
)


def with_calls(call: str, *, otherwise: str = "{{ m.content or '' }}", when: str = "true") -> str:
    """A template that writes each call `c` of a message so."""
    return (
        "{% for m in messages %}{{ m.role }}: {% if m.tool_calls and " + when + " %}"
        "{% for c in m.tool_calls %}"
        + call
        + "{% endfor %}{% else %}"
        + otherwise
        + "{% endif %}\n"
        "{% endfor %}" + BEGIN
    )


NAME = "{{ c.function.name }} "
BOTH = "{{ m.content or '' }}"
AS_TEXT = with_calls(BOTH + "{{ c.function.name + ' ' + c.function.arguments }}")
AS_OBJECT = with_calls(BOTH + NAME + "{{ c.function.arguments | tojson }}")
AS_ITEMS = with_calls(
    BOTH + NAME + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }} {% endfor %}"
)
PRINTED = with_calls(BOTH + NAME + "{{ c.function.arguments }}")
NULL_CONTENT = with_calls(
    NAME + "{{ c.function.arguments }}", otherwise="{{ m.content }}", when="m.content is none"
)
ONE_CALL = with_calls(
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('One at a time') }}{% endif %}"
    + BOTH + NAME + "{{ c.function.arguments | tojson }}"
)  # fmt: skip
SHORT_IDS = with_calls(
    "{% if c.id | length != 9 %}{{ raise_exception('Nine letters') }}{% endif %}"
    + BOTH + NAME + "{{ c.function.arguments | tojson }}"
)  # fmt: skip
NAMED_IDS = with_calls(BOTH + "{{ c.id }} {{ c.function.arguments | tojson }}")
THOUGHTS = with_calls(
    "{% if m.thinking and m.content %}{{ raise_exception('Not both') }}{% endif %}"
    "{{ m.thinking }}{{ m.content or '' }}" + NAME + "{{ c.function.arguments | tojson }}"
)
WITHOUT_CALLS = EACH + BEGIN
KINDS = {
    name: value
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, str) and value.startswith("{%") and "for m" in value
}


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="x", eos_token="x", unk_token="x"
    )
    tokenizer.chat_template = template
    return tokenizer


def call(number: int, arguments: str) -> dict[str, Any]:
    function = {"name": f"fetch{number}", "arguments": arguments}
    return {"id": f"call_{number:024d}", "type": "function", "function": function}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def result(number: int, content: str) -> dict[str, Any]:
    return said("tool", content, tool_call_id=f"call_{number:024d}")


USER = said("user", "Alder")
AGAIN = said("user", "Birch")
CALLS = [call(1, '{"key": "Cedar"}'), call(2, '{"key": "Dogwood"}')]
RESULTS = [result(1, "Elder"), result(2, "Fir")]
CALLING = said("assistant", "", tool_calls=CALLS[:1])
ANSWER = said("assistant", "Juniper")
# Conversations, and the words that each must have in its prompt.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "developer": ([said("developer", "Ginkgo"), USER], "Ginkgo Alder"),
    "system": ([said("system", "Hazel"), USER], "Hazel Alder"),
    "two systems": (
        [said("system", "Hazel"), said("developer", "Ginkgo"), USER],
        "Hazel Ginkgo Alder",
    ),
    "late system": (
        [said("system", "Hazel"), USER, said("system", "Ivy")],
        "Hazel Alder Ivy",
    ),
    "later system": (
        [USER, ANSWER, said("developer", "Ivy"), AGAIN],
        "Alder Juniper Ivy Birch",
    ),
    "call": ([USER, CALLING, RESULTS[0]], "fetch1 key Cedar Elder"),
    "two calls": (
        [USER, said("assistant", "", tool_calls=CALLS), *RESULTS, ANSWER, AGAIN],
        "fetch1 Cedar fetch2 Dogwood Elder Fir Juniper Birch",
    ),
    "call and text": (
        [USER, CALLING | {"content": "Larch"}, RESULTS[0]],
        "Larch fetch1 Cedar Elder",
    ),
    "call and reasoning": (
        [USER, CALLING | {"content": "Larch", "reasoning_content": "Maple"}, RESULTS[0]],
        "Larch fetch1 Cedar Elder",
    ),
    "text behind results": (
        [USER, CALLING, RESULTS[0], AGAIN],
        "fetch1 Cedar Elder Birch",
    ),
    "bad JSON": (
        [USER, said("assistant", "", tool_calls=[call(1, '{"key": Oak')]), RESULTS[0]],
        "Oak",
    ),
    "arguments in a list": (
        [USER, said("assistant", "", tool_calls=[call(1, '["Oak"]')]), RESULTS[0]],
        "Oak",
    ),
    "two users": ([USER, AGAIN], "Alder Birch"),
    "answer first": ([ANSWER, AGAIN], "Juniper Birch"),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_conversation_is_lost(kind, conversation):
    messages, words = CONVERSATIONS[conversation]
    prompt = ChatTemplate(tokenizer_with(KINDS[kind])).text(messages)
    assert [word for word in words.split() if word not in prompt] == []
    assert "{'key'" not in prompt  # an object as Python prints it
    assert r"{\"key" not in prompt or conversation == "bad JSON"  # JSON within JSON


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (EACH + BEGIN, "system: Ginkgo\nuser: Alder\nassistant:"),
        (KNOWN_ROLES, "system: Ginkgo\nuser: Alder\nassistant:"),
        (OWN_DEVELOPER, "# Instructions\nGinkgo\nuser: Alder\nassistant:"),
    ],
)
def test_a_developer_is_the_system_unless_the_template_knows_both(template, prompt):
    messages = [said("developer", "Ginkgo"), USER]
    assert ChatTemplate(tokenizer_with(template)).text(messages) == prompt


def test_what_a_template_takes_as_it_is_stays_as_it_is():
    messages = [said("system", "Hazel"), USER, said("system", "Ivy"), AGAIN, AGAIN]
    prompt = "system: Hazel\nuser: Alder\nsystem: Ivy\nuser: Birch\nuser: Birch\nassistant:"
    assert ChatTemplate(tokenizer_with(EACH + BEGIN)).text(messages) == prompt


def test_reasoning_has_the_name_that_the_template_reads():
    message = CALLING | {"reasoning_content": "Maple"}
    prompt = ChatTemplate(tokenizer_with(THOUGHTS)).text([USER, message, RESULTS[0]])
    assert "assistant: Maplefetch1" in prompt


def test_an_object_reaches_a_template_as_the_client_sent_it():
    """Arguments that are a text stay that text, spaces and all."""
    text = '{ "key":1 }'
    messages = [USER, said("assistant", "", tool_calls=[call(1, text)]), RESULTS[0]]
    assert text in ChatTemplate(tokenizer_with(AS_TEXT)).text(messages)
    assert '{"key": 1}' in ChatTemplate(tokenizer_with(AS_OBJECT)).text(messages)


STRIPPED = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<end>{% endfor %}" + BEGIN
UPPER = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}<end>{% endfor %}" + BEGIN


@pytest.mark.parametrize("template", [EACH + BEGIN, STRIPPED, UPPER, ONLY_PARTS])
@pytest.mark.parametrize("text", ["Once upon", "Once upon "])
def test_an_answer_that_has_begun_is_continued(template, text):
    prompt = ChatTemplate(tokenizer_with(template)).text(
        [USER, said("assistant", text)], is_continued=True
    )
    assert prompt.endswith(text)
    assert prompt.count("assistant:") == 1


def test_a_prompt_need_not_begin_the_answer():
    prompt = ChatTemplate(tokenizer_with(EACH + BEGIN)).text([USER], begins_answer=False)
    assert prompt == "user: Alder\n"


def test_what_no_repair_helps_is_refused_in_the_words_of_the_template():
    template = "{{ raise_exception('Never.') }}"
    with pytest.raises(TemplateRaised, match="Never"):
        ChatTemplate(tokenizer_with(template)).text([USER])


def test_another_template_is_tried_anew():
    tokenizer = tokenizer_with(EACH + BEGIN)
    template = ChatTemplate(tokenizer)
    messages = [USER, said("system", "Ivy")]
    assert "system: Ivy" in template.text(messages)
    tokenizer.chat_template = SYSTEM_FIRST
    assert "user: Ivy" in template.text(messages)


def test_a_template_that_had_no_time_is_tried_anew(monkeypatch):
    """What was not seen while the machine was busy was taken for what the template leaves out."""
    template = ChatTemplate(tokenizer_with(LAST_SYSTEM))
    messages = [said("system", "Hazel"), USER, said("system", "Ivy")]

    def slow(*given: Any, **options: Any) -> str:
        raise TemplateTooSlow("busy")

    with monkeypatch.context() as busy:
        busy.setattr(Rendering, "text", slow)
        with pytest.raises(TemplateTooSlow):
            template.text(messages)
    assert template.text(messages) == "Hazel\nuser: Alder\nuser: Ivy\nassistant:"


def test_a_text_that_is_too_slow_twice_is_one_that_the_template_does_not_take(monkeypatch):
    """Else nobody could chat."""
    template = ChatTemplate(tokenizer_with(LAST_SYSTEM))
    text = Rendering.text

    def slow_with_calls(rendering: Rendering, messages: Any, **options: Any) -> str:
        if any("tool_calls" in message for message in messages):
            raise TemplateTooSlow("it does not end")
        return text(rendering, messages, **options)

    monkeypatch.setattr(Rendering, "text", slow_with_calls)
    with pytest.raises(TemplateTooSlow):
        template.text([USER])
    template.try_out()
    assert template.text([USER]) == "\nuser: Alder\nassistant:"
    assert not template.forms().has_calls


def test_only_whole_words_of_a_template_are_its_variables():
    tokenizer = tokenizer_with("{% if thoughts %}{{ a.b }}{% endif %}{# well-known #}")
    template = ChatTemplate(tokenizer)
    found = [name for name in ("thoughts", "a", "b") if template.has_variable(name)]
    assert found == ["thoughts", "a", "b"]
    assert not any(map(template.has_variable, ("thought", "houghts", "", ".", "a.b", "well-known")))
    tokenizer.chat_template = "{{ thought }}"
    assert template.has_variable("thought")


def test_the_name_of_a_variable_takes_no_time_however_long_it_is():
    """It was part of a regular expression."""
    template = ChatTemplate(tokenizer_with(EACH))
    began_s = time.thread_time()
    assert not template.has_variable("a" * 2_000_000)
    assert time.thread_time() - began_s < 0.5


FOLDER = os.environ.get("CHAT_TEMPLATES")  # a folder of *.jinja files, those of real models
# Some templates leave the text beside a call out, those of gpt-oss and Mistral for example.
ALL_KEPT = [name for name in CONVERSATIONS if name not in ("call and text", "call and reasoning")]


@pytest.mark.slow
@pytest.mark.skipif(FOLDER is None, reason="CHAT_TEMPLATES names no folder")
def test_real_templates_lose_nothing():
    lost = []
    for file in sorted(Path(str(FOLDER)).glob("*.jinja")):
        template = ChatTemplate(tokenizer_with(file.read_text("utf-8")))
        try:
            template.text([USER])
        except TemplateRaised:
            continue  # it wants tools with every request
        for name in ALL_KEPT:
            messages, words = CONVERSATIONS[name]
            prompt = template.text(messages)
            lost += [(file.name, name, word) for word in words.split() if word not in prompt]
    assert lost == []
