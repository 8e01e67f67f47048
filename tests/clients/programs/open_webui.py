"""Open WebUI, started as the guide says, and asked by the routes that its page asks."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
from common import KIND, MODEL, PROMPT

START_S = 200
MESSAGES = [{"role": "user", "content": PROMPT}]
ONLY = {
    "type": "object",
    "properties": {"city": {"enum": ["Graz"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": ONLY}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": ONLY}}


@contextlib.contextmanager
def page():
    """Start it on a free port; yields a client that has signed in."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    guide = Path("guide.sh").read_text().rstrip()
    process = subprocess.Popen(["bash", "-ec", f"{guide} --host 127.0.0.1 --port {port}"])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100) as client:
            wait_until_ready(client, process)
            nobody = {"email": "", "password": ""}
            token = client.post("/api/v1/auths/signin", json=nobody).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            models = client.get("/api/models").json()["data"]
            assert [model["id"] for model in models] == [MODEL], models
            yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        process.wait(20)


def wait_until_ready(client, process):
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    raise TimeoutError("Open WebUI does not start")


def ask(client, messages=MESSAGES, **fields):
    body = {"model": MODEL, "messages": messages, "stream": False, "max_tokens": 100, **fields}
    answer = client.post("/api/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def plain(client):
    message = ask(client, params={"temperature": 0.5, "top_k": 5, "num_ctx": 4096, "seed": 1})
    assert ask(client, [*MESSAGES, message, *MESSAGES])
    named = client.post(
        "/api/v1/tasks/title/completions",
        json={"model": MODEL, "messages": [*MESSAGES, message], "chat_id": "local:1"},
    )
    assert named.status_code == 200, named.text


def stream(client):
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 100}
    with client.stream("POST", "/api/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert len(lines) > 2
    assert lines[-1] == "data: [DONE]"


def tools(client):
    message = ask(client, tools=[TOOL], tool_choice="required", max_tokens=200)
    call = message["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"city": "Graz"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    assert ask(client, [*MESSAGES, message, result], tools=[TOOL], tool_choice="none")


def structured(client):
    message = ask(client, response_format=SCHEMA)
    assert json.loads(message["content"]) == {"city": "Graz"}


def cancel(client):
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/api/chat/completions", json=body) as answer:
        next(answer.iter_lines())


with page() as client:
    KINDS = {each.__name__: each for each in (plain, stream, tools, structured, cancel)}
    KINDS[KIND](client)
