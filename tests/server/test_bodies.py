"""Which bodies are taken, which are documented, and how a refusal is worded."""

from __future__ import annotations

import gzip
import re

import httpx
import pytest

from moe_infinity.server import limits
from moe_infinity.server.bodies import BodyRoom, read_json
from moe_infinity.server.chat import ChatBody
from moe_infinity.server.protocol import CompletionBody
from moe_infinity.server.refusals import BadRequest, Refused
from tests.server.serving import serving

SAID = {"role": "user", "content": "w5"}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("v1/completions", {"prompt": [-1]}, "prompt.0: Input should be greater than or equal"),
        ("v1/completions", {"prompt": [[5], [6, -1]]}, "prompt.1.1: Input should be greater"),
        ("v1/completions", {"prompt": ["w5", {}]}, "prompt.1: Input should be a valid integer"),
        ("v1/completions", {"prompt": ["w5"] * 21}, "prompt: 21 sequences, at most 20 may wait"),
        ("v1/chat/completions", {"top_logprobs": 2}, "top_logprobs: this needs logprobs=true"),
        (
            "v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages: this model reads text only",
        ),
        ("tokenize", {"prompt": "w5", "messages": [SAID]}, "prompt: give either this or messages"),
        ("tokenize", {}, "prompt: give either this or messages"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_where(server, path, body, said):
    body = ({"messages": [SAID]} if "chat" in path else {}) | body
    error = httpx.post(f"{server.url}/{path}", json=body, timeout=60).json()["error"]
    assert error["message"].startswith(said)
    assert error["param"] == re.split(r"[.:]", said)[0]


DEEP = b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', DEEP])
def test_a_body_that_is_no_object_is_refused(server, raw):
    answer = httpx.post(f"{server.url}/v1/completions", content=raw, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("text", ["%s", '{"a": [1, {"b": %s}]}'])
def test_a_number_that_json_has_not_is_refused_wherever_it_is(text, number):
    with pytest.raises(BadRequest, match="the body "):
        read_json((text % number).encode(), None)


def test_the_largest_numbers_are_read():
    assert read_json(b'[1e308, -1e308, 1e-999, 123456789012345678901234567890, "1e999"]', None) == [
        *(1e308, -1e308, 0.0, 123456789012345678901234567890, "1e999")
    ]


@pytest.mark.parametrize("number", ["NaN", "1e999"])
@pytest.mark.parametrize(
    "field",
    ['"user": %s', '"tools": [{"type": "function", "name": "f", "parameters": {"maximum": %s}}]'],
)
def test_no_answer_has_to_repeat_a_number_that_json_has_not(server, field, number):
    """It was an error of ours, after all had been generated."""
    raw = '{"input": "w5", "max_output_tokens": 1, ' + field % number + "}"
    answer = httpx.post(f"{server.url}/v1/responses", content=raw.encode(), timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r'"a\ud83d b"', "a\ufffd b"),  # JavaScript writes so what was cut within an emoji
        (r'"\uDE00\ud83d"', "\ufffd\ufffd"),
        (r'"\ud83d\uDE00"', "\U0001f600"),
        (r'"\ud83d\ud83d\ude00"', "\ufffd\U0001f600"),
        (r'"\\ud83d"', r"\ud83d"),
        (r'"\\\ud83d\n"', "\\\ufffd\n"),
        ('\ufeff"x"', "x"),
    ],
)
def test_half_a_character_and_a_byte_order_mark_hinder_nothing(text, read):
    assert read_json(text.encode(), None) == read


def test_a_packed_body_is_refused_as_what_it_is(server):
    raw = gzip.compress(b'{"prompt": "w5", "max_tokens": 1}')
    for coding, status in (("gzip", 415), ("identity", 400)):
        headers = {"content-encoding": coding}
        answer = httpx.post(
            f"{server.url}/v1/completions", content=raw, headers=headers, timeout=60
        )
        assert answer.status_code == status
        assert ("gzip" in answer.text) == (status == 415)


def test_numbers_without_a_fraction_are_integers(server):
    """Lua and Dart write 2 as 2.0."""
    for path, asked in (
        ("v1/chat/completions", {"messages": [SAID], "max_tokens": 2.0}),
        ("v1/completions", {"prompt": "w5", "max_tokens": 2.0}),
        ("v1/responses", {"input": "w5", "max_output_tokens": 2.0}),
        ("v1/messages", {"messages": [SAID], "max_tokens": 2.0}),
    ):
        numbers = {"top_k": 3.0, "temperature": 1.0}
        answer = httpx.post(f"{server.url}/{path}", json=asked | numbers, timeout=60)
        assert answer.status_code == 200, answer.text
    half = {"prompt": "w5", "max_tokens": 2.5}
    answer = httpx.post(f"{server.url}/v1/completions", json=half, timeout=60)
    assert "max_tokens: Input should be a valid integer" in answer.text
    options = {"num_predict": 2.0, "top_k": 3.0}
    body = {"prompt": "w5", "stream": False, "options": options}
    answer = httpx.post(f"{server.url}/api/generate", json=body, timeout=60)
    assert answer.json()["eval_count"] <= 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_new_tokens": 3, "random_seed": 4}, {"max_tokens": 3, "seed": 4}),
        ({"num_predict": 3, "min_new_tokens": 2}, {"max_tokens": 3, "min_tokens": 2}),
        ({"stop_sequences": ["x"]}, {"stops": ("x",)}),
        ({"do_sample": False, "temperature": 0.5}, {"temperature": 0}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
    ],
)
def test_a_field_may_have_the_name_that_others_have_for_it(fields, expected):
    for body in (
        CompletionBody.model_validate({"prompt": "w5"} | fields),
        ChatBody.model_validate({"messages": [SAID]} | fields),
    ):
        assert {name: getattr(body, name) for name in expected} == expected


def test_a_body_is_json_whatever_its_content_type(server):
    """`curl -d` says that it sends a form."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json"):
        raw = b'{"prompt": "w5", "max_tokens": 1}'
        headers = {"content-type": kind}
        answer = httpx.post(
            f"{server.url}/v1/completions", content=raw, headers=headers, timeout=60
        )
        assert answer.status_code == 200


def test_the_document_has_every_route_and_the_bodies_they_take(server):
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    bodies = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            url = server.url + path.format(name="tiny", response_id="resp_1")
            answer = httpx.request(method, url, timeout=60)
            assert answer.status_code in (200, 400) or "Response with id" in answer.text
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                bodies[path] = content["schema"]["$ref"].rpartition("/")[2]
    assert len(document["paths"]) == 35
    assert bodies == {
        "/v1/completions": "CompletionBody",
        "/v1/chat/completions": "ChatBody",
        "/v1/responses": "ResponsesBody",
        "/v1/responses/input_tokens": "ResponsesBody",
        "/v1/messages": "MessagesBody",
        "/v1/messages/count_tokens": "CountTokensBody",
        "/v1/embeddings": "EmbeddingsBody",
        "/api/chat": "OllamaChatBody",
        "/api/embed": "OllamaEmbedBody",
        "/api/embeddings": "OllamaEmbedBody",
        "/api/generate": "OllamaGenerateBody",
        "/api/pull": "OllamaPullBody",
        "/api/show": "OllamaShowBody",
        "/completion": "LlamaBody",
        "/apply-template": "ChatBody",
        "/tokenize": "TokenizeBody",
        "/detokenize": "DetokenizeBody",
    }
    assert set(bodies.values()) < set(document["components"]["schemas"])


def test_there_is_room_for_the_largest_body_of_two_clients():
    most = 64 * limits.MIB
    room = BodyRoom(most)
    room.take("a", most)
    room.take("b", most)
    for client in ("a", "c"):
        with pytest.raises(Refused) as caught:
            room.take(client, 1)
        assert caught.value.status_code == 429
        room.give_back(client, 1)
    room.give_back("a", most)
    room.take("c", most)


def test_small_bodies_have_the_room_that_the_limits_say():
    room = BodyRoom(1_000)
    room.take("a", limits.BODIES_OF_ONE.most)
    with pytest.raises(Refused):
        room.take("a", 1)


def test_a_body_is_taken_that_is_as_large_as_the_server_allows(moe):
    large = {"prompt": "w5", "max_tokens": 1, "user": "x" * limits.BODIES_OF_ONE.most}
    with serving(moe, max_body=limits.BODIES_OF_ONE.most + 1_000) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=large, timeout=60)
        assert answer.status_code == 200, answer.text
