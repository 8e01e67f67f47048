"""Paths as clients write them, names of the model, origins of pages, and what refusals leave."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

import httpx
import openai
import pytest
from fastapi import APIRouter

from moe_infinity import ConfigError
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.routes import Paths
from tests.server.serving import Serving, serving

PROMPT = "w5 w6 w9"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": PROMPT},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/embeddings": {"input": PROMPT},
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [5]},
}
GETS = ("/v1", "/v1/models", "/v1/models/tiny", "/health", "/health/live", "/metrics", "/stats")


def spellings(path: str) -> list[str]:
    """The same path as clients with a wrong base URL write it."""
    bare = path.removeprefix("/v1")
    return [
        path,
        f"{path}/",
        f"/{path}",
        f"{path}//",
        bare or "/v1/",
        f"/v1{bare}",
        f"/v1/v1{bare}/",
        f"/openai{path}",
        f"/compatible-mode/v1{bare}",
    ]


@pytest.mark.parametrize("path", BODIES)
def test_a_route_is_found_however_its_path_is_written(server, path):
    for spelling in spellings(path):
        answer = httpx.post(server.url + spelling, json=BODIES[path], timeout=60)
        assert answer.status_code == 200, spelling


def test_codex_gets_a_list_of_models_that_it_can_read(server):
    listed = httpx.get(f"{server.url}/v1/models", params={"client_version": "0.154.0"}).json()
    assert listed["models"] == []
    assert listed["data"] == httpx.get(f"{server.url}/v1/models").json()["data"]


def test_a_path_may_come_with_the_address_before_it(server):
    """As a proxy is asked (RFC 9112, 3.2.2)."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(
            f"GET {server.url}/v1/models HTTP/1.1\r\nHost: {host}:{port}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        assert client.makefile("rb").readline().split()[1] == b"200"


@pytest.mark.parametrize("path", GETS)
def test_what_is_asked_for_is_found_however_its_path_is_written(server, path):
    for spelling in spellings(path):
        assert httpx.get(server.url + spelling).status_code == 200, spelling
        assert httpx.head(server.url + spelling).status_code == 200, spelling


NO_PATHS = (
    "/", "/v2/models", "/v1/nothing", "/models.json", "/v1models", "/openai", "/openai/nothing",
    "/v1/models/some/v1",
)  # fmt: skip


@pytest.fixture(scope="module")
def paths() -> Paths:
    router = APIRouter()
    router.add_api_route("/v1/models", lambda: None)
    router.add_api_route("/v1/models/{name:path}", lambda: None)
    return Paths(router, [router])


@pytest.mark.parametrize("path", NO_PATHS)
def test_a_path_that_is_none_stays_as_it_is(paths, path):
    assert paths.meant(path) == path


@pytest.mark.parametrize("start", ["/a", "/v1/a", "/v1/a/v1/v1", "/openai/v1/v1"])
def test_a_path_begins_with_its_last_v1(paths, start):
    assert paths.meant(f"{start}/v1/models") == "/v1/models"


def test_a_long_path_takes_time_that_grows_with_its_length(paths):
    """Each of its slashes was tried as the beginning of what stands in front."""
    start = "/a" * 32_000
    began_s = time.thread_time()
    assert paths.meant(start) == start
    assert paths.meant(f"{start}/v1/models") == "/v1/models"
    assert time.thread_time() - began_s < 0.5


def azure(url: str, **more: Any) -> openai.AzureOpenAI:
    settings: Any = {"api_version": "2024-10-21", "api_key": "key", "max_retries": 0} | more
    return openai.AzureOpenAI(azure_endpoint=url, **settings)


def test_the_client_of_azure_is_served(moe):
    with serving(moe, api_key=["key"]) as server, azure(server.url) as client:
        resources: dict[str, Any] = {
            "chat/completions": client.chat.completions,
            "completions": client.completions,
            "embeddings": client.embeddings,
            "responses": client.responses,
        }
        for path, resource in resources.items():
            assert resource.create(model="tiny", **BODIES[f"/v1/{path}"]).model == "tiny"
        assert [model.id for model in client.models.list()] == ["tiny"]
        with azure(server.url, api_key="another") as other, pytest.raises(openai.APIStatusError):
            other.models.list()


@pytest.mark.parametrize("start", ["/health", "/openai", "/openai/deployments/health", "/page"])
def test_what_stands_in_front_of_a_path_opens_no_route(moe, start):
    with serving(moe, api_key=["key"]) as server:
        for given, status in (({}, 401), ({"api-key": "another"}, 401), ({"api-key": "key"}, 200)):
            url = f"{server.url}{start}/v1/models"
            assert httpx.get(url, headers=given).status_code == status


def test_a_deployment_is_the_model_whatever_the_body_names(server):
    body = CHAT | {"model": "gpt-4o"}
    for name, status in (("tiny", 200), ("gpt-4o", 404)):
        for slash in ("/", "//"):
            path = f"{slash}openai/deployments/{name}/chat/completions?api-version=2024-10-21"
            answer = httpx.post(server.url + path, json=body, timeout=60)
            assert answer.status_code == status
    assert answer.json()["error"]["param"] == "model"


def test_models_have_the_form_of_the_api_that_asks(server):
    with server.client() as client, server.anthropic() as other:
        assert [model.id for model in client.models.list()] == ["tiny"]
        page = other.models.list()
        assert [(model.id, model.type) for model in page] == [("tiny", "model")]
        assert (page.first_id, page.last_id, page.has_more) == ("tiny", "tiny", False)
        model = other.models.retrieve("tiny")
        assert (model.display_name, model.max_input_tokens) == ("tiny", 512)
        assert model.created_at.year > 2000
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (card["type"], card["max_context_length"]) == ("base", 512), "Mistral's client needs it"
    assert card["capabilities"].keys() == {"completion_chat", "function_calling", "vision"}
    missing = httpx.get(f"{server.url}/v1/models/x", headers={"anthropic-version": "2023-06-01"})
    assert missing.json()["error"]["type"] == "not_found_error"


def test_answers_name_the_tier_of_service_that_groqs_clients_want(server):
    with server.client() as client:
        assert client.chat.completions.create(model="tiny", **CHAT).service_tier == "default"
        chunks = client.chat.completions.create(model="tiny", stream=True, **CHAT)
        assert {chunk.service_tier for chunk in chunks} == {"default"}


def test_input_tokens_of_a_response_are_those_it_counts(server):
    with server.client() as client:
        counted = client.responses.input_tokens.count(model="tiny", input=PROMPT)
        answer = client.responses.create(model="tiny", input=PROMPT, max_output_tokens=1)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens
    assert counted.object == "response.input_tokens"


def test_a_model_may_have_several_names(moe):
    with serving(moe, served_name="large, small") as server, server.client() as client:
        assert [model.id for model in client.models.list()] == ["large", "small"]
        assert client.models.retrieve("small").id == "small"
        for name in ("large", "small", "small:latest"):
            answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=1)
            assert answer.model == "large"
        refused = httpx.post(
            f"{server.url}/v1/completions", json={"model": "gpt-4", "prompt": "w5"}
        )
        assert refused.status_code == 404
        assert "'large' or 'small'" in refused.json()["error"]["message"]


def test_any_model_may_be_named_if_the_server_says_so(moe):
    with serving(moe, any_model=True) as server, server.anthropic() as client:
        answer = client.messages.create(model="claude-opus-5", **CHAT)
        assert answer.model == "tiny"


@pytest.mark.parametrize("names", ["", ",", " , "])
def test_a_list_without_a_name_is_refused_at_the_start(names):
    with pytest.raises(ConfigError, match="--model-name"):
        ServeConfig(served_name=names)


# pages of other sites

SITE = "https://app.example"
ASKED = {
    "Origin": SITE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}
SENT = {"Origin": SITE, "Sec-Fetch-Site": "cross-site", "Authorization": "Bearer key"}


def test_pages_of_an_allowed_origin_may_ask(moe):
    with serving(moe, cors=[SITE], api_key=["key"]) as server:
        url = f"{server.url}/v1/completions"
        before = httpx.options(url, headers=ASKED)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == SITE
        answer = httpx.post(url, json=BODIES["/v1/completions"], headers=SENT, timeout=60)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, SITE)
        keyless = httpx.post(url, json={}, headers={"Origin": SITE})
        assert (keyless.status_code, keyless.headers["access-control-allow-origin"]) == (401, SITE)
        other = httpx.post(url, json={}, headers=SENT | {"Origin": "https://evil.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers


def test_pages_of_all_origins_may_be_allowed(moe):
    with serving(moe, cors=["*"]) as server:
        url = f"{server.url}/v1/completions"
        assert httpx.options(url, headers=ASKED).headers["access-control-allow-origin"] == "*"
        answer = httpx.post(url, json=BODIES["/v1/completions"], headers=SENT, timeout=60)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_without_cors_there_is_none(server):
    url = f"{server.url}/v1/completions"
    assert httpx.options(url, headers=ASKED).status_code == 405
    assert httpx.post(url, json={}, headers=SENT).status_code == 403


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://", "*.example"])
def test_what_is_no_origin_is_refused_at_the_start(origin):
    with pytest.raises(ConfigError, match="--cors"):
        ServeConfig(cors=[origin])


# refusals

SECRET = "SecretOfTheUser"


def total(server: Serving, route: str, status: int) -> float:
    name = f'moe_infinity_http_refusals_total{{route="{route}",status="{status}"}} '
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", {"prompt": SECRET, "n": 99}, 400, "n:"),
        ("/v1/completions", {"prompt": [SECRET, 1.5]}, 400, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": SECRET}]}, 400, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": SECRET}]}, 400, "max_tokens"),
        ("/v1/responses", {"input": SECRET, "model": "gpt-4\n"}, 404, "gpt-4"),
        ("/tokenize", f'{{"prompt": "{SECRET}" ', 400, "the body is not JSON"),
        ("/nothing", {"prompt": SECRET}, 404, "Not Found"),
    ],
)
def test_a_refusal_is_one_line_of_the_log_and_counted(server, caplog, path, body, status, says):
    route = "no route" if path == "/nothing" else path
    before = total(server, route, status)
    refusals = httpx.get(f"{server.url}/stats").json()["refusals"]
    content = {"content": body} if isinstance(body, str) else {"json": body}
    with caplog.at_level(logging.WARNING):
        answer = httpx.post(server.url + path, **content, timeout=60)
    assert answer.status_code == status
    (line,) = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert line.startswith(f"refused POST {route}: {status} ")
    assert says in line
    assert SECRET not in line
    assert "\n" not in line
    assert total(server, route, status) == before + 1
    assert httpx.get(f"{server.url}/stats").json()["refusals"] == refusals + 1


def test_what_a_template_says_is_not_logged(server, caplog, monkeypatch):
    template = "{{ raise_exception('I do not like ' + messages[0]['content']) }}"
    monkeypatch.setattr(server.moe.tokenizer, "chat_template", template)
    body = {"messages": [{"role": "user", "content": SECRET}]}
    with caplog.at_level(logging.WARNING):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert SECRET in answer.json()["error"]["message"]
    (line,) = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert "400 messages: the chat template does not take these messages: " in line
    assert SECRET not in line


def test_a_stream_that_fails_is_logged_and_counted(server, caplog, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a disk full of " + SECRET)

    monkeypatch.setattr(server.engine._passes, "prefill", fail)
    before = total(server, "/v1/completions", 500)
    body = BODIES["/v1/completions"] | {"stream": True}
    with caplog.at_level(logging.WARNING):
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert '"generation failed: RuntimeError"' in answer.text
    assert "refused POST /v1/completions: 500 generation failed: RuntimeError" in caplog.messages
    assert total(server, "/v1/completions", 500) == before + 1
