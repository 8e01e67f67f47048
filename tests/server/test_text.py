"""An answer's text ends before its stop string, and its tokens end with its text."""

from __future__ import annotations

from itertools import product
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from moe_infinity.server.generation import Settings
from moe_infinity.server.sampling import Sampling
from moe_infinity.server.sequences import Output, PartlySeen, Request, Running, StopStrings
from tests.server.serving import serving
from tests.small_tokenizers import KINDS


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 40), max_size=10),
)
def test_text_is_cut_at_the_first_stop_however_it_comes(text, stops, cuts):
    found = [text.index(stop) for stop in stops if stop in text]
    stopping = StopStrings(stops)
    shown = ""
    start = 0
    for end in [*sorted(cuts), len(text)]:
        shown += stopping.add(text[start:end])
        start = max(start, end)
        if stopping.stop is not None:
            break
    else:
        shown += stopping.finish()
    if not found:
        assert stopping.stop is None
        assert shown == text
    else:  # where a stop was complete first: another may begin before it but end after it
        assert stopping.stop in stops
        assert text[len(shown) :].startswith(stopping.stop)
        assert text.startswith(shown)


def answer_of(kind: str, tokens: list[str], **wishes: Any) -> list[Output]:
    """What a request is delivered whose model writes these tokens."""
    tokenizer = KINDS[kind]()
    outputs: list[Output] = []
    wish = Sampling(num_logprobs=0)
    asked: dict[str, Any] = {"prompt_ids": [4], "max_new_tokens": 99, "sampling": wish} | wishes
    request = Request(**asked)
    greedy = Settings(
        processors=LogitsProcessorList(),
        takes_likeliest=True,
        end_ids=frozenset([2]),
        stops=request.stop,
        max_time=None,
    )
    running = Running(request, outputs.append, tokenizer=tokenizer, settings=greedy, deadline_s=9)
    for token_id in tokenizer.convert_tokens_to_ids(tokens):
        logits_V = torch.zeros(len(tokenizer))
        logits_V[token_id] = 9
        if running.add(logits_V):
            running.end()
            return outputs
    raise AssertionError("the answer does not end")


def text_and_tokens(outputs: list[Output]) -> tuple[str, list[int]]:
    tokens = [token for output in outputs for token in output.tokens]
    return "".join(output.text for output in outputs), [token.offset for token in tokens]


LLAMA = "SentencePiece BPE with bytes, Llama"


@pytest.mark.parametrize("stop", ["aab", "abab", "aaaa", "abaabab"])
def test_the_beginning_of_a_stop_that_a_text_ends_with_is_the_longest(stop):
    for letters in product("ab", repeat=9):
        text = "".join(letters)
        seen = PartlySeen(stop)
        for end in range(1, len(text) + 1):
            if stop in text[:end]:
                break
            fitting = [num for num in range(len(stop)) if text[:end].endswith(stop[:num])]
            assert seen.add(text[end - 1]) == max(fitting)


@pytest.mark.parametrize("stop", [" b", "b", " b\n", "b\n\n", "\n", "<0x0A>", "</s>", "<s>"])
@pytest.mark.parametrize("others", [(), ("bcd",), ("zz",)])
def test_tokens_end_with_the_text_before_a_stop_string(stop, others):
    tokens = ["▁a", "▁b", "<0x0A>", "<0x0A>", "▁a", "<s>", "▁b", "</s>"]
    outputs = answer_of(LLAMA, tokens, stop=(stop, *others))
    whole = "a b\n\n a b"
    text, offsets = text_and_tokens(outputs)
    named = {"<s>": whole[:-2]}
    assert text == named.get(stop, whole.partition(stop)[0])
    starts = [0, 1, 3, 4, 5, 7, 7]
    ends = [*starts[1:], len(whole)]
    if stop in whole:
        assert offsets == [
            start for start, end in zip(starts, ends, strict=True) if end <= len(text)
        ]
    elif stop == "<s>":
        assert offsets == starts[:5]
    else:
        assert offsets == starts
    assert outputs[-1].stop == (stop if stop in (*named, "\n") or stop in whole else None)
    for num in range(len(outputs)):  # and no chunk names a token before its text
        shown, offsets = text_and_tokens(outputs[: num + 1])
        assert all(offset <= len(shown) for offset in offsets)


def test_a_stop_string_is_seen_when_its_last_token_comes():
    """Here the newline is a byte, which is held for the next one."""
    outputs = answer_of(LLAMA, ["▁a", "<0x0A>", "▁b"], stop=("\n",))
    assert outputs[-1].num_generated == 2
    assert text_and_tokens(outputs) == ("a", [0])


def test_a_stop_string_may_begin_with_another():
    for stops in (("b", "bc"), ("bc", "b")):
        outputs = answer_of("no decoder", ["a", "b", "c d", "</s>"], stop=stops)
        assert outputs[-1].stop == "b"
    outputs = answer_of("Metaspace, never", ["▁a", "▁b", "▁."], stop=("b .", " b "))
    assert (text_and_tokens(outputs)[0], outputs[-1].stop) == (" a", " b ")


def test_a_text_that_ends_within_a_character_shows_it_unfinished():
    outputs = answer_of(LLAMA, ["▁a", "<0xF0>", "<0x9F>"], max_new_tokens=3, stop=("🙂",))
    assert text_and_tokens(outputs) == ("a��", [0, 1, 1])
    outputs = answer_of(LLAMA, ["▁a", "<0xF0>", "<0x9F>", "▁b", "</s>"], stop=("🙂",))
    assert text_and_tokens(outputs)[0] == "a�� b"


def test_a_chat_answer_shows_no_special_token_but_those_of_its_format(demo):
    """The model of this kind has a format, whose marks are read; the padding token is none."""
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    with serving(demo) as server:
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=ask | {"logit_bias": {"1": 100}}
        ).json()
        assert demo.tokenizer.decode([1]) == "<|pad|>"
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["usage"]["completion_tokens"] == 3
