"""Which bodies are taken, which are documented, and how a refusal is worded."""

from __future__ import annotations

import re

import httpx
import pytest

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
            "messages: this server reads and writes text only",
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
LONE = b'{"prompt": "\\ud800"}'


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', DEEP, LONE]
)
def test_a_body_that_is_no_object_is_refused(server, raw):
    answer = httpx.post(f"{server.url}/v1/completions", content=raw, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


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
            url = server.url + path.format(name="tiny")
            assert httpx.request(method, url, timeout=60).status_code in (200, 400)
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                bodies[path] = content["schema"]["$ref"].rpartition("/")[2]
    assert len(document["paths"]) == 32
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
        "/api/show": "OllamaShowBody",
        "/completion": "LlamaBody",
        "/apply-template": "ChatBody",
        "/tokenize": "TokenizeBody",
        "/detokenize": "DetokenizeBody",
    }
    assert set(bodies.values()) < set(document["components"]["schemas"])
