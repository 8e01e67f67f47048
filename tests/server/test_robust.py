"""What a server must survive: clients that go away, too much at once, too large, without a key."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from moe_infinity.errors import CheckpointError, ConfigError
from moe_infinity.server import limits
from moe_infinity.server.app import PAGE
from moe_infinity.server.config import ServeConfig
from tests.server.serving import Serving, serving

LONG: dict[str, Any] = {"prompt": "w5 w6", "max_tokens": 400, "logit_bias": {"1": -100}}
SHORT: dict[str, Any] = {"prompt": "w5 w6", "max_tokens": 4, "temperature": 0}


def post(server: Serving, body: dict[str, Any], **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, **options)


def raw_request(server: Serving, body: dict[str, Any]) -> socket.socket:
    """A request whose connection we hold in our hands."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


# clients that go away


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_leaves_nothing_behind(server, is_stream):
    before = server.engine.counts.cancelled
    connection = raw_request(server, LONG | {"stream": is_stream})
    server.wait_until(lambda: server.engine.state()["decoding"] == 1)
    connection.close()
    server.wait_until_idle()
    assert server.engine.counts.cancelled == before + 1
    assert server.engine.state()["kv_bytes"] == 0
    server.moe.check_invariants()


def test_clients_that_go_away_before_their_turn_are_forgotten(server):
    connections = [raw_request(server, LONG | {"stream": i % 2 == 0}) for i in range(12)]
    server.wait_until(lambda: server.num_sequences == 12)
    for connection in connections[4:]:
        connection.close()
    server.wait_until(lambda: server.num_sequences == 4)
    for connection in connections[:4]:
        connection.close()
    server.wait_until_idle()


def test_connections_reset_in_midstream_many_times(server):
    """As after kill -9 of a client: the kernel sends a reset, nothing is said."""
    for turn in range(40):
        connection = raw_request(server, LONG | {"stream": True})
        if turn % 2:
            connection.recv(64)
        linger_off = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER of 0 s: RST, not FIN
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_off)
        connection.close()
    server.wait_until_idle()
    assert server.engine.state()["kv_bytes"] == 0
    assert post(server, SHORT).status_code == 200


# too much


def test_a_full_queue_answers_429_and_when_to_come_again(moe):
    with serving(moe, max_batch=1, max_queue=1) as server:
        connections = [raw_request(server, LONG)]
        server.wait_until(lambda: server.engine.state()["decoding"] == 1)
        connections.append(raw_request(server, LONG))
        server.wait_until(lambda: server.engine.state()["waiting"] == 1)
        refused = post(server, SHORT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "queue_full"
        for connection in connections:
            connection.close()
        server.wait_until_idle()
        assert post(server, SHORT).status_code == 200


def test_a_request_past_its_deadline_answers_504(moe):
    with serving(moe, deadline=0.05) as server:
        late = post(server, LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        with server.client() as client, pytest.raises(openai.APIError, match="more than 0.05 s"):
            list(client.completions.create(model="tiny", stream=True, **LONG))
        server.wait_until_idle()


def test_a_body_too_large_answers_413_whatever_it_declares(moe):
    with serving(moe, max_body=1000) as server:
        large = json.dumps(SHORT | {"user": "x" * 2000}).encode()
        for content in (large, iter([large[:500], large[500:]])):
            answer = httpx.post(f"{server.url}/v1/completions", content=content, timeout=60)
            assert answer.status_code == 413
        assert post(server, SHORT).status_code == 200


# keys and doors


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("drips", [True, False])
def test_a_body_that_does_not_arrive_answers_408_and_disturbs_nobody(
    server, monkeypatch, path, drips
):
    monkeypatch.setattr(limits, "UPLOAD_S", replace(limits.UPLOAD_S, most=1))
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt": "')
        assert post(server, SHORT).status_code == 200
        if drips:
            with contextlib.suppress(OSError):  # until the connection is cut
                while not select.select([connection], [], [], 0.02)[0]:
                    connection.sendall(b"w")
        reply = b""
        with contextlib.suppress(ConnectionResetError):  # what was sent meanwhile resets it
            while piece := connection.recv(1 << 16):
                reply += piece
    status, _, text = reply.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 408 ")
    answer = json.loads(text)
    assert answer["error"]["message"] == "the body did not arrive within 1 s"
    assert ("code" in answer["error"]) == (path == "/v1/completions")
    assert answer.get("type") == ("error" if path == "/v1/messages" else None)
    assert server.num_sequences == 0


def test_without_the_key_only_health_and_the_page_answer(moe):
    with serving(moe, api_key=["sésame"]) as server:
        right = {"Authorization": "Bearer sésame".encode()}
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "sésame".encode()}):
            for path in ("/v1/models", "/metrics", "/stats"):
                answer = httpx.get(server.url + path, headers=wrong, timeout=60)  # type: ignore[arg-type]
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
            assert post(server, SHORT, headers=wrong).status_code == 401
        for path in ("/", "/health", "/health/live", "/health/ready"):
            assert httpx.get(server.url + path, timeout=60).status_code == 200
        assert post(server, SHORT, headers=right).status_code == 200
        assert server.engine.counts.finished == 1


def test_keys_may_be_many_and_share_no_prefixes(moe, tmp_path):
    file = tmp_path / "keys"
    file.write_text("two\n\n three \n")
    long = LONG | {"prompt": "w5 " * 40, "max_tokens": 2}

    def cached(server: Serving, key: str) -> int:
        answer = post(server, long, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    with serving(moe, api_key=["one"], api_key_file=file, prefix_cache="16MiB") as server:
        assert post(server, SHORT, headers={"Authorization": "Bearer four"}).status_code == 401
        shares = [cached(server, key) for key in ("one", "two", "three", "two")]
    assert shares == [0, 0, 0, 32]


def test_a_file_without_keys_is_refused(moe, tmp_path):
    file = tmp_path / "keys"
    for text in (None, " \n"):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match="keys: "):
            ServeConfig(api_key_file=file).keys()


def test_names_that_stand_for_our_address_are_refused(moe):
    with serving(moe, allowed_host=["moe.example"]) as server:
        for host, status in (
            ("localhost:8000", 200),
            ("127.0.0.1", 200),
            ("[::1]:8000", 200),
            ("moe.example:80", 200),
            ("evil.example:8000", 403),
            ("127.0.0.1.evil.example", 403),
        ):
            answer = post(server, SHORT, headers={"Host": host})
            assert answer.status_code == status, (host, answer.text)


def test_other_sites_are_told_nothing(server):
    headers = {"Origin": "https://example.org"}
    for answer in (
        httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60),
        httpx.options(f"{server.url}/v1/completions", headers=headers, timeout=60),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert post(server, SHORT, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200
    assert post(server, SHORT, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://192.168.1.5:8000"}, 200),
        ({"Origin": "HTTP://192.168.1.5:8000"}, 200),
        ({"Origin": "http://example.org"}, 403),
        ({"Origin": "http://192.168.1.5"}, 403),
        ({"Origin": "http://192.168.1.5:3000"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "null", "Host": ""}, 403),
        ({"Origin": "http://192.168.1.5", "Host": "192.168.1.5:80"}, 200),
        ({"Origin": "http://192.168.1.5:3000", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://example.org", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://192.168.1.5:8000", "Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_a_page_of_another_origin_is_refused_where_the_browser_tells_no_more(
    server, headers, status
):
    """Over plain HTTP to another machine there is an Origin, and no Sec-Fetch-Site."""
    headers = {"Host": "192.168.1.5:8000"} | headers
    assert post(server, SHORT, headers=headers).status_code == status


def test_logs_have_sizes_and_no_prompts(server, caplog):
    caplog.set_level(logging.DEBUG)
    post(server, SHORT | {"prompt": "w99 w98 w97"})
    post(server, {"prompt": "w99 w98 w97", "temperature": "w96"})
    server.wait_until(lambda: "3 + 4 tokens" in caplog.text)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith(("moe_infinity", "uvi"))]
    assert "w9" not in " ".join(ours)


# errors and health


def test_health_tells_live_and_ready_apart(moe):
    with serving(moe) as server:
        assert httpx.get(f"{server.url}/health", timeout=60).json()["ready"] is True
        assert httpx.head(f"{server.url}/health", timeout=60).status_code == 200
        server.engine.drain()
        assert httpx.get(f"{server.url}/health/live", timeout=60).status_code == 200
        assert httpx.get(f"{server.url}/health/ready", timeout=60).status_code == 503
        refused = post(server, SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopped")


def test_the_death_of_the_engine_shows_in_health_and_fails_who_waits(moe):
    with serving(moe) as server, ThreadPoolExecutor() as threads:
        waiting = threads.submit(post, server, LONG)
        server.wait_until(lambda: server.engine.state()["decoding"] == 1)
        server.engine._is_consistent = lambda: False  # type: ignore[method-assign]
        server.engine._seating.admit = lambda: 1 / 0  # type: ignore[method-assign,assignment]
        assert waiting.result(10).status_code == 503
        server.wait_until(lambda: server.engine.death is not None)
        health = httpx.get(f"{server.url}/health", timeout=60)
        assert health.status_code == 503
        assert "ZeroDivisionError" in health.json()["error"]
        assert httpx.get(f"{server.url}/health/live", timeout=60).status_code == 503


def test_an_error_in_generation_is_500_without_detail_and_an_event_in_a_stream(moe, monkeypatch):
    with serving(moe) as server, server.client() as client:

        def broken(*args: Any) -> Any:
            raise CheckpointError("/secret/place is gone")

        monkeypatch.setattr(server.engine._passes, "decode", broken)
        failed = post(server, SHORT)
        assert failed.status_code == 500
        assert "secret" not in failed.text
        with pytest.raises(openai.APIError, match="generation failed: CheckpointError"):
            list(client.completions.create(model="tiny", stream=True, **SHORT))
        monkeypatch.undo()
        assert post(server, SHORT).status_code == 200


def test_health_answers_at_once_while_others_generate(server):
    connections = [raw_request(server, LONG | {"stream": True}) for _ in range(4)]
    server.wait_until(lambda: server.engine.state()["decoding"] >= 1)
    seconds = []
    with httpx.Client(timeout=60) as http:
        for _ in range(40):
            began = time.perf_counter()
            assert http.get(f"{server.url}/health").status_code == 200
            seconds.append(time.perf_counter() - began)
    for connection in connections:
        connection.close()
    server.wait_until_idle()
    assert sorted(seconds)[len(seconds) // 2] < 0.05  # p95 is benchmarks/serve_load.py's to show


# metrics and the page


def test_metrics_and_stats_add_up(moe):
    with serving(moe) as server:
        post(server, SHORT)
        post(server, {"prompt": 5})
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        assert 'moe_infinity_tokens_total{kind="generated"} 4.0' in text
        assert 'moe_infinity_tokens_total{kind="prompt"} 2.0' in text
        assert 'moe_infinity_sequences_ended_total{outcome="finished"} 1.0' in text
        assert 'moe_infinity_http_responses_total{route="/v1/completions",status="400"} 1.0' in text
        stats = httpx.get(f"{server.url}/stats", timeout=60).json()
        assert len(stats["experts"]) == 3
        assert all(len(row) == 8 and set(row) <= set(".lhH") for row in stats["experts"])
        assert any("H" in row for row in stats["experts"])  # the last step used some
        placed = sum(len(row) - row.count(".") for row in stats["experts"])  # some still load
        assert placed >= stats["report"]["tiers"]["host"]["experts"]
        assert stats["ttft"]["count"] == 1
        assert f"moe_infinity_ttft_seconds_sum {stats['ttft']['seconds']}" in text
        capacity = stats["engine"]["prefix_capacity_bytes"]
        assert 0 <= stats["engine"]["prefix_bytes"] <= capacity
        shown = re.search(r"^moe_infinity_prefix_capacity_bytes (.*)$", text, re.M)
        assert shown is not None
        assert float(shown[1]) == capacity


def test_the_page_and_its_files_ask_only_this_server(server):
    answer = httpx.get(server.url, timeout=60)
    assert answer.headers["content-type"].startswith("text/html")
    names = re.findall(r'(?:src|href)="(page/[^"]+)"', answer.text)
    assert len(names) == 3
    modules = [f"page/{file.name}" for file in PAGE.glob("*.js") if ".min." not in file.name]
    for name in ("", *names, *modules, "page/highlight.min.js", "page/highlight.LICENSE"):
        answer = httpx.get(f"{server.url}/{name}", timeout=60)
        assert answer.status_code == 200
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        known = {"If-None-Match": answer.headers["etag"]}
        assert httpx.get(f"{server.url}/{name}", headers=known, timeout=60).status_code == 304
        assert not re.search(r"(src|href|url|import|fetch)\W+https?://", answer.text)
    for wrong in ("none.js", "..%2fapp.py", "%2e%2e/app.py"):
        assert httpx.get(f"{server.url}/page/{wrong}", timeout=60).status_code == 404
