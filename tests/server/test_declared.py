"""Functions reach models whose chat template shows none, and their calls are found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_infinity.server.declared import declaration, text_of_calls
from moe_infinity.server.formats import HERMES, TOLD, family_of
from moe_infinity.server.messages import MessageFormat
from moe_infinity.server.templates import ChatTemplate
from tests.server.serving import serving
from tests.server.test_call_forms import PROMPTS
from tests.server.test_messages import WEATHER, Plain, shown
from tests.server.test_templates import BEGIN, EACH, tokenizer_with

CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
USER = {"role": "user", "content": "Alder {braces}"}
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + BEGIN
)
WITH_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + EACH + BEGIN
CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 3}'},
}
CALLING = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "Sun"}
HERMES_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
)


@pytest.mark.parametrize("template", [EACH + BEGIN, NO_SYSTEM])
@pytest.mark.parametrize("system", [None, "Birch"])
def test_a_template_without_tools_gets_them_in_the_conversation(template, system):
    messages = [USER] if system is None else [{"role": "system", "content": system}, USER]
    text = ChatTemplate(tokenizer_with(template)).text(messages, [WEATHER, CLOCK])
    schema = json.dumps(WEATHER["function"]["parameters"])
    for word in ("## weather\n", "## clock\n", schema, "<tool_call>", *filter(None, [system])):
        assert text.count(word) == 1, word
    assert text.index("## weather") < text.index("Alder {braces}")
    assert text.endswith("assistant:")


def test_a_template_with_tools_shows_them_itself():
    text = ChatTemplate(tokenizer_with(WITH_TOOLS)).text([USER], [WEATHER, CLOCK])
    assert text == "[weather][clock]user: Alder {braces}\nassistant:"


def test_without_functions_nothing_is_added():
    text = ChatTemplate(tokenizer_with(EACH + BEGIN)).text([USER], None)
    assert text == "user: Alder {braces}\nassistant:"


def test_calls_of_before_are_written_as_they_were_declared():
    template = ChatTemplate(tokenizer_with(EACH + BEGIN))
    text = template.text([USER, CALLING, RESULT], [WEATHER])
    assert f"assistant: I look.\n{HERMES_CALL}\n" in text
    assert text.endswith("user: Sun\nassistant:")


def test_deepseek_is_told_its_own_marks():
    family: Any = family_of("deepseek_v3", "")
    template = ChatTemplate(tokenizer_with(EACH + BEGIN), family.written.calls)
    text = template.text([USER, CALLING, RESULT], [WEATHER])
    assert text.count("<｜tool▁call▁begin｜>function<｜tool▁sep｜>") == 2
    assert '<｜tool▁sep｜>weather\n```json\n{"city": "Rome", "days": 3}\n```' in text


@pytest.mark.parametrize("name", [*PROMPTS])
def test_what_is_told_is_what_is_read(name):
    prompt, template = PROMPTS[name]
    family: Any = family_of(name.split(",")[0], template)
    plain: Any = Plain(name)
    plain.chat_template = template
    format = MessageFormat(plain, plain)
    reader = format.reader(list(map(ord, prompt)), [WEATHER], max_calls=None)
    if format.has_begun_reasoning(list(map(ord, prompt))):
        reader.add("</think>", is_last=False)
    arguments = {"city": "Rome", "days": 3}
    reader.add(text_of_calls(family.written.calls, [("weather", arguments)]), is_last=True)
    assert shown(reader.message)[2] == [("weather", arguments)]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
ASSISTANT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}Assistant:"


def format_of(kind: str, template: str, **fields: Any) -> Any:
    plain: Any = Plain(kind)
    plain.chat_template = template
    vars(plain).update(fields)
    return MessageFormat(plain, plain)


def read(format: Any, prompt: str, text: str) -> Any:
    reader = format.reader(list(map(ord, prompt)), [WEATHER], max_calls=None)
    for letter in text:
        reader.add(letter, is_last=False)
    reader.add("", is_last=True)
    return shown(reader.message)


@pytest.mark.parametrize(("kind", "template"), [("mixtral", CHATML), ("deepseek_v2", ASSISTANT)])
def test_a_template_of_anothers_making_is_told_and_read_in_the_same_form(kind, template):
    """As of Mixtrals that were trained with ChatML: all of their answers were lost."""
    format = format_of(kind, template)
    prompt = ChatTemplate(tokenizer_with(template), format.call_form).text([USER], [WEATHER])
    assert "<tool_call>" in prompt
    assert read(format, prompt, "Hello.") == ("Hello.", "", [])
    called = read(format, prompt, HERMES_CALL + "\n")
    assert called == ("", "", [("weather", {"city": "Rome", "days": 3})])
    assert format.reads_calls(list(map(ord, prompt)), "weather")


@pytest.mark.parametrize("behind", ["", "\n", "\n\nI will look [this] up.", "</s>"])
@pytest.mark.parametrize("is_list", [True, False])
def test_text_behind_a_call_of_mixtral_does_not_lose_it(behind, is_list):
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    text = f"[TOOL_CALLS] {f'[{call}]' if is_list else call}{behind}"
    found = read(format_of("mixtral", ""), "<s>[INST] hi [/INST]", text)
    assert found == ("", "", [("weather", {"city": "Rome"})])
    half = read(format_of("mixtral", ""), "<s>[INST] hi [/INST]", text[:40])
    assert half == ("", "", [])


def test_a_checkpoints_own_way_to_read_answers_gets_calls_as_they_are_told():
    thinking = {"open": "<hm>", "close": "</hm>", "content": "text"}
    spec = {
        "start_anchor": "assistant:",
        "fields": {"thinking": thinking, "content": {"content": "text"}},
    }
    format = format_of("olmoe", EACH + BEGIN, response_template=spec)
    found = read(format, "user: hi\nassistant:", f"<hm>so</hm>Well.{HERMES_CALL}")
    assert found == ("Well.", "so", [("weather", {"city": "Rome", "days": 3})])


def test_a_letter_that_was_cut_in_earlier_arguments_is_replaced():
    function = {"name": "weather", "arguments": '{"city": "\\ud83d"}'}
    call = {"id": "a", "type": "function", "function": function}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = ChatTemplate(tokenizer_with(EACH + BEGIN)).text([USER, calling, RESULT], [WEATHER])
    assert '{"city": "\ufffd"}' in text
    assert text.encode()


# kinds that nobody has said anything of


def told_reader(prompt: str, template: str = EACH + BEGIN) -> Any:
    plain: Any = Plain("olmoe")
    plain.chat_template = template
    format = MessageFormat(plain, plain)
    assert format.is_known == (template == EACH + BEGIN)
    return format.reader(list(map(ord, prompt)), [WEATHER, CLOCK], max_calls=None)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("user: hi\nassistant:", " Hello.", (" Hello.", "")),
        ("user: hi\nassistant:", "<think>\nhm\n</think>\nI look.\n", ("\nI look.", "\nhm\n")),
        ("user: hi\nassistant:\n<think>\n", "hm\n</think>I look.\n", ("I look.", "\nhm\n")),
        (
            "<think>old</think> <tool_call>{}</tool_call>\nassistant:\n\n",
            "I look.",
            ("I look.", ""),
        ),
    ],
)
def test_an_unknown_kind_is_read_as_it_was_told(prompt, text, expected, size):
    text += HERMES_CALL + '\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    reader = told_reader(prompt)
    for start in range(0, len(text), size):
        reader.add(text[start : start + size], is_last=start + size >= len(text))
    content, reasoning, calls = shown(reader.message)
    assert (content.strip(), reasoning.strip()) == tuple(each.strip() for each in expected)
    assert calls == [("weather", {"city": "Rome", "days": 3}), ("clock", {})]


def test_an_unknown_kind_with_tools_of_its_own_is_not_guessed():
    reader = told_reader("user: hi\nassistant:", WITH_TOOLS)
    reader.add(HERMES_CALL, is_last=True)
    assert shown(reader.message) == (HERMES_CALL, "", [])


def test_the_form_of_an_unknown_kind_is_the_most_usual():
    assert TOLD.written is HERMES
    said = declaration([CLOCK], HERMES.calls)["content"]
    assert '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>' in said
    assert "## clock\nArguments: {}" in said


# through the server


def test_a_request_counts_what_is_declared_and_may_require_a_call(demo):
    asked: Any = {"model": "tiny", "messages": [USER], "temperature": 0, "max_tokens": 200}
    with serving(demo, max_batch=2) as server:
        chat: Any = server.client().chat.completions

        def counted(**fields: Any) -> int:
            num: int = chat.create(**asked | {"max_tokens": 1}, **fields).usage.prompt_tokens
            return num

        assert counted(tools=[CLOCK]) > counted() + 50
        assert counted(tools=[CLOCK], tool_choice="none") == counted()
        must = chat.create(**asked, tools=[CLOCK], tool_choice="required")
    assert {call.function.name for call in must.choices[0].message.tool_calls} == {"clock"}
