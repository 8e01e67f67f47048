"""What needs Ray: `make test-cluster`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe_infinity import MoE

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `cluster`"),
]

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "demo"
DEMO = ROOT / "examples" / "cluster_demo.py"
PROMPT = "The old house stood at the edge of the moor, and"
NUM_CLIENTS = 16
NUM_TOKENS = 48


STRANGER = "import ray, sys; ray.init(address=sys.argv[1]); print('is in')"
# Prints who can join a Ray of our own: with its token, with another one, with none.
HOST_OF_STRANGERS = """
import json, os, subprocess, sys
import ray
from moe_infinity.cluster.serving import joined
with joined(None):
    command = [sys.executable, "-c", sys.argv[1], ray.get_runtime_context().gcs_address]
    told = []
    for more in ({}, {"RAY_AUTH_TOKEN": "x" * 64}, {"RAY_AUTH_MODE": "disabled"}):
        done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True)
        told.append("is in" in done.stdout)
print(json.dumps(told))
"""


def children() -> set[str]:
    """Processes of ours or Ray's that are running."""
    found = subprocess.run(
        ["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True
    )
    names = ("raylet", "gcs_server", "ray::", "moe_infinity.cluster")
    lines = (line.split(None, 2) for line in found.stdout.splitlines())
    return {pid for pid, stat, args in lines if "Z" not in stat and any(n in args for n in names)}


def gone(before: set[str]) -> bool:
    give_up_at = time.monotonic() + 30
    while children() - before:
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.5)
    return True


def test_the_demo_ends_well_and_leaves_nothing():
    before = children()
    command = [sys.executable, str(DEMO), str(MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all as with one process\n")
    assert gone(before)


def test_a_cluster_that_is_not_there_is_an_error():
    command = [sys.executable, "-m", "moe_infinity", "run", str(MODEL), "-p", "x"]
    command += ["--expert-hosts", "1", "--cluster", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "no Ray at 127.0.0.1:1" in done.stderr


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Two replicas behind an address, by the command."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "moe_infinity", "serve", str(MODEL), "--replicas", "2"]
    command += ["--port", str(port), "--max-batch", "4", "--host-memory", "50%", *request.param]
    before = children()
    process = subprocess.Popen(command, text=True, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        await_health(url, process)
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(120)
    assert status == 0
    assert gone(before)


def await_health(url: str, process: subprocess.Popen[str]) -> None:
    give_up_at = time.monotonic() + 120
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        assert process.poll() is None
        assert time.monotonic() < give_up_at
        time.sleep(0.5)


def replica_pids() -> list[int]:
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    lines = (line.split(None, 1) for line in found.stdout.splitlines())
    return [int(pid) for pid, args in lines if args.startswith("ray::ServeReplica:default:Replica")]


def streamed(url: str) -> tuple[str, str]:
    """The text of one answer, and how it ended."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        if answer.status_code != 200:
            return text, f"status {answer.status_code}"
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return text, "done"
            if data.startswith("{"):
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    return text, str(event["error"]["code"])
                text += event["choices"][0]["text"]
    return text, "cut"


@pytest.mark.parametrize("served", [[], ["--router", "hash"]], indirect=True)
def test_what_a_killed_replica_computed_is_lost_only_after_a_token(served, capsys):
    url, _ = served
    assert httpx.delete(f"{url}/v1/responses/none", timeout=60).status_code == 404
    with MoE(MODEL, device="cpu") as moe:
        stream = moe.stream(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)
        for _ in stream:
            pass
    alone = stream.text
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        answers = [threads.submit(streamed, url) for _ in range(NUM_CLIENTS)]
        time.sleep(0.7)
        killed = replica_pids()[0]
        os.kill(killed, signal.SIGKILL)
        started = time.monotonic()
        found = [answer.result() for answer in answers]
    for text, end in found:
        assert end in ("done", "replica_lost"), found
        assert text == alone if end == "done" else (text and alone.startswith(text)), (text, end)
    lost = sum(end == "replica_lost" for _, end in found)
    while len(replica_pids()) < 2 or killed in replica_pids():
        assert time.monotonic() - started < 180
        time.sleep(0.5)
    assert streamed(url) == (alone, "done")
    took_s = time.monotonic() - started
    with capsys.disabled():
        sys.stdout.write(f"\n{lost} of {NUM_CLIENTS} lost; two replicas after {took_s:.1f} s\n")


def test_a_ray_of_our_own_refuses_who_has_not_its_token_and_writes_it_nowhere(tmp_path):
    """It listens on all addresses of the machine."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", HOST_OF_STRANGERS, STRANGER],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [True, False, False], done.stderr
    assert not list(tmp_path.glob("**/auth_token"))


def test_a_ray_without_tokens_is_warned_of():
    code = "from moe_infinity.cluster.serving import keep_others_out as keep; keep()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert "whoever reaches this machine can run code on it" in done.stderr
