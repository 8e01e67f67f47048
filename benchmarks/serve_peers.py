"""How much do our server and llama.cpp's give several clients at once, with the same weights?

    python benchmarks/serve_peers.py MODEL_FOLDER --gguf FILE --llama-server PROGRAM
                                     [--clients 1,4,8] [--seconds 30] [--rounds 2] [--limit 4GiB]
    python benchmarks/serve_peers.py MODEL_FOLDER --arrivals FILE.csv --prompts FOLDER
                                     [--speeds 1,2,4]

Each server runs in a process of its own, and in a memory cgroup if there is a limit, else with its
files in the page cache. Clients ask one request after the other, with streams: prompts of random
tokens, all different, and greedy answers of a fixed length. Both servers decode as many sequences
together as there are clients. The first requests of each client are not counted. Shown are tokens
per second of all clients, seconds to the first token, and milliseconds between tokens.

With arrivals, requests come when the file says, with its numbers of prompt and answer tokens, cut
to what --most-tokens allows. Prompts are texts of the folder's JSONL files, in random order, one
behind the other until they are long enough. A speed of 2 halves the time between requests. Shown is
the latency, and the goodput: the share of requests whose first token came within --first-token-s,
and the others within --next-token-s on average.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_server
from typing import Any

import httpx
from limits import drop_from_page_cache, memory_cgroup

from moe_infinity.sizes import parse_size

FIRST_ID, LAST_ID = 300, 6000  # of random prompts: neither special tokens nor beyond the vocabulary
START_S = 120.0
NO_REUSE = httpx.Limits(max_keepalive_connections=0)  # llama.cpp's server closes some of them


@dataclass
class Answer:
    """Times of one streamed answer, in seconds of time.monotonic()."""

    asked: float
    tokens: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def first_s(self) -> float:
        return self.tokens[0] - self.asked

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.tokens)]


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def our_command(given: argparse.Namespace, port: int, num_clients: int) -> list[str]:
    command = [sys.executable, "-m", "moe_infinity", "serve", str(given.model)]
    command += ["--port", str(port), "--max-batch", str(num_clients)]
    return [*command, *given.option]


def llama_command(given: argparse.Namespace, port: int, num_clients: int) -> list[str]:
    tokens = (given.prompt_tokens + given.answer_tokens + 64) * num_clients
    command = [str(given.llama_server), "-m", str(given.gguf), "--port", str(port)]
    return [*command, "-np", str(num_clients), "-c", str(tokens), "-t", str(os.cpu_count())]


@contextmanager
def serving(command: Sequence[str], port: int, limit_bytes: int | None) -> Iterator[str]:
    """Gives the server's URL once it is healthy."""
    with memory_cgroup(limit_bytes) if limit_bytes else nullcontext() as group:

        def join() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, preexec_fn=join, stdout=quiet, stderr=quiet)
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + START_S
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{command[0]} did not start")
                time.sleep(0.2)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


async def ask(
    http: httpx.AsyncClient, url: str, prompt: list[int], answer_tokens: int, *, is_ours: bool
) -> Answer:
    """One request, streamed."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": answer_tokens, "stream": True}
    body |= {"temperature": 0, "logprobs": 0} if is_ours else {"temperature": 0}
    body |= {"logit_bias": {"0": -100}} if is_ours else {"ignore_eos": True, "cache_prompt": False}
    answer = Answer(time.monotonic())
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.failed = (await response.aread()).decode(errors="replace")[:200]
            return answer
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                choices = json.loads(line[6:]).get("choices") or [{}]
                logprobs = choices[0].get("logprobs") or {}
                count = len(logprobs.get("tokens", ())) if is_ours else 1
                answer.tokens += [now] * count
    return answer


def prompt_of(source: random.Random, num_tokens: int) -> list[int]:
    return [source.randrange(FIRST_ID, LAST_ID) for _ in range(num_tokens)]


async def closed_loop(url: str, given: argparse.Namespace, num_clients: int, is_ours: bool) -> Any:
    """Clients that ask again as soon as they have an answer."""
    answers: list[Answer] = []
    async with httpx.AsyncClient(timeout=600, limits=NO_REUSE) as http:
        start = time.monotonic() + given.warm_up_s
        stop = start + given.seconds

        async def client(number: int) -> None:
            source = random.Random(number)
            while time.monotonic() < stop:
                prompt = prompt_of(source, given.prompt_tokens)
                answer = await ask(http, url, prompt, given.answer_tokens, is_ours=is_ours)
                answers.append(answer)
                if answer.failed:
                    raise SystemExit(answer.failed)

        tasks = [asyncio.create_task(client(number)) for number in range(num_clients)]
        await asyncio.gather(*tasks)
    counted = [t for answer in answers for t in answer.tokens if start <= t < stop]
    later = [answer for answer in answers if answer.asked >= start - given.warm_up_s / 2]
    later = later or answers  # one answer may take longer than all of the time
    gaps = [gap for answer in later for gap in answer.gaps_s]
    return {
        "tokens_per_s": len(counted) / given.seconds,
        "first_s": percentiles([answer.first_s for answer in later]),
        "next_ms": percentiles([1e3 * gap for gap in gaps]),
    }


def percentiles(values: Sequence[float]) -> list[float]:
    """p50 and p95."""
    ordered = sorted(values)
    return [round(ordered[int(share * (len(ordered) - 1))], 3) for share in (0.5, 0.95)]


class Prompts:
    """Token ids of the texts of a folder, in random order, without an end."""

    def __init__(self, folder: Path, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.open()]
        random.Random(0).shuffle(lines)
        self._lines = itertools.cycle(lines)

    def take(self, num_tokens: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += self._tokenizer.encode(json.loads(next(self._lines))["prompt"]).ids
        return ids[:num_tokens]


async def open_loop(
    url: str, given: argparse.Namespace, prompts: Prompts, speed: float
) -> dict[str, Any]:
    """Requests that come when the file says."""
    with given.arrivals.open() as file:
        rows = list(itertools.islice(csv.DictReader(file), given.num_requests))
    texts = [prompts.take(min(int(row["context_tokens"]), given.most_tokens)) for row in rows]
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=600, limits=NO_REUSE) as http:

        async def request(row: dict[str, str], prompt: list[int]) -> Answer:
            await asyncio.sleep(float(row["arrival_s"]) / speed)
            num_answer = max(1, min(int(row["generated_tokens"]), given.most_tokens // 8))
            return await ask(http, url, prompt, num_answer, is_ours=True)

        answers = await asyncio.gather(*map(request, rows, texts))
    seconds = time.monotonic() - began
    done = [answer for answer in answers if answer.tokens]
    good = [
        answer
        for answer in done
        if answer.first_s <= given.first_token_s
        and statistics.mean(answer.gaps_s or [0.0]) <= given.next_token_s
    ]
    return {
        "speed": speed,
        "requests": len(answers),
        "offered_per_s": round(len(rows) / (float(rows[-1]["arrival_s"]) / speed), 3),
        "refused": len(answers) - len(done),
        "tokens_per_s": round(sum(len(answer.tokens) for answer in done) / seconds, 2),
        "first_s": percentiles([answer.first_s for answer in done]),
        "next_ms": percentiles([1e3 * gap for answer in done for gap in answer.gaps_s]),
        "good": round(len(good) / len(answers), 3),
    }


def cache_files(files: Sequence[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            while file.read(64 << 20):
                pass


def compare(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    limit = parse_size(given.limit, whole_bytes=1 << 40) if given.limit else None
    systems = {"ours": sorted(given.model.glob("*.safetensors")), "llama.cpp": [given.gguf]}
    for turn in range(given.rounds):
        for num_clients in given.clients:
            for name, files in systems.items():
                make = our_command if name == "ours" else llama_command
                port = free_port()
                for path in files if limit else ():
                    drop_from_page_cache(path)
                if not limit:
                    cache_files(files)
                with serving(make(given, port, num_clients), port, limit) as url:
                    found = asyncio.run(closed_loop(url, given, num_clients, name == "ours"))
                row = {"round": turn, "clients": num_clients, "system": name, **found}
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Medians over the rounds, and how many times as many tokens ours gives."""
    print("| clients | system | tokens/s | first token, s, p50, p95 | next token, ms, p50, p95 |")
    print("|---|---|---|---|---|")
    for num_clients in sorted({row["clients"] for row in rows}):
        rates = {}
        for name in ("ours", "llama.cpp"):
            own = [r for r in rows if (r["clients"], r["system"]) == (num_clients, name)]
            rates[name] = statistics.median(row["tokens_per_s"] for row in own)
            cells = [f"{rates[name]:.1f}"]
            for key in ("first_s", "next_ms"):
                medians = [statistics.median(row[key][i] for row in own) for i in range(2)]
                cells.append(", ".join(f"{value:.3g}" for value in medians))
            print(f"| {num_clients} | {name} | {' | '.join(cells)} |")
        print(f"| {num_clients} | ratio | {rates['ours'] / rates['llama.cpp']:.2f} | | |")


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument(
        "--clients", type=lambda text: [*map(int, text.split(","))], default=[1, 4, 8]
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warm-up-s", type=float, default=8.0)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--limit", help="of memory, e.g. 4GiB")
    parser.add_argument("--option", action="append", default=[], help="of our server; repeatable")
    parser.add_argument("--arrivals", type=Path, help="CSV with columns as of Azure's traces")
    parser.add_argument("--prompts", type=Path, help="folder of JSONL files with a field `prompt`")
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--speeds", type=numbers, default=[1.0])
    parser.add_argument("--most-tokens", type=int, default=512)
    parser.add_argument("--first-token-s", type=float, default=5.0)
    parser.add_argument("--next-token-s", type=float, default=0.2)
    given = parser.parse_args()
    if not given.arrivals:
        show(compare(given))
        return
    if not given.prompts:
        parser.error("--arrivals needs --prompts")
    prompts = Prompts(given.prompts, given.model)
    cache_files(sorted(given.model.glob("*.safetensors")))
    for speed in given.speeds:
        port = free_port()
        with serving(our_command(given, port, 8), port, None) as url:
            print(json.dumps(asyncio.run(open_loop(url, given, prompts, speed))), flush=True)


if __name__ == "__main__":
    main()
