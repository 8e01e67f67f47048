"""The server as a process of its own: started, told to stop, talked to from a terminal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
OLD = [sys.executable, "-m", "moe_infinity.entrypoints.openai.api_server"]
NEW = [sys.executable, "-m", "moe_infinity", "serve"]
# Stays where the history is written but not yet in its place.
STUCK = "import os, time; os.fsync = lambda _: time.sleep(60); "
STUCK += "from moe_infinity.__main__ import main; main()"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def started(*command: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(url, process) once it is ready."""
    port = free_port()
    process = subprocess.Popen(
        [*map(str, command), "--port", str(port)], stderr=subprocess.PIPE, text=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, process.communicate()[1]
            try:
                if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.communicate()


def ask(url: str, max_tokens: int) -> httpx.Response:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": max_tokens}
    body |= {"temperature": 0, "logit_bias": {"0": -100}}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_sigterm_lets_requests_finish_and_then_writes_the_history(tmp_path):
    """And so it is started the old way."""
    history = tmp_path / "history.npz"
    options = ["--model", DEMO, "--offload-dir", tmp_path, "--history", history]
    with started(*OLD, *options) as (url, process), ThreadPoolExecutor() as threads:
        assert httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"] == "demo"
        running = threads.submit(ask, url, 200)
        while not httpx.get(f"{url}/stats", timeout=60).json()["engine"]["decoding"]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        answer = running.result()
        assert answer.json()["usage"]["completion_tokens"] == 200
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert "--offload-dir has no effect" in process.stderr.read()
    assert history.stat().st_size > 0


def test_a_second_sigterm_stops_what_runs():
    with started(*NEW, DEMO) as (url, process), ThreadPoolExecutor() as threads:
        running = threads.submit(ask, url, 1000)
        while not httpx.get(f"{url}/stats", timeout=60).json()["engine"]["decoding"]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        with suppress(httpx.TransportError):  # it may also go without an answer
            assert running.result().status_code == 500


def test_sigkill_while_the_history_is_written_leaves_the_old_one(tmp_path):
    history = tmp_path / "history.npz"
    with started(*NEW, DEMO, "--history", history) as (url, process):
        assert ask(url, 20).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    before = history.read_bytes()
    stuck = [sys.executable, "-c", STUCK, "serve", DEMO, "--history", history]
    with started(*stuck) as (url, process):
        assert ask(url, 20).status_code == 200
        process.send_signal(signal.SIGTERM)
        while not list(tmp_path.glob("*.partial")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
    assert history.read_bytes() == before
    with started(*NEW, DEMO, "--history", history) as (url, process):
        assert ask(url, 20).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert history.read_bytes() != before


def test_chat_talks_to_a_server(tmp_path):
    environment = os.environ | {"MOE_INFINITY_API_KEY": "k"}
    with started(*NEW, DEMO, "--api-key", "k") as (url, _):
        chat = [sys.executable, "-m", "moe_infinity", "chat", "--url", url]
        chat += ["--max-new-tokens", "8"]
        question = "What is a fever?\n"
        talk = subprocess.run(chat, input=question, capture_output=True, text=True, env=environment)
        assert (talk.returncode, talk.stderr.count("error")) == (0, 0)
        body = {"messages": [{"role": "user", "content": question.strip()}], "max_tokens": 8}
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json=body | {"temperature": 0},
            headers={"Authorization": "Bearer k"},
            timeout=30,
        )
        assert talk.stdout == answer.json()["choices"][0]["message"]["content"] + "\n"
        refused = subprocess.run(chat, input=question, capture_output=True, text=True)
        assert refused.returncode == 1
        assert "API key" in refused.stderr
