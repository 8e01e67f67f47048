"""Answers of five kinds of models are taken apart into reasoning, content and calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message
from openai.types.chat import ChatCompletionChunk
from tokenizers import AddedToken

from moe_infinity import MoE
from moe_infinity.server import prompts
from moe_infinity.server.messages import MessageFormat, MessageReader, Parts
from moe_infinity.server.sequences import Running
from moe_infinity.server.shapes import object_of
from tests.server.conftest import TEMPLATE
from tests.server.serving import Serving, serving

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
CALL = ("weather", {"city": "Rome", "days": 3})
JSON = json.dumps(CALL[1])
# By model type: the end of a prompt, an answer as such a model writes it, and its parts: content,
# reasoning, calls.
QWEN = '<tool_call>\n{"name": "weather", "arguments": ' + JSON + "}\n</tool_call>"
CASES: dict[str, tuple[str, str, tuple[str, str, list[Any]]]] = {
    "qwen3_moe": (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        f"<think>\nhm\n</think>\n\nLet me see.\n{QWEN}\n{QWEN}",
        ("\n\nLet me see.", "\nhm\n", [CALL, CALL]),
    ),
    "qwen3_moe, thinking begun": (
        "<|im_start|>assistant\n<think>\n",
        "hm</think>No call.",
        ("No call.", "hm", []),
    ),
    "gpt_oss": (
        "<|start|>user<|message|>hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{JSON}",
        ("", "hm", [CALL]),
    ),
    "gpt_oss, recipient first": (
        "<|start|>assistant",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather"
        f"<|channel|>commentary json<|message|>{JSON}<|call|>",
        ("I look.", "", [CALL]),
    ),
    "gpt_oss, no call": (
        "<|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        ("Hi.", "hm", []),
    ),
    "deepseek_v3": (
        "<｜User｜>hi<｜Assistant｜>",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"weather\n```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("I look.", "", [CALL, CALL]),
    ),
    "deepseek_v3, of version 3.1": (
        "<｜User｜>hi<｜Assistant｜></think>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "", [CALL]),
    ),
    "glm4_moe": (
        "<|user|>\nhi<|assistant|>",
        "<think>hm</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>",
        ("\nI look.", "hm", [CALL]),
    ),
    "mixtral": (
        "[INST] hi [/INST]",
        f' [TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}]',
        ("", "", [CALL]),
    ),
}


QWEN35 = (
    "<|im_start|>assistant\n",
    "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    ("I look.", "", [CALL]),
)
MARKS = re.findall(r"<[|｜/]?[a-z▁_]+[|｜]?>|\[TOOL_CALLS\]", str([*CASES.values(), QWEN35]))


class Plain:
    """Stands for tokenizer and model of a kind: a token is a character."""

    added_tokens_decoder = {at: AddedToken(mark, special=True) for at, mark in enumerate(MARKS)}

    def __init__(self, model_type: str) -> None:
        self.config = self
        self.model_type = model_type.split(",")[0]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def reader_of(name: str, prompt: str, max_calls: int | None = None) -> MessageReader:
    plain = Plain(name)
    ids = list(map(ord, prompt))
    return MessageFormat(plain, plain).reader(ids, [WEATHER], max_calls=max_calls)


def shown(parts: Parts) -> tuple[str, str, list[Any]]:
    return (
        parts.content,
        parts.reasoning,
        [(call.name, json.loads(call.arguments)) for call in parts.calls],
    )


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_answers_are_taken_apart_however_they_are_cut(name, size):
    prompt, text, expected = CASES[name]
    reader = reader_of(name, prompt)
    added = []
    for start in range(0, len(text), size):
        added.append(reader.add(text[start : start + size], is_last=start + size >= len(text)))
    assert shown(reader.message) == expected
    assert "".join(each.content for each in added) == expected[0]
    assert "".join(each.reasoning for each in added) == expected[1]
    assert len({call.id for call in reader.message.calls}) == len(expected[2])


def pieces_of(text: str) -> list[str]:
    """A mark is one token, all other tokens are letters."""
    pieces = re.findall("|".join([*map(re.escape, MARKS), "."]), text, re.DOTALL)
    assert "".join(pieces) == text
    return pieces


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": broken\n</tool_call> and <tool_call>\nmore',
        "<tool_call>\n[1, 2]\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
    ],
)
def test_what_is_no_call_is_content_without_marks(text, is_whole):
    reader = reader_of("qwen3_moe", "<|im_start|>assistant\n")
    for piece in [text] if is_whole else pieces_of(text):
        reader.add(piece, is_last=False)
    reader.add("", is_last=True)
    assert shown(reader.message) == (re.sub("</?tool_call>", "", text), "", [])


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("name", [*CASES, "qwen3_5_moe"])
def test_a_call_that_is_not_complete_is_neither_text_nor_a_call(name, is_cut):
    """Wherever `max_tokens`, a stop string or the model ends it. What was complete before stays."""
    prompt, text, (content, reasoning, calls) = CASES.get(name, QWEN35)
    pieces = pieces_of(text)
    for end in range(len(pieces)):
        reader = reader_of(name, prompt)
        reader.add("".join(pieces[:end]), is_last=False)
        reader.add("", is_last=True, is_cut=is_cut)
        got = shown(reader.message)
        assert content.startswith(got[0].rstrip()), "".join(pieces[:end])
        assert reasoning.startswith(got[1])
        assert got[2] == calls[: len(got[2])]


@pytest.mark.parametrize(
    ("written", "value"),
    [("Rome", "Rome"), ("Rome\n", "Rome\n"), ("\nRome\n", "Rome"), ("\nRome\n\n", "Rome\n")],
)
def test_a_value_of_minimax_keeps_its_last_line_end_unless_it_has_lines_of_its_own(written, value):
    reader = reader_of("minimax_m2", "]~b]ai\n")
    parameter = f'<parameter name="city">{written}</parameter>'
    call = f'<invoke name="weather">\n{parameter}\n</invoke>'
    reader.add(f"<minimax:tool_call>\n{call}\n</minimax:tool_call>", is_last=True)
    assert shown(reader.message) == ("", "", [("weather", {"city": value})])


def test_calls_may_be_limited_to_one():
    prompt, text, expected = CASES["qwen3_moe"]
    reader = reader_of("qwen3_moe", prompt, max_calls=1)
    reader.add(text, is_last=True)
    assert shown(reader.message) == (*expected[:2], [CALL])


def test_what_is_between_two_calls_is_no_text_if_the_answer_is_cut_there():
    prompt, text, expected = CASES["qwen3_moe"]
    reader = reader_of("qwen3_moe", prompt)
    reader.add(text[: text.index("</tool_call>") + 12], is_last=False)
    reader.add("\n", is_last=True, is_cut=True)
    content, _, calls = shown(reader.message)
    assert (content, len(calls)) == (expected[0], 1)


def test_of_an_unknown_kind_all_is_content():
    reader = reader_of("unknown", "hi")
    reader.add(QWEN, is_last=True)
    assert shown(reader.message) == (QWEN, "", [])


# through the server


@pytest.fixture
def scripted(moe: MoE, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """A server whose model writes an answer of Qwen3, seven letters a token."""
    prompt, text, _ = CASES["qwen3_moe"]
    pieces = [text[start : start + 7] for start in range(0, len(text), 7)]

    class Letters:
        def add(self, token_id: int) -> str:
            return pieces[self.at.pop()]

        held = ""

        def __init__(self, *args: Any, **settings: Any) -> None:
            self.at = list(range(len(pieces)))[::-1]

    add = Running.add

    def scripted_add(self: Running, logits_V: Any) -> bool:
        letters: Any = self._detokenizer
        self._end_ids = frozenset() if letters.at else frozenset(range(len(logits_V)))
        return add(self, logits_V)

    class Prompt(MessageFormat):
        def __init__(self, *args: Any) -> None:
            plain = Plain("qwen3_moe")
            plain.decode = lambda ids: prompt  # type: ignore[method-assign]
            super().__init__(plain, plain)

    monkeypatch.setattr(moe.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(prompts, "MessageFormat", Prompt)
    monkeypatch.setattr("moe_infinity.server.sequences.Detokenizer", Letters)
    monkeypatch.setattr(Running, "add", scripted_add)
    with serving(moe, max_batch=2) as server:
        yield server


ASKED: list[Any] = [{"role": "user", "content": "w5"}]
ANTHROPIC: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 200,
    "tools": [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}],
}


def test_a_client_of_openai_gets_calls_and_sends_their_results(scripted):
    _, _, (content, reasoning, calls) = CASES["qwen3_moe"]
    client = scripted.client()
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, tools=[WEATHER], max_tokens=200
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    message = choice.message
    assert message.content == content
    assert message.model_extra == {"reasoning_content": reasoning}
    found = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]
    assert found == calls
    results = [{"role": "tool", "tool_call_id": c.id, "content": "w9"} for c in message.tool_calls]
    again = [*ASKED, message.model_dump(), *results]
    answer = client.chat.completions.create(
        model="tiny", messages=again, tools=[WEATHER], max_tokens=200, parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1


def test_a_stream_has_calls_as_deltas(scripted):
    _, _, (content, reasoning, calls) = CASES["qwen3_moe"]
    chunks: list[ChatCompletionChunk] = list(
        scripted.client().chat.completions.create(
            model="tiny", messages=ASKED, tools=[WEATHER], max_tokens=200, stream=True
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == content
    extras = [delta.model_extra or {} for delta in deltas]
    assert "".join(extra.get("reasoning_content", "") for extra in extras) == reasoning
    found = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in found] == [0, 1]
    functions = [call.function for call in found if call.function is not None]
    assert [(f.name, json.loads(f.arguments or "")) for f in functions] == calls
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_responses_have_calls_as_items(scripted):
    _, _, (content, _, calls) = CASES["qwen3_moe"]
    client = scripted.client()
    tool = {"type": "function", **WEATHER["function"]}
    answer = client.responses.create(model="tiny", input="w5", tools=[tool], max_output_tokens=200)
    assert answer.output_text == content
    items = answer.output[1:]
    assert [(item.name, json.loads(item.arguments)) for item in items] == calls
    result = {"type": "function_call_output", "call_id": items[0].call_id, "output": "w9"}
    dumped = [item.model_dump() for item in answer.output]
    again = [{"role": "user", "content": "w5"}, *dumped, result]
    with client.responses.stream(
        model="tiny", input=again, tools=[tool], max_output_tokens=200
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    assert [(item.name, json.loads(item.arguments)) for item in final.output[1:]] == calls


@pytest.fixture
def anthropic_client(scripted) -> Iterator[Anthropic]:
    with scripted.anthropic() as client:
        yield client


def test_messages_of_anthropic_have_calls_as_blocks(anthropic_client):
    _, _, (content, reasoning, calls) = CASES["qwen3_moe"]
    asked = ANTHROPIC | {"messages": ASKED}
    answer = anthropic_client.messages.create(**asked)
    Message.model_validate(answer.to_dict())
    thinking, text, *uses = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", reasoning)
    assert thinking.signature  # else some clients leave the thought out
    assert (text.type, text.text) == ("text", content)
    assert [(use.name, use.input) for use in uses] == calls
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": "w9", "is_error": False}
        for use in uses
    ]
    said = {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
    asked["messages"] = [*ASKED, said, {"role": "user", "content": results}]
    asked["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    again = anthropic_client.messages.create(**asked)
    assert [block.type for block in again.content] == ["thinking", "text", "tool_use"]


def test_a_stream_of_anthropic_has_a_block_for_each_part(anthropic_client):
    asked = ANTHROPIC | {"messages": ASKED}
    whole = anthropic_client.messages.create(**asked).to_dict()
    events = list(anthropic_client.messages.create(**asked, stream=True))
    begun = [event for event in events if event.type == "content_block_start"]
    kinds = ["thinking", "text", "tool_use", "tool_use"]
    assert [event.content_block.type for event in begun] == kinds
    assert [event.index for event in begun] == [0, 1, 2, 3]
    ended = [event.index for event in events if event.type == "content_block_stop"]
    assert ended == [0, 1, 2, 3]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    (signed,) = [delta.signature for delta in deltas if delta.type == "signature_delta"]
    assert signed == whole["content"][0]["signature"] != ""
    for event in events:
        type(event).model_validate(event.to_dict())
    with anthropic_client.messages.stream(**asked) as stream:
        final = stream.get_final_message().to_dict()
    for one in (whole, final):
        del one["id"]
        for use in one["content"][2:]:
            del use["id"]
    assert final == whole | {"stop_details": None}  # which the helper adds


@pytest.mark.parametrize("arguments", ['"Rome"', "[1, 2]"])
def test_arguments_that_are_no_object_come_as_one_to_anthropic(arguments):
    assert object_of(arguments) == {"arguments": json.loads(arguments)}


def test_a_conversation_goes_on_in_which_a_model_wrote_bad_json(server):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    turns = [*ASKED, {"role": "assistant", "tool_calls": [call]}, *ASKED]
    body = {"messages": turns, "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
