"""Answers that have to fit a schema, an expression, a choice or a grammar, or be calls of tools.

The model has 12 million parameters and knows no JSON: the grammar alone makes its answers fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLParserLimits

from examples import agent
from moe_infinity import MoE
from moe_infinity.server import grammars
from tests.server.driving import TOLERANCE
from tests.server.serving import Serving, serving


@pytest.fixture(scope="module")
def server(demo: MoE) -> Iterator[Serving]:
    with serving(demo, max_batch=8, served_name="demo") as server:
        yield server


ASKED: list[Any] = [{"role": "user", "content": "What is a fever?"}]
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 3},
        "at": {
            "type": "object",
            "properties": {
                "near": {"type": "boolean"},
                "depth": {"anyOf": [SMALL, {"type": "null"}]},
            },
            "required": ["near", "depth"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "colour", "sizes", "at"],
    "additionalProperties": False,
}


def require_fit(value: Any) -> None:
    """Assert what SCHEMA says."""
    assert value.keys() == {"name", "colour", "sizes", "at"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert value["colour"] in ("red", "green", "blue")
    assert 1 <= len(value["sizes"]) <= 3
    assert all(type(size) is int and 0 <= size <= 99 for size in value["sizes"])
    assert value["at"].keys() == {"near", "depth"}
    assert isinstance(value["at"]["near"], bool)
    depth = value["at"]["depth"]
    assert depth is None or 0 <= depth <= 99


def schema_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def ask(client: openai.OpenAI, **wishes: Any) -> Any:
    settings: dict[str, Any] = {"model": "demo", "messages": ASKED, "max_tokens": 200}
    return client.chat.completions.create(**(settings | {"temperature": 0} | wishes))


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


# schemas, expressions, choices, grammars


@pytest.mark.parametrize(
    "wishes", [{}, {"temperature": 1, "seed": 1}, {"temperature": 2, "seed": 2}]
)
def test_a_schema_is_kept(client, wishes):
    answer = ask(client, response_format=schema_format(SCHEMA), n=2, **wishes)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        require_fit(json.loads(choice.message.content))


def test_a_json_object_is_one(client):
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=400)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_streamed_text_is_that_of_one_body(client):
    form = schema_format(SCHEMA)
    chunks = list(ask(client, response_format=form, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    require_fit(json.loads(text))
    assert text == ask(client, response_format=form).choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


STRUCTURES: dict[str, Any] = {
    "json": {"type": "object", "properties": {"n": SMALL}, "required": ["n"],
             "additionalProperties": False},
    "regex": "(0x[0-9a-f]{4}|[A-Z]/[a-z]{3}\\.)",
    "choice": ["un œuf", 'say "no"', "a\\b/c"],
    "grammar": 'start: WORD ", " WORD\nWORD: /[a-z]{2,4}/',
}  # fmt: skip
EXPECTED = {
    "json": r'\{\s*"n"\s*:\s*[0-9]{1,2}\s*\}',
    "regex": STRUCTURES["regex"],
    "choice": "|".join(map(re.escape, STRUCTURES["choice"])),
    "grammar": "[a-z]{2,4}, [a-z]{2,4}",
}


@pytest.mark.grid
@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("kind", STRUCTURES)
def test_vllms_fields_are_kept_by_both_routes(client, kind, is_older):
    value = STRUCTURES[kind]
    extra = {f"guided_{kind}": value} if is_older else {"structured_outputs": {kind: value}}
    text = ask(client, extra_body=extra, temperature=1, seed=3).choices[0].message.content
    assert re.fullmatch(EXPECTED[kind], text)
    answer = client.completions.create(
        model="demo", prompt=["A fever", "A cold"], max_tokens=64, temperature=0, extra_body=extra
    )
    for choice in answer.choices:
        assert re.fullmatch(EXPECTED[kind], choice.text)
        assert choice.finish_reason == "stop"


def test_a_grammar_may_be_in_gbnf(client):
    extra = {"structured_outputs": {"grammar": 'root ::= "it is " ("hot" | "cold")'}}
    text = ask(client, extra_body=extra).choices[0].message.content
    assert text in ("it is hot", "it is cold")


def test_a_schema_of_the_responses_route_is_kept(client):
    form: Any = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
    settings: Any = {"model": "demo", "input": "What is a fever?", "max_output_tokens": 200}
    answer = client.responses.create(**settings, text={"format": form}, temperature=0)
    require_fit(json.loads(answer.output_text))
    assert answer.text.format.to_dict()["schema"] == SCHEMA


def test_an_answer_that_is_cut_need_not_be_complete(client):
    answer = ask(client, response_format=schema_format(SCHEMA), max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert not answer.choices[0].message.content.endswith("}")


def test_log_probabilities_are_those_of_what_is_allowed(client):
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = ask(client, extra_body=extra, logprobs=True, top_logprobs=3)
    text = answer.choices[0].message.content
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == text
    for token in tokens:
        best = token.top_logprobs
        assert best[0].token == token.token
        likely = [one for one in best if one.logprob > -9999]
        assert all(
            "yes".startswith(one.token)
            or "no".startswith(one.token)
            or one.token in ("yes", "es", "s", "o")
            for one in likely
        )


# several at once

MANY: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            f"key{idx}": {"enum": [f"very{idx}", f"quite{idx}"]},
            "count": {"type": "integer", "minimum": 10 * idx, "maximum": 10 * idx + 9},
        },
        "required": [f"key{idx}", "count"],
        "additionalProperties": False,
    }
    for idx in range(8)
]


@pytest.mark.arithmetic
def test_each_of_a_batch_has_its_own_schema_and_the_answer_it_has_alone(client):
    def answered(schema: dict[str, Any]) -> Any:
        settings: Any = {"response_format": schema_format(schema), "logprobs": True}
        return ask(client, **settings, top_logprobs=2).choices[0]

    alone = [answered(schema) for schema in MANY]
    for choice in alone:
        best = [token.top_logprobs for token in choice.logprobs.content]
        margin = min(first.logprob - second.logprob for first, second in best)
        assert margin > 2 * TOLERANCE, "take another prompt"
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(answered, MANY))
    for idx, (choice, single) in enumerate(zip(together, alone, strict=True)):
        value = json.loads(choice.message.content)
        assert value[f"key{idx}"] in (f"very{idx}", f"quite{idx}")
        assert value["count"] // 10 == idx
        assert choice.message.content == single.message.content


def test_the_metrics_count_masks(server, client):
    def seen(name: str) -> float:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        found = re.search(rf"^moe_infinity_mask_seconds_{name} (.*)$", text, re.MULTILINE)
        assert found
        return float(found[1])

    count, total = seen("count"), seen("sum")
    answer = ask(client, extra_body={"structured_outputs": {"regex": "[a-f]{9}"}})
    server.wait_until_idle()
    assert seen("count") == count + answer.usage.completion_tokens
    assert seen("sum") > total


# calls

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
    {
        "type": "function",
        "function": {
            "name": "count",
            "parameters": {"type": "object", "properties": {"n": SMALL}, "required": ["n"]},
        },
    },
]
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look"}}


def test_a_required_call_is_one(client):
    answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name in ("look", "wait", "count")
    assert isinstance(json.loads(call.function.arguments), dict)
    assert not choice.message.content


def test_a_named_tool_is_called_with_what_its_schema_allows(client):
    """Once: Copilot CLI got one after the other, until the context was full."""
    wishes: Any = {"tools": TOOLS, "tool_choice": LOOK}
    (call,) = ask(client, **wishes).choices[0].message.tool_calls
    assert call.function.name == "look"
    require_fit(json.loads(call.function.arguments))
    chunks = list(ask(client, **wishes, stream=True))
    deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    assert [(one.function.name, one.function.arguments) for one in deltas] == [
        (call.function.name, call.function.arguments)
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_responses_and_messages_call_what_they_must(server, client):
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = client.responses.create(
        model="demo", input="hi", tools=flat, tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False, max_output_tokens=200, temperature=0,
    )  # fmt: skip
    (item,) = [item for item in answer.output if item.type == "function_call"]
    require_fit(json.loads(item.arguments))
    names = [tool["function"]["name"] for tool in TOOLS]
    tools: Any = [
        {"name": name, "input_schema": tool["function"].get("parameters", {})}
        for name, tool in zip(names, TOOLS, strict=True)
    ]
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "look"}]
    with server.anthropic() as claude:
        for choice in choices:
            message = claude.messages.create(
                model="demo", max_tokens=200, messages=ASKED, tools=tools,
                extra_body={"temperature": 0},
                tool_choice=choice | {"disable_parallel_tool_use": True},
            )  # fmt: skip
            (use,) = message.content
            assert message.stop_reason == "tool_use"
            assert use.type == "tool_use"
            assert use.name in names
            if use.name == "look":
                require_fit(use.input)


def test_with_tools_that_may_be_called_an_answer_is_a_call_or_fits(client):
    answer = ask(client, tools=TOOLS, response_format=schema_format(SCHEMA), max_tokens=400)
    message = answer.choices[0].message
    if message.tool_calls:
        assert not message.content
    else:
        require_fit(json.loads(message.content))


def test_the_agent_calls_its_tool_and_goes_on(server, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["agent.py", "What is 17 times 23?", server.url])
    agent.main()
    out, err = capsys.readouterr()
    call = re.search(r'\[\{"expression"\s*:\s*"([^"]*)"\} -> (.*)\]', err)
    assert call
    assert call[2] == agent.run("calculate", json.dumps({"expression": call[1]}))
    assert out.strip()


# what is refused

DEEP: dict[str, Any] = {"type": "string"}
for _ in range(400):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}
HUGE = {
    "allOf": [
        {"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {}}} for j in range(4)]}
        for i in range(12)
    ]
}
SCHEMA_PARAM = "response_format.json_schema.schema"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"response_format": schema_format({"type": "foo"})}, SCHEMA_PARAM, "Invalid type: foo"),
        ({"response_format": schema_format({"not": {}})}, SCHEMA_PARAM, "Unimplemented keys"),
        ({"guided_json": json.dumps(DEEP)}, "structured_outputs.json", "recursion limit"),
        ({"response_format": schema_format(HUGE)}, SCHEMA_PARAM, "schema too large"),
        ({"response_format": schema_format({"$ref": "http://a/b"})}, SCHEMA_PARAM, "Resource"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "Field required"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed group"),
        ({"guided_regex": "a("}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "unknown"),
        ({"structured_outputs": {"grammar": "<" * 99}}, "structured_outputs.grammar", ""),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", ""),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "an object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "give one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "give one"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "give one of"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "give one"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "give either this or response_format",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice", ""),
        ({"tool_choice": LOOK, "tools": TOOLS[1:]}, "tool_choice", "no tool is called 'look'"),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "?"}}]},
            "tools.0",
            "a function needs a name",
        ),
        (
            {"tool_choice": "required", "tools": [TOOLS[0], TOOL]},
            "tools.1.function.parameters",
            "of an object",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(server, change, param, said):
    body = {"messages": ASKED, "max_tokens": 4} | change
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"].split(":")[0].startswith(param)) == (param, True)
    assert said in error["message"]


def test_other_routes_name_their_own_fields(server):
    form = {"type": "json_schema", "name": "it", "schema": {"type": "foo"}}
    body: Any = {"input": "hi", "text": {"format": form}}
    error = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()["error"]
    assert error["param"] == "text.format.schema"
    tool = {"name": "f", "input_schema": {"properties": {"a": {"type": "foo"}}}}
    body = {"messages": ASKED, "max_tokens": 4, "tools": [tool], "tool_choice": {"type": "any"}}
    error = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).json()["error"]
    assert error["message"].startswith("tools.0.input_schema: Invalid type: foo")


def test_a_grammar_that_grows_too_complex_ends_its_own_request(server, client, monkeypatch):
    limits = LLParserLimits(max_lexer_states=30, verbose_errors=False)
    monkeypatch.setattr(grammars, "LIMITS", limits)
    grows = {"structured_outputs": {"regex": "([01]*1[01]{9} )*!"}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body=grows, temperature=2, seed=1)
    assert refused.value.code == "constraint_failed"
    assert ask(client, max_tokens=2).usage.completion_tokens == 2
