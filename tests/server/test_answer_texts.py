"""Answers that are not what they look like: calls that nobody can make, and very long runs."""

from __future__ import annotations

import time

import pytest
from tokenizers import AddedToken

from moe_infinity.server.messages import MOST_BEGUN, MessageFormat, MessageReader
from tests.server.test_messages import CALL, CASES, JSON, QWEN35, Plain, reader_of, shown


class Gemma(Plain):
    added_tokens_decoder = {0: AddedToken("<|channel>", special=True)}


IN_MARKS = "gpt_oss"  # all content of this kind is
FINAL = "<|channel|>final<|message|>"
QWEN = "<|im_start|>assistant\n"


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


@pytest.mark.parametrize(
    ("name", "prompt", "text"),
    [
        ("qwen3_5", QWEN, f"<tool_call>\n<function=f>\n<parameter=a>\n{30_000 * ' '}x"),
        ("qwen3_5", QWEN, f"<tool_call>\n<function=f>\n<parameter=a>\nx{60_000 * ' '}"),
        ("gemma4", "<|turn>model\n", '<|tool_call>call:f{a:"' + 30_000 * '\\"'),
        ("glm4_moe", "<|assistant|>", "<tool_call>f\n" + 4_000 * "<arg_key>"),
        ("glm4_moe", "<|assistant|>", "<tool_call>f\n<arg_key>a</arg_key>" + 60_000 * " "),
    ],
)
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_call_that_does_not_end_takes_time_that_grows_with_its_length(name, prompt, text, is_cut):
    began = time.perf_counter()
    reader = reader_of(name, prompt)
    reader.add(text, is_last=False)
    reader.add("", is_last=True, is_cut=is_cut)
    assert time.perf_counter() - began < 2, "each space or mark was looked at once for each other"


@pytest.mark.parametrize("end", ["", " ", "\n", " \n \n", "\n</parameter>\n"])
@pytest.mark.parametrize("value", ["Rome", "a > b", "", "a\n  b"])
def test_the_last_argument_may_lack_its_end(value, end):
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}{end}</function>\n</tool_call>"
    reader = reader_of("qwen3_5", QWEN)
    reader.add(text, is_last=True)
    assert shown(reader.message)[2] == [("f", {"a": value})]


KIMI_BEGINS = "<|im_assistant|>assistant<|im_middle|>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
KIMI += f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>"
DEEPSEEK = CASES["deepseek_v3, of version 3.1"][1]
FUNCTION = QWEN35[1].partition("\n")[2]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        (
            "gpt_oss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final "
            '<|constrain|>json<|message|>{"a": 1}',
            ('{"a": 1}', "hm", []),
        ),
        ("gpt_oss", "<|start|>assistant", "<|channel|>final json<|message|>1", ("1", "", [])),
        ("gpt_oss", "<|start|>assistant", "<|message|>Hi.", ("Hi.", "", [])),
        ("gpt_oss", "<|start|>assistant", "Hi.", ("Hi.", "", [])),
        ("qwen3_moe", QWEN, "a <think>b</think>", ("a <think>b</think>", "", [])),
        ("qwen3_moe", f"{QWEN}<think>\n\n</think>\n\n", "<think>", ("<think>", "", [])),
        ("glm4_moe", "<|assistant|>", "\n<think>a</think>`<think>`", ("`<think>`", "a", [])),
        (
            "deepseek_v3",
            "<｜Assistant｜>x<｜tool▁outputs▁begin｜>the <think> tag<｜tool▁outputs▁end｜>",
            "Hi.",
            ("Hi.", "", []),
        ),
        ("qwen3_5", f"{QWEN}<think>\n", f"hm\n{FUNCTION}", ("", "\nhm\n", [CALL])),
        (
            "qwen3_5",
            f"{QWEN}<think>\n",
            f"a <tool_call> b\n{FUNCTION}",
            ("", "\na <tool_call> b\n", [CALL]),
        ),
        ("kimi_k2", KIMI_BEGINS, f"<think>hm{KIMI}", ("", "hm", [CALL])),
        ("deepseek_v3", "<｜Assistant｜><think>", f"hm{DEEPSEEK}", ("", "hm", [CALL])),
    ],
)  # fmt: skip
def test_marks_where_models_leave_them_out_or_write_of_them(name, prompt, text, expected, size):
    reader = reader_of(name, prompt)
    for start in range(0, len(text), size):
        reader.add(text[start : start + size], is_last=start + size >= len(text))
    content, reasoning, calls = shown(reader.message)
    assert (content, reasoning.lstrip(), calls) == (expected[0], expected[1].lstrip(), expected[2])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (
            '{headers:{Content-Type:<|"|>a/b<|"|>},n:1}',
            {"headers": {"Content-Type": "a/b"}, "n": 1},
        ),
        (
            '{a b : [1,2,{$x: null}], "c d":"e:f, g:"}',
            {"a b": [1, 2, {"$x": None}], "c d": "e:f, g:"},
        ),
        ('{text:<|"|>{a:1, b:"x"}\n<|"|>}', {"text": '{a:1, b:"x"}\n'}),
        ('{<|"|>k<|"|>:<|"|>\0 0<|"|>}', {"k": "\ufffd 0"}),
        ("{}", {}),
    ],
)
def test_keys_of_gemma_are_whatever_they_are(written, arguments):
    reader = reader_of("gemma4", "<|turn>model\n")
    reader.add(f"<|tool_call>call:weather{written}<tool_call|>", is_last=True)
    assert shown(reader.message)[2] == [("weather", arguments)]


def test_a_call_without_its_first_mark_that_is_cut_is_no_text():
    reader = reader_of("qwen3_5", QWEN)
    reader.add("<function=weather>\n<parameter=city>\nRo", is_last=True, is_cut=True)
    assert shown(reader.message) == ("", "", [])


def test_a_thought_that_ends_behind_its_call_leaves_no_mark():
    reader = reader_of("qwen3_5", f"{QWEN}<think>\n")
    for piece in (f"hm\n{FUNCTION}", "\n", "</think>", "\n\n"):
        reader.add(piece, is_last=piece == "\n\n")
    assert reader.message.content.strip() == ""
    assert shown(reader.message)[2] == [CALL]


@pytest.mark.parametrize("is_thought", [False, True])
def test_of_a_long_message_that_a_prompt_begins_the_end_is_parsed(is_thought):
    prompt, _, _ = CASES["qwen3_moe"]
    begun = prompt + "<think>\n" * is_thought + "abc," * MOST_BEGUN
    reader = reader_of("qwen3_moe", begun)
    reader.add("so</think>Hi." if is_thought else "Hi.", is_last=True)
    assert reader.message.content == "Hi."
    assert reader.message.reasoning.endswith("so") is is_thought
