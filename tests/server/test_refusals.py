"""How a refusal is worded: the field, the place in it, what is wrong there."""

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
        ("v1/completions", {"prompt": ["w5", 6]}, "prompt.1: Input should be a valid string"),
        ("v1/completions", {"prompt": ["w5"] * 21}, "prompt: 21 sequences, at most 20 may wait"),
        ("v1/chat/completions", {"top_logprobs": 2}, "top_logprobs: this needs logprobs=true"),
        (
            "v1/chat/completions",
            {"max_tokens": 3, "max_completion_tokens": 3},
            "max_tokens: this is the same as max_completion_tokens: give one of them",
        ),
        (
            "v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type: not supported with this value",
        ),
        ("tokenize", {"prompt": "w5", "messages": [SAID]}, "prompt: give either this or messages"),
        ("tokenize", {}, "prompt: give either this or messages"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_where(server, path, body, said):
    body = ({"messages": [SAID]} if "chat" in path else {}) | body
    error = httpx.post(f"{server.url}/{path}", json=body).json()["error"]
    assert error["message"].startswith(said)
    assert error["param"] == re.split(r"[.:]", said)[0]
