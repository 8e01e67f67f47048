"""How much to reason, as three APIs say it, reaches the chat template."""

from __future__ import annotations

import httpx
import pytest

from moe_infinity.server.anthropic_body import CountTokensBody, MessagesBody
from moe_infinity.server.chat import TokenizeBody
from moe_infinity.server.responses_body import ResponsesBody

THINKS = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}w20 w21 {% endif %}w77"
)


@pytest.mark.parametrize(
    ("fields", "num_more"),
    [
        ({"reasoning_effort": "none"}, 2),
        ({"reasoning_effort": "high"}, 0),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 2),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, 0),
        ({"chat_template_kwargs": {"thinking": False}}, 0),  # a hint for other templates
        ({"reasoning_effort": "default"}, 0),
        ({"thinking": {"type": "disabled"}}, 2),
        ({"thinking": {"type": "enabled", "clear_thinking": True}}, 0),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, 2),
        ({"enable_thinking": False}, 2),
        ({"enable_thinking": True, "thinking_budget": 50}, 0),
        ({"reasoning": {"effort": "none"}}, 2),
        ({"reasoning": {"enabled": False}}, 2),
        ({"reasoning": {"enabled": True, "exclude": True, "max_tokens": 9}}, 0),
    ],
    ids=str,
)
def test_how_much_to_reason_is_told_to_a_template_that_has_such_a_variable(
    server, moe, monkeypatch, fields, num_more
):
    monkeypatch.setattr(moe.tokenizer, "chat_template", THINKS)
    body = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 1} | fields
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == 2 + num_more
    ask = {"max_tokens": 1, "messages": body["messages"], "thinking": {"type": "disabled"}}
    counted = httpx.post(f"{server.url}/v1/messages", json=ask, timeout=60).json()["usage"]
    assert counted["input_tokens"] + counted.get("cache_read_input_tokens", 0) == 4
    ask = {"input": "w5", "max_output_tokens": 1, "reasoning": {"effort": "none"}}
    answer = httpx.post(f"{server.url}/v1/responses", json=ask, timeout=60).json()
    assert answer["usage"]["input_tokens"] == 4
    assert answer["reasoning"]["effort"] == "none"


@pytest.mark.parametrize("name", ["style", "chat_template", "tools", "messages", "enable_thinkin"])
def test_a_variable_that_the_template_has_not_or_is_not_the_clients_is_refused(
    server, moe, monkeypatch, name
):
    monkeypatch.setattr(moe.tokenizer, "chat_template", THINKS)
    body = {"messages": [{"role": "user", "content": "w5"}], "chat_template_kwargs": {name: "w9"}}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"chat_template_kwargs.{name}")


SWITCHED = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if messages[0]['content'].endswith('/no_think') %}w20 {% endif %}w77"
)


def test_what_a_template_reads_in_a_message_reaches_it(server, moe, monkeypatch):
    monkeypatch.setattr(moe.tokenizer, "chat_template", SWITCHED)
    counts = []
    for text in ("w5", "w5 /no_think"):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        counts.append(answer["usage"]["prompt_tokens"])
    assert counts[1] > counts[0] + 1  # the words, and what the template adds


BUDGETED = "{{ messages[0]['content'] }} {% if NAME is defined %}w{{ NAME }} {% endif %}w77"


@pytest.mark.parametrize("name", ["thinking_budget", "reasoning_budget"])
def test_a_template_that_knows_budgets_is_told_it(server, moe, monkeypatch, name):
    monkeypatch.setattr(moe.tokenizer, "chat_template", BUDGETED.replace("NAME", name))
    ask = [{"role": "user", "content": "w5"}]
    for fields in ({"reasoning_budget_tokens": 50}, {"chat_template_kwargs": {name: 50}}):
        body = {"messages": ask, "max_tokens": 1} | fields
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["usage"]["prompt_tokens"] == 3


CONVERSATION = {"messages": [{"role": "user", "content": "w5"}]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ResponsesBody, {"input": "w5"}),
        (MessagesBody, CONVERSATION | {"max_tokens": 4}),
        (CountTokensBody, CONVERSATION),
        (TokenizeBody, CONVERSATION),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False},
        {"think": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_each_api_takes_the_words_of_all(kind, body, fields):
    chat = kind.model_validate(body | fields).for_chat()
    assert chat.thought_budget == 0
    assert chat.chat_template_kwargs == fields.get("chat_template_kwargs")


def test_anthropics_own_words_are_kept():
    fields = {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 4}
    chat = MessagesBody.model_validate(CONVERSATION | fields).for_chat()
    assert (chat.reasoning_effort, chat.thought_budget) == ("medium", 9)
