"""Answers as models of each family write them, in files, become the same reasoning and calls."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from moe_infinity.server.formats import family_of
from moe_infinity.server.messages import MessageFormat, MessageReader, Parts, is_readable

ANSWERS = {path.stem: path for path in sorted(Path(__file__).with_name("answers").glob("*.txt"))}
if not is_readable(family_of("lfm2_moe", "")):  # by transformers 5.17
    del ANSWERS["lfm2_moe"]
# Where the chat template decides, and not the kind of model: what it has.
TEMPLATES = {
    "qwen3_moe_coder": "'<tool_call>\\n<function=' + name",
    "nemotron_h_nano_2": "'<TOOLCALL>['",
}
KINDS = {"qwen3_moe_coder": "qwen3_moe", "nemotron_h_nano_2": "nemotron_h"}
MARKS = re.compile(
    r"<\|\"\|>|</?think>|</?tool_call>|</?TOOLCALL>|</?minimax:tool_call>|</?arg_\w+>"
    r"|<\|[a-z_]+\|?>|<[a-z_]+\|>|]~b]|<SPECIAL_11>"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "zip": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "days": {"type": ["integer", "null"]},
                "exact": {"type": "boolean"},
                "code": {"type": "string"},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "$defs": {"Unit": {"type": "object"}},
        },
    },
}
ARGUMENTS = {
    "city": 'Zürich "東京" \\ {a: 1}',
    "zip": "00123",
    "days": 3,
    "exact": True,
    "code": 'if a < b:\n    print("x")  # </end>',
    "unit": {"name": "°C", "steps": [1, 2.5, None, True]},
}
CALLS = [("weather", ARGUMENTS), ("weather", {"city": "Rome"})]


class Plain:
    """Stands for tokenizer and model: a token is a character, marks are special tokens."""

    def __init__(self, name: str, text: str) -> None:
        self.config = self
        self.model_type = KINDS.get(name, name)
        self.chat_template = TEMPLATES.get(name, "")
        marks = sorted(set(MARKS.findall(text)))
        self.added_tokens_decoder = {
            at: AddedToken(mark, special=True) for at, mark in enumerate(marks)
        }

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def recorded(name: str) -> tuple[MessageReader, str]:
    """What reads an answer, and the answer."""
    text = ANSWERS[name].read_text()
    prompt, answer = text.split("\n=== the model writes ===\n")
    plain: Any = Plain(name, text)
    form = MessageFormat(plain, plain)
    return form.reader(list(map(ord, prompt)), [WEATHER], max_calls=None), answer


def shown(parts: Parts) -> tuple[str, str, list[Any]]:
    calls = [(call.name, json.loads(call.arguments)) for call in parts.calls]
    return parts.content.strip(), parts.reasoning.strip(), calls


def expected(name: str) -> tuple[str, str, list[Any]]:
    has_thought = name not in ("lfm2_moe", "qwen3_moe_coder")
    return "I look.", "Hm, <b>." if has_thought else "", CALLS


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_whole_and_letter_by_letter(name):
    for size in (1, 2, 5, 10_000):
        reader, text = recorded(name)
        for start in range(0, len(text), size):
            reader.add(text[start : start + size], is_last=False)
        reader.add("", is_last=True)
        assert shown(reader.message) == expected(name), size


@pytest.mark.parametrize("name", ANSWERS)
def test_wherever_an_answer_is_cut_in_two_it_is_the_same(name):
    for at in range(len(recorded(name)[1])):
        reader, text = recorded(name)
        reader.add(text[:at], is_last=False)
        reader.add(text[at:], is_last=True)
        assert shown(reader.message) == expected(name), text[:at]


@pytest.mark.parametrize("name", ANSWERS)
def test_wherever_an_answer_ends_nothing_of_a_call_is_shown(name):
    content, reasoning, calls = expected(name)
    for end in range(len(recorded(name)[1])):
        reader, text = recorded(name)
        is_within_mark = any(
            mark.start() < end < mark.end() for mark in MARKS.finditer(text)
        )  # which is one token
        if is_within_mark:
            continue
        reader.add(text[:end], is_last=True, is_cut=True)
        got = shown(reader.message)
        assert content.startswith(got[0]), text[:end]
        assert reasoning.startswith(got[1]), text[:end]
        assert got[2] == calls[: len(got[2])]


GARBAGE = ["{", "}", '"', "]", "\x01", "�", "<", ">", "\n", "\\u00", "NaN", "a:", "=", "\ud83d"]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_changed_answer_never_raises_and_stays_text_in_utf_8(name, every):
    """One character is left out, or is another."""
    for at in range(0, len(recorded(name)[1]), every):
        for other in ("", GARBAGE[at % len(GARBAGE)]):
            reader, text = recorded(name)
            reader.add(text[:at] + other + text[at + 1 :], is_last=True)
            for call in reader.message.calls:
                assert call.name
                call.arguments.encode()
                json.loads(call.arguments, parse_constant=pytest.fail)


def test_a_model_may_leave_out_the_first_mark_of_a_call():
    reader, text = recorded("qwen3_moe_coder")
    reader.add(text.replace("<tool_call>\n", ""), is_last=True)
    assert shown(reader.message) == expected("qwen3_moe_coder")


def test_the_last_argument_may_lack_its_end():
    reader, text = recorded("qwen3_moe_coder")
    reader.add(text.replace("Rome\n</parameter>", "Rome"), is_last=True)
    assert shown(reader.message) == expected("qwen3_moe_coder")


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "weather", "arguments": ' + "[" * 100_000 + "}",
        '{"name": "weather", "arguments": {"days": NaN}}',
        '{"name": {"a": 1}, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "weather", "arguments": }',
        "null",
    ],
    ids=["deep", "nan", "name", "no name", "no value", "null"],
)
def test_what_is_no_call_is_text(call):
    reader, _ = recorded("qwen3_moe")
    reader.add(f"</think>\n<tool_call>\n{call}\n</tool_call>", is_last=True)
    assert reader.message.calls == []
    assert call in reader.message.content


def test_half_a_pair_of_surrogates_in_a_call_is_a_replacement():
    reader, _ = recorded("qwen3_moe")
    call = r'{"name": "weather", "arguments": {"city": "\ud83d", "code": "\ud83d\ude00"}}'
    reader.add(f"</think>\n<tool_call>\n{call}\n</tool_call>", is_last=True)
    (found,) = reader.message.calls
    assert json.loads(found.arguments) == {"city": "�", "code": "😀"}
