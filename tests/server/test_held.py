"""What strangers tried from outside and got nothing of: it stays so (SECURITY.md names these)."""

from __future__ import annotations

import ast
import gzip
import inspect
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import moe_infinity
from moe_infinity import MoE
from moe_infinity.errors import MoEInfinityError
from moe_infinity.server import refusals
from moe_infinity.server.config import LOOPBACK, ServeConfig
from moe_infinity.server.rendering import Renderers, TemplateRaised, TemplateTooSlow
from tests.server.serving import Serving, serving
from tests.server.test_connections import connected

SHORT: dict[str, Any] = {"prompt": "w5 w6", "max_tokens": 2, "temperature": 0}
COMPLETION = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
LAST = b"Host: localhost\r\nConnection: close\r\n\r\n"  # then the server hangs up
HEALTH = b"GET /health HTTP/1.1\r\n" + LAST


def post(server: Serving, body: dict[str, Any], path: str = "completions") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def received(server: Serving, sent: bytes) -> bytes:
    """Return all that a server answers until it is silent or hangs up."""
    with connected(server, sent) as client:
        client.settimeout(2)
        told = b""
        try:
            while data := client.recv(1 << 16):
                told += data
        except (TimeoutError, ConnectionError):
            pass
        return told


# requests


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
    ],
)
def test_a_body_of_unclear_length_hides_no_second_request(head, server):
    """A proxy in front of us may read its length in another way."""
    hidden = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    told = received(server, COMPLETION + head + b"\r\n" + hidden)
    assert b'"owned_by"' not in told
    assert told.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501")) or not told


def test_requests_sent_at_once_are_answered_in_order(server):
    body = json.dumps(SHORT).encode()
    asked = COMPLETION + b"Content-Length: %d\r\n\r\n" % len(body) + body
    told = received(server, asked + HEALTH)
    assert told.count(b"HTTP/1.1 200 ") == 2
    assert told.index(b'"text_completion"') < told.index(b'"ready"')


FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "best_of",
)  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "9" * 5000])
@pytest.mark.parametrize("field", FIELDS)
def test_numbers_that_are_none_are_refused(field, number, server):
    raw = json.dumps(SHORT)[:-1] + f', "{field}": {number}}}'
    answer = httpx.post(f"{server.url}/v1/completions", content=raw.encode(), timeout=60)
    is_cut = field in ("max_tokens", "top_k") and number.isdigit()  # to what there is
    assert answer.status_code in ((200, 400) if is_cut else (400,))


@pytest.mark.parametrize(
    "change",
    [
        {"n": 10**6},
        {"stop": ["x"] * 10_000},
        {"prompt": [10**9]},
        {"prompt": [-1]},
        {"prompt": [[2**63]]},
        {"logit_bias": {str(10**12): 1}},
    ],
    ids=str,
)
def test_too_many_and_out_of_range_are_refused(change, server):
    assert post(server, SHORT | change).status_code == 400


def test_a_packed_body_is_not_unpacked(server):
    packed = gzip.compress(json.dumps(SHORT | {"user": "x" * 10**7}).encode())
    headers = {"content-encoding": "gzip"}
    answer = httpx.post(f"{server.url}/v1/completions", content=packed, headers=headers, timeout=60)
    assert answer.status_code in (400, 415)


def test_a_hundred_thousand_brackets_are_refused(server):
    raw = b'{"prompt": ' + b"[" * 100_000
    answer = httpx.post(f"{server.url}/v1/completions", content=raw, timeout=60)
    assert answer.status_code == 400


def test_streams_that_nobody_reads_hold_nobody_up(server):
    body = json.dumps(SHORT | {"max_tokens": 100, "stream": True}).encode()
    asked = COMPLETION + b"Content-Length: %d\r\n\r\n" % len(body) + body
    clients = [connected(server, asked) for _ in range(6)]
    for client in clients:
        client.__enter__()
    assert post(server, SHORT).status_code == 200
    for client in clients:
        client.__exit__(None, None, None)
    server.wait_until_idle()


@pytest.mark.parametrize(
    "path",
    [
        "/../moe_infinity/server/config.py", "/..%2f..%2fconfig.py", "/%2e%2e/config.py",
        "/page/../../config.py", "//etc/passwd", "/..\\config.py", "/page.js%00.html",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_pages_folder(path, server):
    told = received(server, b"GET %b HTTP/1.1\r\n" % path.encode() + LAST)
    assert told.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400", b"HTTP/1.1 405"))
    assert b"root:" not in told
    assert b"class ServeConfig" not in told


# templates


@pytest.fixture(scope="module")
def renderers() -> Iterator[Renderers]:
    renderers = Renderers(1)
    yield renderers
    renderers.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{% for m in messages %}{{ m.update({'role': 'x'}) }}{% endfor %}",
    ],
)
def test_a_template_of_a_checkpoint_gets_at_no_python(renderers, template):
    messages = [[{"role": "user", "content": "Hi"}]]
    asked = {"conversations": messages, "chat_template": template}
    with pytest.raises(TemplateRaised) as raised:
        renderers.render(asked, time.monotonic() + 60)
    assert not isinstance(raised.value, TemplateTooSlow)


def test_a_template_in_a_message_is_text(server):
    """`{{ 7 * 7 }}` has as many tokens as the same letters without a meaning."""
    asked = {"messages": [{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}], "max_tokens": 1}
    plain = {"messages": [{"role": "user", "content": "(( 7 * 7 ))(% raw %)"}], "max_tokens": 1}
    counts = []
    for body in (asked, plain):
        answer = post(server, body, "chat/completions")
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


def test_a_client_brings_no_template_of_its_own(server):
    asked = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 1}
    without = post(server, asked, "chat/completions").json()["usage"]["prompt_tokens"]
    answer = post(server, asked | {"chat_template": "{{ 'w5 ' * 40 }}"}, "chat/completions")
    assert answer.status_code == 400 or answer.json()["usage"]["prompt_tokens"] == without


# keys


def test_keys_are_compared_in_constant_time():
    compared = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(refusals)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hmac.compare_digest"
    ]
    assert len(compared) == 1
    sources = "".join(
        file.read_text("utf-8")
        for file in (Path(moe_infinity.__file__).parent / "server").glob("*.py")
    )
    assert "in api_keys)" not in sources.replace("for key in api_keys", "")
    assert "== api_key" not in sources


def test_a_server_listens_on_loopback_unless_told_otherwise():
    assert ServeConfig().host in LOOPBACK


def test_metrics_have_no_prompt_and_no_key(moe):
    key = "k-secret-1234567890"
    headers = {"Authorization": f"Bearer {key}"}
    with serving(moe, api_key=[key]) as server:
        body = SHORT | {"prompt": "w5 w6 w7", "user": "somebody"}
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
        stats = httpx.get(f"{server.url}/stats", headers=headers, timeout=60).text
    for secret in (key, "w6 w7", "somebody"):
        assert secret not in text
        assert secret not in stats


# files


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_file_holds_nobody_up(name, tiny_checkpoint, copy_of):
    """Who opens a pipe waits for somebody who writes."""
    folder = copy_of(tiny_checkpoint)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(MoEInfinityError):
        MoE(folder)
