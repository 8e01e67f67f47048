"""The API as the `openai` client sees it, over a real socket."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from tests.server.driving import generated, words
from tests.server.serving import serving

pytestmark = pytest.mark.arithmetic

PROMPT = "w5 w6 w9 w100 w31"
PROMPT_IDS = [5, 6, 9, 100, 31]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def expected(moe) -> list[int]:
    return generated(moe, PROMPT_IDS)


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


# completions


def test_a_completion_is_what_generate_gives(client, expected):
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert answer.choices[0].text == words(expected)
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 12, 17)


def test_prompts_may_be_token_ids_and_many(client, moe, expected):
    by_ids = client.completions.create(prompt=PROMPT_IDS, **GREEDY)
    assert by_ids.choices[0].text == words(expected)
    many = client.completions.create(prompt=[PROMPT, "w77"], n=2, **GREEDY)
    texts = [words(expected)] * 2 + [words(generated(moe, [77]))] * 2
    assert [choice.text for choice in many.choices] == texts
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.usage.prompt_tokens == 6
    lists = client.completions.create(prompt=[PROMPT_IDS, [77]], **GREEDY)
    assert [choice.text for choice in lists.choices] == texts[::2]


def test_a_stream_adds_up_to_the_answer_and_ends_with_usage(client, expected):
    chunks = list(
        client.completions.create(
            prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == words(expected)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 10
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stop_string_ends_the_text_before_it_even_across_tokens(client, expected):
    text = words(expected)
    at = text.index(" ", 8)  # end of one word, beginning of the next
    stop = text[at - 1 : at + 3]
    for stops in (stop, ["never", stop]):
        answer = client.completions.create(prompt=PROMPT, stop=stops, **GREEDY)
        assert answer.choices[0].text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
    stream = client.completions.create(prompt=PROMPT, stop=stop, stream=True, **GREEDY)
    assert "".join(c.choices[0].text for c in stream) == text[: text.index(stop)]


def test_the_end_token_finishes_with_stop(client, moe):
    answer = client.completions.create(prompt=PROMPT, logit_bias={"1": 100}, **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1


def test_n_choices_are_sampled_apart_and_again_by_seed(client):
    ask = {"prompt": PROMPT, "model": "tiny", "max_tokens": 8, "n": 3}
    texts = [
        [choice.text for choice in client.completions.create(seed=seed, **ask).choices]
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_logprobs_of_a_completion(client, expected):
    answer = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == [f"w{token_id}" for token_id in expected]
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == max(top.values()) == logprob <= 0
    text = answer.choices[0].text
    for start, end in pairwise([*logprobs.text_offset, len(text)]):
        assert text[start:end].strip().startswith("w")


def test_penalties_and_bias_are_honoured(client):
    biased = client.completions.create(prompt=PROMPT, logit_bias={"50": 100}, **GREEDY)
    assert biased.choices[0].text == words([50] * 12)
    for penalty in ("frequency_penalty", "presence_penalty"):
        answer = client.completions.create(
            prompt=PROMPT, logit_bias={"50": 20}, **{penalty: 2.0}, **GREEDY
        )
        counts = Counter(answer.choices[0].text.split())
        assert 1 <= counts["w50"] < 12 or penalty == "presence_penalty"


def test_top_k_of_one_is_greedy_at_any_temperature(client, expected):
    answer = client.completions.create(
        prompt=PROMPT, **(GREEDY | {"temperature": 2}), extra_body={"top_k": 1}
    )
    assert answer.choices[0].text == words(expected)


def test_a_top_p_of_zero_is_greedy_at_any_temperature(client, expected):
    answer = client.completions.create(prompt=PROMPT, **(GREEDY | {"temperature": 2}), top_p=0)
    assert answer.choices[0].text == words(expected)


def test_a_temperature_next_to_zero_is_greedy(client, expected):
    for temperature in (1e-20, 1e-40, 5e-324):
        answer = client.completions.create(prompt=PROMPT, **(GREEDY | {"temperature": temperature}))
        assert answer.choices[0].text == words(expected)


def test_what_a_request_leaves_out_is_the_checkpoints(client, moe, monkeypatch):
    own = {"repetition_penalty": 1.5, "top_k": 1}
    for name, value in own.items():
        monkeypatch.setattr(moe.model.generation_config, name, value)
    answer = client.completions.create(prompt=PROMPT, model="tiny", max_tokens=12)
    expected = generated(moe, PROMPT_IDS, **own, do_sample=True)
    assert answer.choices[0].text == words([t for t in expected if t > 2])  # no special ones


# chat


def ask_chat(client, content: Any = PROMPT, **more: Any) -> Any:
    return client.chat.completions.create(
        messages=[{"role": "user", "content": content}], **(GREEDY | more)
    )


def test_a_chat_answer_continues_what_the_template_makes(client, moe):
    expected = words(generated(moe, [*PROMPT_IDS, 77]))
    answer = ask_chat(client)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected)
    assert answer.object == "chat.completion"
    parts = [{"type": "text", "text": PROMPT}]
    assert ask_chat(client, parts).choices[0].message.content == expected
    ask = {k: v for k, v in GREEDY.items() if k != "max_tokens"} | {"max_completion_tokens": 3}
    short = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **ask)
    assert short.usage.completion_tokens == 3


def test_a_chat_stream_begins_with_the_role_and_adds_up(client):
    chunks = list(ask_chat(client, stream=True, n=2, logprobs=True, top_logprobs=2))
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == ask_chat(client).choices[0].message.content
        assert mine[-1].finish_reason == "length"
        entries = [e for c in mine if c.logprobs for e in c.logprobs.content]
        assert len(entries) == 12
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        assert bytes(entries[0].bytes or []).decode() == entries[0].token


def test_tools_reach_the_template_unless_the_choice_is_none(client):
    tool = {"type": "function", "function": {"name": "w88", "parameters": {}}}
    with_tool = ask_chat(client, tools=[tool])
    assert with_tool.usage.prompt_tokens == 7
    assert ask_chat(client, tools=[tool], tool_choice="none").usage.prompt_tokens == 6


def test_a_model_without_a_template_says_so(moe, tiny_checkpoint):
    template = moe.tokenizer.chat_template
    moe.tokenizer.chat_template = None
    try:
        with (
            serving(moe) as server,
            server.client() as client,
            pytest.raises(openai.BadRequestError, match="no chat template"),
        ):
            ask_chat(client)
    finally:
        moe.tokenizer.chat_template = template


# models and helpers


def test_models_lists_the_one(client):
    assert [model.id for model in client.models.list().data] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.completions.create(prompt=PROMPT, model="gpt-5")


def test_tokenize_and_back(server):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        asked = http.post("/tokenize", json={"prompt": PROMPT}).json()
        assert (asked["tokens"], asked["count"]) == (PROMPT_IDS, 5)
        back = http.post("/detokenize", json={"tokens": PROMPT_IDS}).json()
        assert back["prompt"] == PROMPT
        messages = [{"role": "user", "content": PROMPT}]
        chat = http.post("/tokenize", json={"messages": messages}).json()
        assert chat["tokens"] == [*PROMPT_IDS, 77]


# refusals


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"w5": 1}}, "logit_bias"),
        ({"logit_bias": {"128": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [128]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["w5"] * 21}, "prompt"),
        ({"prompt": ["w5"] * 3, "n": 7}, "n"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "w5"}, "suffix"),
        ({"previous_response_id": "r"}, "previous_response_id"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(server, change, param):
    body = {"prompt": PROMPT, "max_tokens": 4} | change
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert "Value error" not in error["message"]
    assert PROMPT not in error["message"]


def test_too_long_a_context_says_how_long(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as refused:
        client.completions.create(prompt=[5] * 512, model="tiny", max_tokens=1)
    assert refused.value.code == "context_length_exceeded"


def test_an_unknown_route_and_method_get_an_error_object(server):
    for method, path in (("GET", "/v1/nothing"), ("DELETE", "/v1/models")):
        answer = httpx.request(method, server.url + path, timeout=60)
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["message"]


# what a stream looks like on the wire


def test_a_streamed_chunk_is_one_ascii_line_whatever_the_text(demo):
    """Characters of several bytes and tokens arrive whole."""
    text = "être «ça» – naïve 你好 🙂 \u2028 ő"
    ids = demo.tokenizer(text)["input_ids"]
    with serving(demo, served_name="demo") as server:
        # Whatever the model would say: force these tokens, one after another.
        forced = iter(ids)
        engine_forward = server.engine._passes._forward

        def force(step, inputs):
            logits_BV = engine_forward(step, inputs)
            logits_BV[:, next(forced)] = 1e9
            return logits_BV

        server.engine._passes._forward = force  # type: ignore[method-assign]
        ask = {"prompt": "x", "max_tokens": len(ids), "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ask, timeout=60) as answer:
            lines = [line for line in answer.read().split(b"\n") if line and line[:1] != b":"]
    assert all(line.isascii() and line.startswith(b"data: ") for line in lines)
    assert lines[-1] == b"data: [DONE]"
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_bodies_and_chunks_are_of_the_types_openai_publishes(client):
    """The client takes what it gets; here its own models check it."""
    ask: Any = {"stream_options": {"include_usage": True}, "stream": True}
    answers = [
        client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY),
        ask_chat(client, logprobs=True, top_logprobs=2),
        *client.completions.create(prompt=PROMPT, logprobs=2, **ask, **GREEDY),
        *ask_chat(client, logprobs=True, top_logprobs=2, **ask),
        *client.models.list().data,
    ]
    assert len(answers) > 20
    for answer in answers:
        raw = answer.to_dict()
        if raw["object"] == "text_completion" and raw["choices"]:  # no type of a stream's own:
            raw["choices"][0]["finish_reason"] = raw["choices"][0]["finish_reason"] or "stop"
        type(answer).model_validate(raw)
