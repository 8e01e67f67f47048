"""Is every answer of the server right under load, and what does batching gain?

    python benchmarks/serve_load.py [--seconds 60] [--arrivals FILE.csv] [--host-memory 50%]
                                    [--kills 30] [--rounds 3] [--experts-implementation auto]

A server process serves a model in float32. There the other sequences of a batch change logits by
less than the distance of any tie, so each greedy answer must equal the answer to that prompt alone.

1. 16 clients send requests of all routes with random gaps (serve_traffic.py): completions, chats,
   calls of tools, answers by a schema, responses, messages, embeddings, about half of them as
   streams. One request in five is dropped in midstream; one in twenty has a bad body. Checked: the
   answers, the delay of /health, what /metrics has counted, the server's memory and open files.
2. Client processes get SIGKILL in midstream, four at a time. Checked: what stays in the server.
3. Tokens per second with all experts resident, decoding one sequence at a time and eight together.
   They are given per second, and per second of the server's CPU time, which other work on the
   machine disturbs less.

With 0 for seconds, kills or rounds that part is left out. The last line is JSON. The exit code is 1
if an answer was wrong or anything stayed in the server.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import httpx
from serve_traffic import COMPLETION, NUM_CLIENTS, PROMPTS, Load, answers_alone

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
NUM_KILLERS = 4


class Server:
    """A server process, with its memory, files and CPU time from /proc."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    @property
    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) * 1024

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stats(self) -> dict[str, Any]:
        engine: dict[str, Any] = httpx.get(f"{self.url}/stats", timeout=30).json()["engine"]
        return engine

    def responses(self) -> dict[tuple[str, int], int]:
        """Those of routes below /v1, by route and status, as /metrics has counted them."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.findall(r'responses_total\{route="/v1/(\S+)",status="(\d+)"\} (\S+)', text)
        return {(path, int(status)): int(float(count)) for path, status, count in found}

    def wait_until_idle(self) -> dict[str, Any]:
        for _ in range(200):
            stats = self.stats()
            if not stats["waiting"] + stats["prefilling"] + stats["decoding"]:
                break
            time.sleep(0.05)
        return stats


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    with create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "moe_infinity",
        "serve",
        str(model),
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [*command, "--dtype", "float32", *options], stderr=subprocess.DEVNULL
    )
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        while True:
            try:
                httpx.get(f"{server.url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                if process.poll() is not None:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Watch(threading.Thread):
    """Samples the delay of /health and the process ten times a second."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.health_s: list[float] = []
        self.rss_bytes: list[int] = []
        self.num_files: list[int] = []
        self._server = server
        self._stop_asked = threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=30) as http:
            while not self._stop_asked.wait(0.1):
                began = time.perf_counter()
                http.get(f"{self._server.url}/health")
                self.health_s.append(time.perf_counter() - began)
                self.rss_bytes.append(self._server.rss_bytes)
                self.num_files.append(self._server.num_files)

    def stop(self) -> dict[str, Any]:
        self._stop_asked.set()
        self.join()
        quarter = len(self.rss_bytes) // 4
        early = statistics.median(self.rss_bytes[quarter : 2 * quarter])
        late = statistics.median(self.rss_bytes[-quarter:])
        ranks = statistics.quantiles(self.health_s, n=100)
        return {
            "health_p50_ms": round(ranks[49] * 1e3, 1),
            "health_p95_ms": round(ranks[94] * 1e3, 1),
            "health_max_ms": round(max(self.health_s) * 1e3, 1),
            "rss_mib": [round(early / 2**20, 1), round(late / 2**20, 1)],
            "rss_growth_percent": round(100 * (late / early - 1), 2),
            "files_most": max(self.num_files),
        }


def gaps_of(arrivals: Path | None) -> list[float]:
    """Seconds between requests of a client, recorded or random, scaled to a mean of 0.5 s."""
    gaps = [random.Random(1).expovariate(1.0) for _ in range(1000)]
    if arrivals is not None:
        with arrivals.open() as file:
            times = [float(row["arrival_s"]) for row in csv.DictReader(file)][:5000]
        gaps = [max(b - a, 0.0) for a, b in zip(times, times[1:], strict=False)]
    mean = statistics.mean(gaps)
    return [0.5 * gap / mean for gap in gaps]


def kill_clients(server: Server, num_kills: int) -> dict[str, Any]:
    body = COMPLETION.body("Once upon a time", 500)
    raw = json.dumps(body | {"stream": True, "logit_bias": {"0": -100}})
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-d", raw]

    def kill_one(turn: int) -> bool:
        client = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert client.stdout is not None
        is_midstream = client.stdout.read(1 + turn % 500) != b""
        client.kill()
        client.wait()
        client.stdout.close()
        return is_midstream

    before = server.stats()
    files_before = server.num_files
    began = time.monotonic()
    rss_bytes = []
    with ThreadPoolExecutor(NUM_KILLERS) as killers:
        midstream = 0
        for is_midstream in killers.map(kill_one, range(num_kills)):
            midstream += is_midstream
            rss_bytes.append(server.rss_bytes)
    seconds = time.monotonic() - began
    stats = server.wait_until_idle()
    time.sleep(0.5)
    fifth = max(num_kills // 5, 1)
    return {
        "kills": num_kills,
        "in_midstream": midstream,
        "cancelled": stats["cancelled"] - before["cancelled"],
        "seconds": round(seconds, 1),
        "left": {name: stats[name] for name in ("waiting", "prefilling", "decoding", "kv_bytes")},
        "files_more": server.num_files - files_before,
        "rss_mib_by_fifths": [
            round(statistics.median(rss_bytes[first : first + fifth]) / 2**20, 1)
            for first in range(0, num_kills, fifth)
        ],
    }


def tokens_per_second(
    model: Path, max_batch: int, seconds: float, implementation: str
) -> dict[str, float]:
    """Generated tokens per second while eight clients always have a request running."""
    options = ["--host-memory", "100%", "--max-batch", str(max_batch)]
    options += ["--experts-implementation", implementation]
    with serving(model, *options) as server:

        async def clients() -> tuple[float, float, float]:
            async with httpx.AsyncClient(timeout=300) as http:
                url = f"{server.url}/v1/completions"

                async def client(number: int) -> None:
                    while True:
                        body = COMPLETION.body(PROMPTS[number], 200) | {"logit_bias": {"0": -100}}
                        await http.post(url, json=body)

                tasks = [asyncio.create_task(client(number)) for number in range(8)]
                await asyncio.sleep(3)
                first = await asyncio.to_thread(server.stats)
                cpu_s = server.cpu_s
                began = time.perf_counter()
                await asyncio.sleep(seconds)
                last = await asyncio.to_thread(server.stats)
                measured = time.perf_counter() - began, server.cpu_s - cpu_s
                for task in tasks:
                    task.cancel()
                tokens = last["generated_tokens"] - first["generated_tokens"]
                return tokens, *measured

        tokens, wall_s, cpu_s = asyncio.run(clients())
    return {"per_s": round(tokens / wall_s, 1), "per_cpu_s": round(tokens / cpu_s, 1)}


def load_figures(server: Server, given: argparse.Namespace) -> dict[str, Any]:
    expected = answers_alone(server.url, given.max_tokens)
    asyncio.run(Load(server.url, expected, [0.1]).run(10, given.max_tokens))  # warm-up
    server.wait_until_idle()
    load = Load(server.url, expected, gaps_of(given.arrivals))
    responses = server.responses()
    watch = Watch(server)
    before = server.stats()
    files_before = server.num_files
    began = time.monotonic()
    watch.start()
    asyncio.run(load.run(given.seconds, given.max_tokens))
    seconds = time.monotonic() - began
    figures = watch.stop()
    after = server.wait_until_idle()
    time.sleep(0.5)
    for what in load.wrong[:5]:
        print("wrong:", what)
    return figures | {
        "seconds": round(seconds, 1),
        "clients": NUM_CLIENTS,
        "outcomes": dict(load.outcomes),
        "miscounted": miscounted(load, responses, server.responses()),
        "wrong": len(load.wrong),
        "left": {name: after[name] for name in ("waiting", "prefilling", "decoding", "kv_bytes")},
        "files_more": server.num_files - files_before,
        "tokens": after["generated_tokens"] - before["generated_tokens"],
    }


def miscounted(
    load: Load, before: dict[tuple[str, int], int], after: dict[tuple[str, int], int]
) -> dict[str, list[int]]:
    """Where the server has counted other numbers of responses than the clients; both numbers."""
    counted = {key: after[key] - before.get(key, 0) for key in after}
    keys = counted.keys() | load.statuses.keys()
    pairs = {f"{key[0]} {key[1]}": [counted.get(key, 0), load.statuses[key]] for key in keys}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def speed_figures(given: argparse.Namespace) -> dict[str, Any]:
    rates: dict[int, list[dict[str, float]]] = {1: [], 8: []}
    for _ in range(given.rounds):
        for max_batch, measured in rates.items():
            rate = tokens_per_second(given.model, max_batch, 8.0, given.experts_implementation)
            measured.append(rate)
    figures: dict[str, Any] = {}
    for kind in ("per_s", "per_cpu_s"):
        one, eight = ([r[kind] for r in rates[b]] for b in (1, 8))
        figures[f"tokens_{kind}"] = {"batch 1": one, "batch 8": eight}
        ratio = statistics.median(eight) / statistics.median(one)
        figures[f"ratio_{kind}"] = round(ratio, 2)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--host-memory", default="50%")
    parser.add_argument("--arrivals", type=Path, help="CSV with a column arrival_s")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison of batch sizes")
    parser.add_argument("--experts-implementation", default="auto")
    given = parser.parse_args()
    result: dict[str, Any] = {"experts_implementation": given.experts_implementation}
    options = ["--host-memory", given.host_memory]
    options += ["--experts-implementation", given.experts_implementation]
    with serving(given.model, *options) as server:
        if given.seconds:
            result["load"] = load_figures(server, given)
        if given.kills:
            result["killed"] = kill_clients(server, given.kills)
    if given.rounds:
        result |= speed_figures(given)
    print(json.dumps(result))
    parts = [result[name] for name in ("load", "killed") if name in result]
    has_left = any(any(part["left"].values()) or part["files_more"] > 0 for part in parts)
    load = result.get("load", {"wrong": 0, "miscounted": {}})
    return int(has_left or load["wrong"] > 0 or bool(load["miscounted"]))


if __name__ == "__main__":
    sys.exit(main())
