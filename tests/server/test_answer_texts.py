"""Answers that are not what they look like: calls that nobody can make, and very long runs."""

from __future__ import annotations

import time

import pytest
from tokenizers import AddedToken

from moe_infinity.server.messages import MOST_BEGUN, MessageFormat, MessageReader
from tests.server.test_messages import CALL, CASES, QWEN35, Plain, reader_of, shown


class Gemma(Plain):
    added_tokens_decoder = {0: AddedToken("<|channel>", special=True)}


IN_MARKS = "gpt_oss"  # all content of this kind is
FINAL = "<|channel|>final<|message|>"


def text_reader_of(name: str, prompt: str) -> MessageReader:
    plain = Plain(name)
    ids = list(map(ord, prompt))
    return MessageFormat(plain, plain).reader(ids, None, max_calls=None, has_calls=False)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(IN_MARKS)])
def test_without_tools_a_call_is_content(name):
    """Some clients describe tools in their own words, and read calls themselves."""
    prompt, text, (_, reasoning, _) = CASES[name]
    reader = text_reader_of(name, prompt)
    reader.add(text, is_last=True)
    content, found, calls = shown(reader.message)
    assert (found, calls) == (reasoning, [])
    assert text.endswith(content)
    assert len(content) >= len(text.partition("</think>")[2] or text)


def test_a_call_is_one_where_all_content_is_in_marks():
    prompt, text, _ = CASES[IN_MARKS]
    reader = text_reader_of(IN_MARKS, prompt)
    reader.add(text, is_last=True)
    assert shown(reader.message) == ("", "hm", [CALL])


def test_marks_of_thoughts_are_no_content_without_tools():
    gemma = Gemma("gemma4")
    for begun in ("<|channel>", "<|channel>thou"):
        reader = MessageFormat(gemma, gemma).reader(
            list(map(ord, "<|turn>model\n")), None, max_calls=None, has_calls=False
        )
        reader.add(begun, is_last=True, is_cut=True)
        assert reader.message.content == ""


@pytest.mark.parametrize("name", [*CASES, "qwen3_5"])
def test_a_long_run_of_spaces_takes_time_that_grows_with_its_length(name):
    text = "a" + 30_000 * " " + "x"
    began = time.perf_counter()
    reader = reader_of(name, CASES.get(name, QWEN35)[0])
    reader.add(FINAL * name.startswith(IN_MARKS) + text, is_last=False)
    reader.add("", is_last=True)
    assert (reader.message.reasoning + reader.message.content).endswith(text)
    assert time.perf_counter() - began < 2, "each space was looked at once for each before it"


@pytest.mark.parametrize("is_thought", [False, True])
def test_of_a_long_message_that_a_prompt_begins_the_end_is_parsed(is_thought):
    prompt, _, _ = CASES["qwen3_moe"]
    begun = prompt + "<think>\n" * is_thought + "abc," * MOST_BEGUN
    reader = reader_of("qwen3_moe", begun)
    reader.add("so</think>Hi." if is_thought else "Hi.", is_last=True)
    assert reader.message.content == "Hi."
    assert reader.message.reasoning.endswith("so") is is_thought
