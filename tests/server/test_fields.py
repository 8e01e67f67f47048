"""Fields as clients send them: what has no effect is left out, and only what matters is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from moe_infinity import MoE
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.field_tables import SAMPLERS, problem_of
from moe_infinity.server.prompts import PromptReader
from moe_infinity.server.protocol import CompletionBody
from tests.server.serving import Serving, serving

SAID: list[Any] = [{"role": "user", "content": "w5"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "w88", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CHAT, COMPLETIONS, RESPONSES = "v1/chat/completions", "v1/completions", "v1/responses"
MESSAGES, COUNT = "v1/messages", "v1/messages/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "max_tokens": 2},
    COMPLETIONS: {"prompt": "w5", "max_tokens": 2},
    RESPONSES: {"input": "w5", "max_output_tokens": 2},
    MESSAGES: {"messages": SAID, "max_tokens": 2},
    COUNT: {"messages": SAID},
}


def ask(server: Serving, path: str, change: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/{path}", json=BODIES[path] | change, timeout=60)


def prompt_tokens(answer: httpx.Response) -> int:
    """How many tokens the prompt had, in whichever words."""
    body = answer.json()
    usage = body.get("usage", body)
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
    return sum(usage.get(name, 0) for name in names)


@pytest.fixture(scope="module")
def strict(moe: MoE) -> Iterator[Serving]:
    with serving(moe, strict_fields=True) as server:
        yield server


# A value of each field that a client library knows and a server could refuse.
VALUES: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "mp3"}, "background": True, "best_of": 2,
    "compaction": {"type": "summarize"}, "conversation": "conv_1", "image": {"url": "data:,"},
    "modalities": ["audio"], "previous_response_id": "resp_1", "prompt": {"id": "pmpt_1"},
    "suffix": "x",
    # from here on nothing is refused
    "access_programs": ["a"], "background_options": {}, "betas": ["effort-2025-11-24"],
    "billing_policy": "auto", "cache_control": {"type": "ephemeral"},
    "container": "c", "context_management": {"edits": []}, "diagnostics": {"a": "b"}, "echo": True,
    "fallback_credit_token": "t", "fallbacks": [{"model": "m"}], "frequency_penalty": 0.5,
    "function_call": "auto", "functions": [FUNCTION], "include": ["file_search_call.results"],
    "inference_geo": "eu", "input": "w6", "instructions": "w7", "logit_bias": {"5": 1.0},
    "logprobs": 1, "max_completion_tokens": 1, "max_output_tokens": 1, "max_tokens": 1,
    "max_tool_calls": 3, "mcp_servers": [{"type": "url", "url": "u", "name": "n"}],
    "messages": SAID, "metadata": {"a": "b"}, "model": "tiny", "moderation": {"a": 1}, "n": 2,
    "output_config": {"effort": "max"}, "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"}, "presence_penalty": 0.5,
    "prompt_cache_key": "k", "prompt_cache_options": {"a": 1}, "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low", "summary": "auto", "generate_summary": "auto"},
    "reasoning_effort": "minimal", "response_format": {"type": "text"}, "safety_identifier": "s",
    "seed": 3, "service_tier": "flex", "speed": "fast", "stop": ["x"], "stop_sequences": ["x"],
    "store": True, "stream_options": {"include_usage": True, "include_obfuscation": False},
    "system": "w8", "temperature": 0.5, "text": {"verbosity": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"},
    "thread": {"type": "create"}, "tool_choice": "auto", "tools": [TOOL], "top_k": 3,
    "top_logprobs": 0, "top_p": 0.5, "truncation": "auto", "user": "u", "user_profile_id": "p",
    "verbosity": "low", "web_search_options": {"search_context_size": "low"}, "workspace_id": "w",
}  # fmt: skip
OF_ROUTE: dict[tuple[str, str], Any] = {
    (CHAT, "logprobs"): True,
    (COMPLETIONS, "prompt"): "w6",
    (RESPONSES, "tools"): [{"type": "function", "strict": True, **FUNCTION}],
    (MESSAGES, "tools"): [{"name": "w88", "input_schema": SCHEMA, "strict": True}],
    (COUNT, "tools"): [{"name": "w88", "input_schema": SCHEMA}],
    (MESSAGES, "tool_choice"): {"type": "auto"},
    (COUNT, "tool_choice"): {"type": "auto"},
}
REFUSED = {
    "audio", "background", "best_of", "compaction", "conversation", "image", "modalities",
    "previous_response_id", "prompt", "suffix", "thread",
}  # fmt: skip
TAKEN = {(COMPLETIONS, "prompt"), (COUNT, "compaction")}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("path", "params"),
    [
        (CHAT, ChatParams),
        (COMPLETIONS, CompletionParams),
        (RESPONSES, ResponseCreateParamsBase),
        (MESSAGES, MessageCreateParamsBase),
        (COUNT, MessageCountTokensParams),
    ],
)
def test_of_all_fields_of_a_library_only_those_are_refused_that_change_what_is_asked(
    server, path, params
):
    """A field the client library learns one day fails here until someone decides."""
    optional = []
    for name in get_type_hints(params):
        value = OF_ROUTE.get((path, name), VALUES[name])
        answer = ask(server, path, {name: value})
        is_refused = name in REFUSED and (path, name) not in TAKEN
        assert (name, answer.status_code) == (name, 400 if is_refused else 200), answer.text
        if is_refused and path not in (MESSAGES, COUNT):  # Anthropic's errors have no such field
            assert answer.json()["error"]["param"] == name
        if name not in BODIES[path]:
            optional.append(name)
    answer = ask(server, path, dict.fromkeys(optional))
    assert answer.status_code == 200, answer.text
    if path == MESSAGES:
        assert ask(server, path, {"max_tokens": None}).status_code == 400


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("empty", [None, "", [], {}], ids=repr)
def test_what_is_empty_is_as_absent(server, path, empty):
    optional = {
        CHAT: ("tools", "tool_choice", "response_format", "stop", "reasoning_effort", "model"),
        COMPLETIONS: ("stop", "logit_bias", "suffix", "model"),
        RESPONSES: ("tools", "tool_choice", "text", "reasoning", "instructions", "metadata"),
        MESSAGES: ("tools", "tool_choice", "system", "thinking", "stop_sequences", "metadata"),
        COUNT: ("tools", "tool_choice", "system", "thinking", "output_config"),
    }[path]
    change = dict.fromkeys((*optional, "colour", "previous_response_id"), empty)
    answer = ask(server, path, change)
    assert answer.status_code == 200, answer.text
    assert prompt_tokens(answer) == prompt_tokens(ask(server, path, {}))


def test_an_unknown_field_is_logged_once_and_a_harmless_one_never(server, caplog):
    with caplog.at_level(logging.WARNING, "moe_infinity.server.fields"):
        for _ in range(2):
            message = SAID[0] | {"flavour": "sweet", "timestamp": 1, "index": 1, "parsed": [1]}
            change = {"colour": "red", "metadata": {"a": 1}, "messages": [message]}
            assert ask(server, CHAT, change).status_code == 200
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [
        f"requests have the field {name!r}, which has no effect here"
        for name in ("colour", "flavour")
    ]


@pytest.mark.parametrize(
    ("path", "change", "place"),
    [
        (CHAT, {"colour": "red"}, "colour"),
        (CHAT, {"metadata": {"a": "b"}}, "metadata"),
        (CHAT, {"messages": [SAID[0] | {"annotations": [1]}]}, "messages.0.annotations"),
        (COMPLETIONS, {"colour": "red"}, "colour"),
        (RESPONSES, {"client_metadata": {"a": "b"}}, "client_metadata"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0"),
        (MESSAGES, {"context_management": {"a": 1}}, "context_management"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    ],
)
def test_strict_fields_are_refused_with_their_place(strict, path, change, place):
    answer = ask(strict, path, change)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{place}: ")
    assert ask(strict, path, {}).status_code == 200


# fields that have an effect


def test_both_limits_may_come_and_the_lower_one_counts(server):
    for both in ((1, 2), (2, 1)):
        change = dict(zip(("max_tokens", "max_completion_tokens"), both, strict=True))
        answer = ask(server, CHAT, change | {"logit_bias": {"9": 100}})
        assert answer.json()["usage"]["completion_tokens"] == 1


def test_a_limit_beyond_the_context_is_what_the_context_leaves(moe, caplog):
    with serving(moe, max_context=32) as server:
        for path, name in ((CHAT, "max_tokens"), (RESPONSES, "max_output_tokens")):
            change = {name: 32_000, "temperature": 0, "logit_bias": {"9": 100}}
            with caplog.at_level(logging.INFO, "moe_infinity.server.prompts"):
                answer = ask(server, path, change)
            assert answer.status_code == 200
            assert "not the 32000 asked for" in caplog.text
            caplog.clear()
            usage = answer.json()["usage"]
            if path == CHAT:
                assert usage["total_tokens"] == 32
        assert ask(server, MESSAGES, {"max_tokens": 32_000}).status_code == 200


def test_without_a_limit_a_chat_may_use_what_the_context_leaves(moe):
    bias = {"max_tokens": None, "logit_bias": {"9": 100}}
    for bound, length in ((None, 30), (7, 7)):
        with serving(moe, max_context=32, max_new_tokens=bound) as server:
            answer = ask(server, CHAT, bias).json()
            assert answer["usage"]["completion_tokens"] == length
            assert answer["choices"][0]["finish_reason"] == "length"
            assert ask(server, RESPONSES, {"max_output_tokens": None}).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "w5 " * 600}]}, "context length is 512"),
        (RESPONSES, {"input": "w5 " * 600}, "context length is 512"),
        (COMPLETIONS, {"prompt": [5] * 512}, "context length is 512"),
        (MESSAGES, {"system": "w5 " * 600}, "prompt is too long: 603 tokens > 512 maximum"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_its_api(server, path, change, said):
    answer = ask(server, path, change)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert said in error["message"]
    assert path == MESSAGES or error["code"] == "context_length_exceeded"


def test_a_thread_is_refused_so_that_the_client_sends_the_whole_conversation(server):
    """Anthropic's client looks for these details, and then goes on without a thread."""
    answer = ask(server, MESSAGES, {"thread": {"type": "create"}})
    assert answer.status_code == 400
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert answer.json()["error"]["details"] == details


def test_usage_may_come_with_each_chunk(server):
    for options, counts in (
        ({"include_usage": True, "continuous_usage_stats": True}, True),
        ({"include_usage": True}, False),
    ):
        change = {"stream": True, "stream_options": options, "max_tokens": 4}
        raw = ask(server, CHAT, change).text
        chunks = [httpx.Response(200, content=line[6:]).json() for line in raw.split("\n\n")[:-2]]
        assert all((chunk["usage"] is not None) == counts for chunk in chunks[:-1])
        assert chunks[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("name", ["functions", "tools"])
def test_functions_are_what_tools_were_before(server, name):
    change = {name: [FUNCTION if name == "functions" else TOOL]}
    assert prompt_tokens(ask(server, CHAT, change)) == 3
    none = {"function_call": "none"} if name == "functions" else {"tool_choice": "none"}
    assert prompt_tokens(ask(server, CHAT, change | none)) == 2


def test_of_allowed_tools_the_others_are_left_out(server):
    other = {"type": "function", "function": {"name": "w89"}}
    listed = [{"type": "function", "function": {"name": "w88"}}]
    allowed = {"mode": "auto", "tools": listed}
    choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": allowed}
    tools = {"tools": [TOOL, other, other]}
    assert prompt_tokens(ask(server, CHAT, tools)) == 5
    assert prompt_tokens(ask(server, CHAT, tools | {"tool_choice": choice})) == 3
    flat = {"tools": [{"type": "function", "name": name} for name in ("w88", "w89")]}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": flat["tools"][1:]}
    answer = ask(server, RESPONSES, flat | {"tool_choice": choice})
    assert (prompt_tokens(answer), answer.json()["tool_choice"]["mode"]) == (3, "auto")


@pytest.mark.parametrize(
    ("path", "tools"),
    [
        (CHAT, [{"type": "custom", "custom": {"name": "c"}}, TOOL]),
        (RESPONSES, [{"type": "namespace", "name": "m", "tools": []}, {"type": "web_search"}]),
        (MESSAGES, [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]),
    ],
)
def test_tools_of_unknown_types_are_left_out(server, path, tools):
    functions = [tool for tool in tools if tool == TOOL]
    tokens = prompt_tokens(ask(server, path, {"tools": functions}))
    assert prompt_tokens(ask(server, path, {"tools": tools})) == tokens


def test_prompts_may_mix_texts_and_token_ids(moe):
    body = CompletionBody.model_validate({"prompt": ["w5", [6, "w7", 8]]})
    reader = PromptReader(moe, ServeConfig())
    assert [request.prompt_ids for request in reader.completion(body)] == [[5], [6, 7, 8]]
    body = CompletionBody.model_validate({"prompt": [5, "w6 w7", 8]})
    assert [request.prompt_ids for request in reader.completion(body)] == [[5, 6, 7, 8]]


def test_the_chosen_token_is_among_its_alternatives(server):
    for num in (0, 1):
        change = {"logprobs": num, "temperature": 2, "seed": 4, "max_tokens": 8}
        logprobs = ask(server, COMPLETIONS, change).json()["choices"][0]["logprobs"]
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert token in top
            assert num <= len(top) <= num + 1


# messages


@pytest.mark.parametrize("content", ["absent", None])
def test_a_user_has_to_say_something(server, content):
    message = {"role": "user"} if content == "absent" else {"role": "user", "content": content}
    answer = ask(server, CHAT, {"messages": [message]})
    assert answer.json()["error"]["message"] == "messages.0.content: Field required"
    assert ask(server, CHAT, {"messages": [{"role": "user", "content": ""}]}).status_code == 200


def test_an_answer_at_the_end_is_continued_unless_the_request_says_no(server):
    begun = {"messages": [*SAID, {"role": "assistant", "content": "w9"}]}
    for path in (CHAT, MESSAGES):
        assert prompt_tokens(ask(server, path, begun)) == 2  # without w77, which begins an answer
    new_turn = begun | {"add_generation_prompt": True}
    assert prompt_tokens(ask(server, CHAT, new_turn)) == 3
    assert prompt_tokens(ask(server, CHAT, begun | {"continue_final_message": False})) == 3
    items = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w9"}]
    assert prompt_tokens(ask(server, RESPONSES, {"input": items})) == 3
    two = {"messages": [*SAID, *[{"role": "assistant", "content": "w9"}] * 2]}
    answer = ask(server, CHAT, two)
    assert answer.json()["error"]["message"].startswith("messages: there are two answers")
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert ask(server, CHAT, begun | both).json()["error"]["param"] == "continue_final_message"


def test_claude_codes_attribution_is_no_part_of_the_prompt(server):
    block = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.123;"}
    system = [block, {"type": "text", "text": "w8"}]
    assert prompt_tokens(ask(server, COUNT, {"system": system})) == 3
    assert prompt_tokens(ask(server, COUNT, {"system": f"{block['text']}\nw8"})) == 3


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"min_p": 1.0}, "min_p"),
        ({"repeat_penalty": 1000.0}, "repetition_penalty"),
        ({"repetition_penalty": 1000.0}, "repetition_penalty"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"epsilon_cutoff": 0.01}, "epsilon_cutoff"),
        ({"eta_cutoff": 0.01}, "eta_cutoff"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
    ],
)
def test_settings_of_sampling_are_honoured(moe, change, name):
    reader = PromptReader(moe, ServeConfig())
    body = CompletionBody.model_validate({"prompt": "w5"} | change)
    (request,) = reader.completion(body)
    assert getattr(request.sampling, name) == next(iter(change.values()))


def test_a_sampler_that_is_missing_is_refused_unless_it_is_off(server):
    """By the same rule on all routes."""
    bodies = BODIES | {"completion": {"prompt": "w5", "n_predict": 2}}
    off = {name: values[0] for name, values in SAMPLERS.items()}
    assert [problem_of(name, value) for name in off for value in (*SAMPLERS[name], None)].count(
        None
    ) == sum(map(len, SAMPLERS.values())) + len(off)
    assert None not in [problem_of(name, 0.25) for name in off]
    for path, body in bodies.items():
        answers = [
            httpx.post(f"{server.url}/{path}", json=body | change, timeout=60)
            for change in (off, {"mirostat": 2})
        ]
        assert [answer.status_code for answer in answers] == [200, 400], path
        assert "mirostat: this sampler" in answers[1].text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_samplers_are_honoured_by_all_routes(server, path):
    """The bias alone would write token 9 for ever."""
    limit = {name: 8 for name in BODIES[path] if name.startswith("max_")}
    change = limit | {"temperature": 0, "logit_bias": {"9": 100}}
    assert "w9 w9 w9 w9" in ask(server, path, change).text
    assert "w9 w9 w9" not in ask(server, path, change | {"no_repeat_ngram_size": 2}).text


def test_the_end_of_an_answer_may_be_set(server):
    """Token 1 is the end token of this model."""
    ends = {"temperature": 0, "logit_bias": {"1": 100, "9": 50}, "n_predict": 6, "max_tokens": None}
    for change, length in (
        ({}, 1),
        ({"ignore_eos": True}, 6),
        ({"min_tokens": 3}, 4),
        ({"ignore_eos": True, "stop_token_ids": [1]}, 1),
        ({"ignore_eos": True, "stop_token_ids": [1.0]}, 1),
    ):
        usage = ask(server, COMPLETIONS, ends | change).json()["usage"]
        assert (change, usage["completion_tokens"]) == (change, length)
    answer = ask(server, COMPLETIONS, {"stop_token_ids": [128]})
    assert answer.json()["error"]["param"] == "stop_token_ids"
