"""Ollama's API: its fields, its lines of JSON and its errors."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from moe_infinity.server.llama_options import ollama_options_of
from moe_infinity.server.ollama_body import OllamaChatBody, OllamaGenerateBody
from moe_infinity.server.refusals import BadRequest
from tests.server.conftest import TEMPLATE
from tests.server.serving import Serving, serving
from tests.server.test_messages import ASKED, CASES, WEATHER, scripted

__all__ = ["scripted"]  # a server whose model writes what a test says

PROMPT = "w5 w6 w9"
GREEDY = {"temperature": 0, "num_predict": 5}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": PROMPT}],
    "options": GREEDY,
}
TIMES = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
COUNTS = {"prompt_eval_count", "eval_count"}


def posted(server: Serving, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/api/{path}", json=body, timeout=60)


def lines_of(server: Serving, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = posted(server, path, body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def text_of_chat(server: Serving) -> str:
    ask: Any = {"model": "tiny", "messages": CHAT["messages"], "temperature": 0, "max_tokens": 5}
    with server.client() as client:
        return str(client.chat.completions.create(**ask).choices[0].message.content)


def test_a_chat_answer_is_that_of_the_other_apis(server):
    answer = posted(server, "chat", CHAT | {"stream": False}).json()
    expected = {"role": "assistant", "content": text_of_chat(server)}
    assert answer["message"] == expected
    assert (answer["done"], answer["done_reason"], answer["model"]) == (True, "length", "tiny")
    assert answer.keys() > TIMES | COUNTS | {"created_at"}
    assert all(isinstance(answer[name], int) for name in TIMES | COUNTS)
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (4, 5)


def test_a_chat_is_streamed_unless_it_says_not(server):
    lines = lines_of(server, "chat", CHAT)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    text = "".join(line["message"]["content"] for line in lines)
    assert text == text_of_chat(server)
    assert lines[-1].keys() > TIMES | COUNTS
    assert len(lines) > 4


def test_a_prompt_is_a_chat_unless_it_is_raw(server):
    body = {"model": "tiny", "prompt": PROMPT, "options": GREEDY, "stream": False}
    answer = posted(server, "generate", body).json()
    assert answer["response"] == text_of_chat(server)
    with server.client() as client:
        ask: Any = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 5}
        raw = client.completions.create(**ask).choices[0].text
    answer = posted(server, "generate", body | {"raw": True}).json()
    assert answer["response"] == raw
    lines = lines_of(server, "generate", body | {"raw": True, "stream": True})
    assert "".join(line["response"] for line in lines) == raw
    assert lines[-1]["eval_count"] == 5


@pytest.mark.parametrize("limit", [-1, -2, 0, None])
def test_without_a_limit_an_answer_may_fill_the_context(moe, limit):
    options = {"temperature": 0} | ({} if limit is None else {"num_predict": limit})
    body = {"prompt": PROMPT, "raw": True, "options": options, "stream": False}
    with serving(moe, max_context=40, max_new_tokens=8) as server:
        answer = posted(server, "generate", body).json()
    assert answer["prompt_eval_count"] + answer["eval_count"] == 40


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {}}])
def test_an_answer_may_have_to_be_json(demo, form):
    with serving(demo) as server:
        body = {"prompt": "hi", "format": form, "options": {"num_predict": 200}, "stream": False}
        for raw in (False, True):
            answer = posted(server, "generate", body | {"raw": raw}).json()
            if answer["done_reason"] == "stop":
                assert isinstance(json.loads(answer["response"]), dict)


def test_calls_and_reasoning_are_parts_of_the_message(scripted):
    _, _, (content, reasoning, calls) = CASES["qwen3_moe"]
    body = {"messages": ASKED, "tools": [WEATHER], "options": {"num_predict": 200}}
    whole = posted(scripted, "chat", body | {"stream": False}).json()["message"]
    assert (whole["content"], whole["thinking"]) == (content, reasoning)
    shown = [
        (call["function"]["name"], call["function"]["arguments"]) for call in whole["tool_calls"]
    ]
    assert shown == calls
    places = list(range(len(calls)))  # clients join the pieces of calls in one place
    assert [call["function"]["index"] for call in whole["tool_calls"]] == places
    lines = lines_of(scripted, "chat", body)
    pieces = [line["message"] for line in lines]
    assert "".join(piece["content"] for piece in pieces) == content
    assert "".join(piece.get("thinking", "") for piece in pieces) == reasoning
    streamed = [call for piece in pieces for call in piece.get("tool_calls", [])]
    assert [call["function"]["index"] for call in streamed] == places
    back = [*ASKED, whole, {"role": "tool", "tool_name": "weather", "content": "w7"}]
    assert posted(scripted, "chat", body | {"messages": back, "stream": False}).status_code == 200


def test_results_belong_to_the_calls_before_them():
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    result = {"role": "tool", "content": "1"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        *(result, result),
    ]
    body = OllamaChatBody.model_validate({"messages": messages}).for_chat()
    calls = body.messages[1].tool_calls or []
    assert [each.id for each in calls] == [each.tool_call_id for each in body.messages[2:]]


def test_a_result_belongs_to_the_call_of_its_name():
    """Clients answer calls in the order in which their tools end."""
    calls: list[Any] = [{"function": {"name": n, "arguments": {}}} for n in ("f", "g", "f")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("g", "f", "f")]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = [{"role": "user", "content": "hi"}, turn, *results]
    body = OllamaChatBody.model_validate({"messages": messages}).for_chat()
    ids = [each.id for each in body.messages[1].tool_calls or []]
    assert [each.tool_call_id for each in body.messages[2:]] == [ids[1], ids[0], ids[2]]


def test_log_probabilities_are_those_of_the_tokens(server):
    body = CHAT | {"stream": False, "logprobs": True, "top_logprobs": 2}
    answer = posted(server, "chat", body).json()
    assert len(answer["logprobs"]) == 5
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2


def test_who_asks_for_nothing_loads_the_model_or_unloads_it(server):
    for path, body in (
        ("generate", {"model": "tiny"}),
        ("chat", {"model": "tiny", "messages": []}),
    ):
        answer = posted(server, path, body).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        for keep, reason in ((0, "unload"), ("0s", "unload"), ("5m", "load"), (-1, "load")):
            answer = posted(server, path, body | {"keep_alive": keep}).json()
            assert (answer["done"], answer["done_reason"]) == (True, reason)


@pytest.mark.parametrize(
    ("keep_alive", "expected"),
    [
        *((none, True) for none in (0, 0.0, "0", "0s", "-0m", "0h0m0s", "0.0", "0.00ms", "00")),
        *(
            (some, False)
            for some in (None, -1, 60, "-1", "5m", "0.5s", "0h5m", "10", "", "s", "0x")
        ),
    ],
)
def test_only_no_time_at_all_unloads_the_model(keep_alive, expected):
    assert OllamaGenerateBody(keep_alive=keep_alive).wants_unload == expected


@pytest.mark.parametrize("zeros", ["0" * 30, "0" * 1_000_000])
def test_a_time_is_read_once_however_many_zeros_it_has(zeros):
    """It was tried anew with each way to divide the zeros among numbers."""
    began_s = time.thread_time()
    assert not OllamaGenerateBody(keep_alive=zeros + "x").wants_unload
    assert time.thread_time() - began_s < 1


def test_the_one_model_is_listed_and_described(server):
    for path in ("tags", "ps"):
        (model,) = httpx.get(f"{server.url}/api/{path}").json()["models"]
        assert model["name"] == model["model"] == "tiny:latest"
        assert model["capabilities"] == ["completion", "tools"]
        assert model["details"]["context_length"] == 512
        assert model["size"] > 0
        assert len(model["digest"]) == 64  # clients show the first twelve
        assert model["details"]["family"] == server.moe.model.config.model_type
    for name in ("model", "name"):
        shown = posted(server, "show", {name: "tiny"}).json()
        assert shown["template"] == TEMPLATE
        assert shown["capabilities"] == [
            "completion",
            "tools",
        ]  # with embedding, clients do not chat
        kind = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{kind}.context_length"] == 512
    assert httpx.get(f"{server.url}/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize("name", ["model", "name"])
def test_whoever_pulls_the_model_is_told_that_it_is_here(server, name):
    """As clients do before the first use."""
    streamed = posted(server, "pull", {name: "tiny"})
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    whole = posted(server, "pull", {name: "tiny", "stream": False})
    assert streamed.json() == whole.json() == {"status": "success"}


def test_vectors_are_those_of_embeddings(server):
    with server.client() as client:
        expected = client.embeddings.create(model="tiny", input="w5", encoding_format="float")
    vector = expected.data[0].embedding
    many = posted(server, "embed", {"model": "tiny", "input": ["w5", "w6"]}).json()
    assert many["embeddings"][0] == pytest.approx(vector, abs=1e-4)
    assert (len(many["embeddings"]), many["prompt_eval_count"]) == (2, 2)
    one = posted(server, "embeddings", {"model": "tiny", "prompt": "w5"}).json()
    assert one["embedding"] == pytest.approx(vector, abs=1e-4)


@pytest.mark.parametrize("texts", [{}, {"input": ""}, {"input": []}, {"prompt": ""}])
def test_who_asks_for_no_vectors_gets_none(server, texts):
    """So clients load a model before they need it."""
    assert posted(server, "embed", {"model": "tiny"} | texts).json()["embeddings"] == []
    assert posted(server, "embeddings", {"model": "tiny"} | texts).json() == {"embedding": []}


def test_the_most_thinking_is_taken(server):
    assert posted(server, "chat", CHAT | {"think": "max", "stream": False}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat", CHAT | {"model": "llama3"}, 404, "llama3"),
        ("show", {"model": "llama3"}, 404, "llama3"),
        ("chat", {"messages": [{"role": "x"}]}, 400, "messages"),
        ("chat", CHAT | {"options": {"temperature": -1}}, 400, "temperature"),
        ("chat", CHAT | {"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, 400, "text only"),
        ("generate", {"prompt": "w5", "suffix": "w6"}, 400, "suffix"),
        ("generate", {"prompt": "w5", "context": [5]}, 400, "context"),
        ("generate", {"prompt": "w5 " * 600, "raw": True}, 400, "prompt"),
        ("generate", {"prompt": "w5", "raw": True, "system": "w6"}, 400, "system"),
        ("embed", {"model": "llama3"}, 404, "llama3"),
        ("chat", CHAT | {"think": "loud"}, 400, "think"),
        ("pull", {"model": "llama3"}, 404, "llama3"),
        ("tags", {}, 405, "Method Not Allowed"),
    ],
)
def test_errors_are_text(server, path, body, status, says):
    answer = posted(server, path, body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert says in answer.json()["error"]


def test_an_error_in_a_stream_is_a_line(server, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(server.engine._passes, "prefill", fail)
    assert lines_of(server, "chat", CHAT)[-1] == {"error": "generation failed: RuntimeError"}


def test_options_mean_what_they_mean_in_ollama():
    unlimited = {"num_predict": -1, "seed": 2**32 - 1, "top_k": -5, "num_ctx": 99, "num_gpu": 1}
    assert ollama_options_of(unlimited | {"tfs_z": 1.0, "mirostat": 0}) == {"top_k": 0}
    given = {"num_predict": 3, "repeat_penalty": 1.1, "stop": ["a"], "typical_p": 0.5, "seed": -1}
    assert ollama_options_of(given) == given
    body = OllamaGenerateBody(prompt="w5", raw=True, options=given | {"temperature": 0})
    asked = body.for_completion()
    assert (asked.max_tokens, asked.repetition_penalty, asked.seed) == (3, 1.1, None)
    for name in ("xtc_probability", "banned_strings"):
        with pytest.raises(BadRequest, match=f"options.{name}"):
            ollama_options_of({name: 0.5})
