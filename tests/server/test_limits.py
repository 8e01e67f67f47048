"""Whatever a client chooses the size of has a limit, which is checked before the work."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from moe_infinity.server import bodies, limits
from moe_infinity.server.anthropic_body import CountTokensBody, MessagesBody
from moe_infinity.server.app import create_app
from moe_infinity.server.bodies import num_items, read_json
from moe_infinity.server.chat import ChatBody, TokenizeBody
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.grammars import Structure, part_of
from moe_infinity.server.llama_cpp import LlamaBody
from moe_infinity.server.ollama_body import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
)
from moe_infinity.server.protocol import CompletionBody, DetokenizeBody, EmbeddingsBody
from moe_infinity.server.refusals import Refused
from moe_infinity.server.responses_body import ResponsesBody
from moe_infinity.server.routes import Paths
from tests.server.serving import serving

SAID = {"role": "user", "content": "a"}
# The least that each kind of body takes.
LEAST: dict[type[BaseModel], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [SAID]},
    ResponsesBody: {"input": "a"},
    MessagesBody: {"messages": [SAID], "max_tokens": 1, "model": "m"},
    CountTokensBody: {"messages": [SAID], "model": "m"},
    EmbeddingsBody: {"input": "a"},
    TokenizeBody: {"prompt": "a"},
    DetokenizeBody: {"tokens": [1]},
    LlamaBody: {"prompt": "a"},
    OllamaChatBody: {"messages": [SAID]},
    OllamaGenerateBody: {"prompt": "a"},
    OllamaEmbedBody: {"input": "a"},
    OllamaShowBody: {"name": "m"},
    OllamaPullBody: {"name": "m"},
}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ITEMS: dict[str, Any] = {
    "messages": SAID,
    "tools": FUNCTION,
    "functions": FUNCTION["function"],
    "stop": "a",
    "stop_sequences": "a",
    "stop_token_ids": 1,
}
MOST_ERRORS = 50  # of a body, one of each type that each field may have


def fields_of(kind: type[BaseModel]) -> Iterator[str]:
    """Names of the fields of a body, as clients write them."""
    for name, field in kind.model_fields.items():
        yield field.alias or name


def value_of(field: str, num: int) -> Any:
    if field in ("logit_bias", "metadata", "chat_template_kwargs"):
        number = 1 if field == "logit_bias" else "a"
        return {str(each): number for each in range(num)}
    return [ITEMS[field]] * num


def refusal_of(body: bytes, kind: type[BaseModel]) -> Refused | None:
    try:
        read_json(body, kind)
    except Refused as error:
        return error
    return None


def num_errors(content: Any, kind: type[BaseModel]) -> int:
    try:
        kind.model_validate(content)
    except ValidationError as error:
        return error.error_count()
    return 0


@cache
def limited() -> list[tuple[type[BaseModel], str]]:
    names = limits.LENGTHS.keys() - {"content", "tool_calls", "choice"}
    return [(kind, name) for kind in LEAST for name in fields_of(kind) if name in names]


def test_every_route_with_a_body_is_tried_here(moe):
    config = ServeConfig(served_name="tiny")
    app = create_app(moe, Engine(moe, config), config)
    (paths,) = (each for each in app.user_middleware if each.cls is Paths)  # type: ignore[comparison-overlap]
    routers: Any = paths.kwargs["routers"]
    routes = [each for router in routers for each in router.routes if isinstance(each, APIRoute)]
    found = [route.body_field.field_info.annotation for route in routes if route.body_field]
    kinds = {kind for kind in found if isinstance(kind, type(BaseModel))}
    assert kinds == LEAST.keys()


@pytest.mark.grid
@pytest.mark.parametrize(("kind", "field"), limited())
@pytest.mark.parametrize("times", [0.5, 1, 1.01, 20])
def test_a_list_or_object_has_its_limit(kind, field, times):
    limit = limits.LENGTHS[field]
    num = min(int(limit.most * times + 0.99), 400_000)
    if num > limits.ITEMS.most / 4 and times > 1:
        num = limit.most + 1
    body = json.dumps(LEAST[kind] | {field: value_of(field, num)}).encode()
    if num <= limit.most:
        refused = refusal_of(body, kind)  # for another reason
        assert refused is None or refused.error.code != "too_large"
        return
    with pytest.raises(Refused) as caught:
        read_json(body, kind)
    assert caught.value.status_code in (limit.status, limits.ITEMS.status)
    assert caught.value.error.code == "too_large"
    if num_items(body) <= limits.ITEMS.most:
        assert caught.value.error.param == field
        assert caught.value.error.message.startswith(f"{field}: {limit.what}: at most")


WRONG = {
    "objects": [{}] * 20_000,
    "lists": [[[]]] * 20_000,
    "texts": ["a"] * 20_000,
    "numbers": [1.5] * 20_000,
    "mixed": [None, {}, "a", 1] * 5_000,
    "names": {str(each): {} for each in range(20_000)},
    "turns": [{"role": "user", "content": [{"type": "text"}] * 20_000}],
    "calls": [{"role": "assistant", "tool_calls": [{}] * 1_000}] * 20,
    "text": "a" * 200_000,
    "huge": 10**300,
}


@pytest.mark.grid
@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", WRONG)
def test_the_first_wrong_item_ends_the_check(kind, value):
    """pydantic would make an object for each error."""
    for field in fields_of(kind):
        content = from_json(json.dumps(LEAST[kind] | {field: WRONG[value]}).encode())
        with contextlib.suppress(Refused):
            assert num_errors(content, kind) <= MOST_ERRORS, field


@pytest.mark.parametrize(
    "text",
    [
        "[" + "{}," * 700_000 + "{}]",
        '{"prompt": [' + "1," * 600_000 + "1]}",
        "{" + ",".join(f'"{each}":1' for each in range(300_000)) + "}",
        '{"prompt": [' + "[1]," * 100_000 + "[1]]}",
        "[" + "{}," * 600_000 + '"' + '\\"' * 400_000,
    ],
    ids=["objects", "numbers", "names", "prompts", "quotes"],
)
def test_many_items_are_refused_before_they_are_made(text):
    with pytest.raises(Refused) as caught:
        read_json(text.encode(), CompletionBody)
    assert caught.value.error.code == "too_large"


def test_a_refused_body_does_not_wait_for_the_garbage_collector(moe):
    """A future refers to its error, whose frames refer to the body and to the future."""

    read: list[weakref.ref[Any]] = []

    def noted(*given: Any) -> Any:
        kept = {"a local of a frame of the error"}
        read.append(weakref.ref(kept))
        return read_json(*given)

    body: dict[str, Any] = {"prompt": [{}] * 20_000}
    with pytest.MonkeyPatch.context() as patch, serving(moe) as server:
        patch.setattr(bodies, "read_json", noted)
        gc.disable()
        try:
            for _ in range(3):
                assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 400
            time.sleep(0.2)
            assert [each() for each in read] == [None] * 3
        finally:
            gc.enable()


def test_texts_are_counted_without_taking_them_out():
    body = ('{"prompt": [' + '"a",' * 800_000 + '"a"]}').encode()
    tracemalloc.start()
    try:
        assert num_items(body) > limits.ITEMS.most
        assert tracemalloc.get_traced_memory()[1] < 5 * len(body)
    finally:
        tracemalloc.stop()


def test_marks_in_texts_are_no_items():
    body = json.dumps({"prompt": '{"a": [1, 2]}, \\" ' * 100_000}).encode()
    assert read_json(body, CompletionBody).prompt.startswith("{")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("grammar", "#" * (limits.GRAMMAR.most + 1)),
        ("grammar", 'root ::= "a"' + "#" * limits.GBNF.most),
        ("regex", "a" * (limits.REGEX.most + 1)),
        ("choice", ["a"] * (limits.CHOICE.most + 1)),
        ("choice", ["a" * (limits.CHOICE_CHARACTERS.most + 1)]),
        ("json", '{"a":' + "1" * limits.SCHEMA.most + "}"),
        ("json", {"const": "a" * limits.SCHEMA.most}),
    ],
)
def test_structures_have_limits(kind, value):
    with pytest.raises(Refused) as caught:
        part_of(Structure(kind, value, "field"), "field")
    assert caught.value.error.code == "too_large"
    assert caught.value.error.param == "field"


def test_an_answer_of_a_refusal_is_short():
    refused = Refused(400, "a" * 1_000_000)
    assert len(refused.error.message) < 1_100
    refused = Refused(400, "a", param="b" * 1_000_000)
    assert refused.error.param == "b" * 1_000


def test_a_long_name_of_a_variable_is_refused_with_its_beginning(server):
    name = "a" * 100_000
    body = {"messages": [SAID], "chat_template_kwargs": {name: 1}}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"chat_template_kwargs.{name}"[:1_000])
    assert len(answer.text) < 2_500


def test_help_shows_each_limit_and_so_does_the_guide():
    command = [sys.executable, "-m", "moe_infinity", "serve", "--help-limits"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    guide = Path("docs/serving.md").read_text("utf-8")
    rows = limits.table()
    assert len(rows) > 30
    for row in rows:
        assert all(cell in shown for cell in row)
        assert f"| {' | '.join(row)} |" in guide
