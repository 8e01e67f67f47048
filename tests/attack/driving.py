"""A server in a process of its own with little memory, a client whose answers are checked, and
attackers in a process that gives way to both.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = Path("models/demo")
VICTIM = "key-of-the-victim"
ATTACKERS = tuple(f"key-of-attacker-{number}" for number in range(8))
GOOD = tuple(f"key-of-user-{number}" for number in range(4))
MEMORY = 2 << 30  # beside the model, which is small
PERIOD_S = 0.2
ASKED = {"prompt": "The old house stood", "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Target:
    """Where the server is."""

    port: int

    def ask(
        self, method: str, path: str, body: Any = None, key: str = "", timeout: float = 120.0
    ) -> tuple[int, bytes]:
        """Return status and body. Raises OSError and http.client.HTTPException."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    @contextlib.contextmanager
    def connected(self, sent: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as client:
            client.sendall(sent)
            yield client


@dataclass(frozen=True)
class Server(Target):
    """The process of a server, and what it uses."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def resident(self) -> int:
        """Bytes of memory now."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) << 10
        return 0

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def attacked_server(folder: Path, *options: str) -> Iterator[Server]:
    """A server of the bundled model in a memory group, warm."""
    from benchmarks.limits import memory_cgroup

    port = free_port()
    keys = [part for key in (VICTIM, *ATTACKERS, *GOOD) for part in ("--api-key", key)]
    command = [
        sys.executable, "-m", "moe_infinity", "serve", str(MODEL), "--port", str(port),
        "--prefix-cache", "32MiB", *keys, *options,
    ]  # fmt: skip
    log = folder / "server.log"
    with memory_cgroup(MEMORY) as group, log.open("wb") as written:

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        process = subprocess.Popen(command, stdout=written, stderr=written, preexec_fn=join)
        server = Server(port, process, log)
        try:
            wait_until_ready(server)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
            time.sleep(1)  # until the process for templates has ended, too


def wait_until_ready(server: Server) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end and not server.has_ended:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if server.ask("GET", "/health", timeout=5)[0] == 200:
                break
        time.sleep(0.3)
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    for path, body in (("completions", ASKED), ("chat/completions", chat)):
        for _ in range(3):
            status, text = server.ask("POST", f"/v1/{path}", body, VICTIM)
            assert status == 200, (text, server.log.read_text())


@dataclass
class Seen:
    """What one well-behaved client saw."""

    seconds: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    @property
    def worst_s(self) -> float:
        return max(self.seconds, default=0.0)

    def p95_s(self) -> float:
        ordered = sorted(self.seconds)
        return ordered[int(len(ordered) * 0.95)]


@contextlib.contextmanager
def watching(server: Server, key: str = VICTIM) -> Iterator[Seen]:
    """A client that asks all the time, one that looks at /health, and a look at the memory."""
    seen = Seen()
    over = threading.Event()

    def complete() -> None:
        status, body = server.ask("POST", "/v1/completions", ASKED, key)
        assert status == 200, body[:200]
        seen.texts.add(json.loads(body)["choices"][0]["text"])

    def look() -> None:
        status, body = server.ask("GET", "/health")
        assert status == 200, body[:200]

    def measure() -> None:
        seen.resident.append(server.resident)

    def repeat(what: Any, times: list[float]) -> None:
        while not over.wait(PERIOD_S):
            began = time.monotonic()
            try:
                what()
            except Exception as error:  # any of them is a failure
                seen.failures.append(repr(error)[:300])
            times.append(time.monotonic() - began)

    pairs = [(complete, seen.seconds), (look, seen.health_s), (measure, [])]
    threads = [threading.Thread(target=repeat, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join(150)


@contextlib.contextmanager
def attackers(server: Server, kinds: str, seconds: float, num: int) -> Iterator[dict[str, int]]:
    """Processes that attack for a while, and how many requests each kind has tried at the end."""
    tried: dict[str, int] = {}
    command = [
        "nice", "-n", "10", sys.executable, "-m", "tests.attack.kinds", str(server.port), kinds,
        str(seconds), str(num),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        yield tried
        output, _ = process.communicate(timeout=seconds + 200)
        tried.update(json.loads(output.splitlines()[-1]))
    finally:
        process.kill()
        process.wait()
