"""The routes of llama.cpp and of vLLM that OpenAI's API has not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from moe_infinity import __version__
from moe_infinity.server.chat import TokenizeBody
from tests.server.conftest import TEMPLATE
from tests.server.serving import Serving

PROMPT = "w5 w6 w9"
ASK = {"prompt": PROMPT, "n_predict": 6, "temperature": 0}
# What llama.cpp's own page and clients send beside; none of it has an effect here.
USUAL = {
    "cache_prompt": True, "id_slot": -1, "samplers": ["top_k", "temperature"], "n_keep": 0,
    "typical_p": 1.0, "mirostat": 0, "dynatemp_range": 0, "dry_multiplier": 0.0, "top_k": 40,
    "repeat_last_n": 64, "seed": -1, "timings_per_token": False, "stop": [], "grammar": "",
    "logit_bias": [], "xtc_probability": 0,
}  # fmt: skip


def posted(server: Serving, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def openai_text(server: Serving, **more: Any) -> str:
    ask = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0} | more
    return str(posted(server, "/v1/completions", ask)["choices"][0]["text"])


@pytest.mark.parametrize("path", ["/completion", "/completions"])
@pytest.mark.parametrize("more", [{}, USUAL])
def test_a_completion_is_that_of_openai(server, path, more):
    answer = posted(server, path, ASK | more)
    assert answer["content"] == openai_text(server)
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 6)
    assert answer["tokens_evaluated"] == 3
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == 3
    assert timings["predicted_n"] == 6
    assert timings["predicted_per_second"] > 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_zero_tokens_read_the_prompt_and_keep_it(server, is_stream):
    """Editors do so before the user has written more."""
    ask = ASK | {"n_predict": 0, "stream": is_stream}
    answer = httpx.post(f"{server.url}/completion", json=ask, timeout=60)
    last = json.loads(answer.text.strip().rsplit("\n", 1)[-1].removeprefix("data: "))
    assert (last["content"], last["tokens_predicted"], last["stop_type"]) == ("", 0, "limit")
    assert last["tokens_evaluated"] == 3


def test_a_completion_whose_address_lacks_its_v1_is_one_of_openai(server):
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    answer = posted(server, "/completions", ask)
    assert answer["choices"][0]["text"] == openai_text(server)


def test_a_stream_ends_with_an_event_that_has_stop(server):
    body = ASK | {"stream": True, "return_progress": True, "return_tokens": True}
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event["content"] for event in events) == openai_text(server)
    tokens = [token for event in events for token in event["tokens"]]
    assert tokens == posted(server, "/completion", ASK | {"return_tokens": True})["tokens"]
    assert len(tokens) == 6
    shown = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert shown[-1]["processed"] == shown[-1]["total"] == 3


def test_a_stop_string_says_that_it_was_the_reason(server):
    word = openai_text(server).split()[2]
    answer = posted(server, "/completion", ASK | {"stop": [word], "n_predict": -1})
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", word)
    assert word not in answer["content"]


def test_probabilities_name_the_tokens(server):
    answer = posted(server, "/completion", ASK | {"n_probs": 2})
    entries = answer["completion_probabilities"]
    assert len(entries) == 6
    assert entries[0]["token"] in answer["content"]
    assert [best["id"] for best in entries[0]["top_logprobs"]][0] == entries[0]["id"]
    assert answer["tokens"] == []


def test_without_a_limit_the_context_is_filled(server):
    answer = posted(server, "/completion", {"prompt": [5] * 500, "n_predict": -1})
    assert answer["tokens_predicted"] == 12
    assert posted(server, "/completion", {"prompt": [5] * 500})["tokens_predicted"] == 12


def test_tokens_may_be_forbidden(server):
    first = posted(server, "/completion", ASK | {"return_tokens": True})["tokens"][0]
    other = ASK | {"return_tokens": True, "logit_bias": [[first, False]]}
    assert posted(server, "/completion", other)["tokens"][0] != first


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"n_predict": 3}, "prompt"),
        (ASK | {"mirostat": 2}, "mirostat"),
        (ASK | {"prompt": ["w5", "w6"]}, "prompt"),
        (ASK | {"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server, body, says):
    answer = httpx.post(f"{server.url}/completion", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(says)


def test_the_server_says_what_llama_cpps_clients_ask(server):
    props = httpx.get(f"{server.url}/props").json()
    assert props["chat_template"] == TEMPLATE
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["total_slots"] == len(httpx.get(f"{server.url}/slots").json()) == 4
    assert props["model_alias"] == "tiny"
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
    messages = [{"role": "user", "content": PROMPT}]
    assert posted(server, "/apply-template", {"messages": messages})["prompt"] == f"{PROMPT} w77"
    assert posted(server, "/detokenize", {"tokens": [5, 6]})["content"] == "w5 w6"


def test_a_content_is_tokenized_as_llama_cpp_does_it(server):
    assert posted(server, "/tokenize", {"content": ""})["tokens"] == []
    pieces = posted(server, "/tokenize", {"content": "w5 w6", "with_pieces": True})["tokens"]
    assert pieces == [{"id": 5, "piece": "w5"}, {"id": 6, "piece": "w6"}]


def test_tokens_around_a_text_are_left_out_of_a_content_unless_they_are_asked_for():
    for fields, expected in (
        ({"prompt": "w5"}, True),
        ({"content": "w5"}, False),
        ({"content": "w5", "add_special": True}, True),
        ({"prompt": "w5", "add_special_tokens": False}, False),
    ):
        assert TokenizeBody.model_validate(fields).has_special == expected


def test_the_server_says_what_vllms_clients_ask(server):
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
    for method in ("GET", "POST", "HEAD"):
        assert httpx.request(method, f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
