"""Do agents whose conversations grow get the answers that each would get alone, and how soon?

    python benchmarks/agents.py runs/big --limit 4GiB --agents 4 --seconds 600
    python benchmarks/agents.py runs/big --limit 4GiB --turns 10 --tokens 20000 --restart-after 5

Each agent sends its conversation to the chat API of a server, gets an answer of a fixed length as a
stream, and adds it and a tool's result to the conversation, until that has so many tokens; then it
begins a new one. Results are pieces of this repository's texts, and each conversation has its own.
The server runs in a memory control group. Afterwards each request is asked again, one at a time, of
a new server without any prompt kept: the texts have to be equal, which is promised in float32 (a
`dtype` in config.json). With `--restart-after` the server is killed behind that turn, the page
cache forgets what it wrote, and another one goes on with the same --prompt-store.

Shown are the seconds to the first token by turn, the longest time between two tokens, what was
computed and read, and the highest memory that could not be dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from limits import drop_from_page_cache, memory_cgroup
from soak import events, sample

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 1200.0
RULES = "You are an agent that reads files of a repository and says what they are about. "


@dataclass
class Turn:
    """A request, and what came of it."""

    agent: int
    messages: list[dict[str, str]]
    text: str = ""
    first_s: float = 0.0
    gap_s: float = 0.0  # the longest between two pieces of the answer, of a token or more each
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Server:
    """A running server, and what its memory group showed."""

    url: str
    process: subprocess.Popen[bytes]
    group: Path
    peaks: dict[str, int] = field(default_factory=dict)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/stats", timeout=WAIT_S).json()
        return found

    def ask(self, turn: Turn, num_answer: int) -> None:
        """Send a turn, and note its answer."""
        body = {
            "messages": turn.messages, "max_tokens": num_answer, "ignore_eos": True,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        began = last = time.perf_counter()
        url = f"{self.url}/v1/chat/completions"
        pieces: list[str] = []
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"{answer.status_code}: {answer.read()!r}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"the answer failed: {event['error']}")
                if usage := event.get("usage"):
                    turn.prompt_tokens = usage["prompt_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    turn.cached_tokens = details.get("cached_tokens", 0)
                delta = event["choices"][0]["delta"] if event["choices"] else {}
                if piece := (delta.get("content") or "") + (delta.get("reasoning_content") or ""):
                    now = time.perf_counter()
                    if pieces:
                        turn.gap_s = max(turn.gap_s, now - last)
                    else:
                        turn.first_s = now - began
                    last = now
                    pieces.append(piece)
        turn.text = "".join(pieces)


@contextmanager
def server(model: Path, limit: str, options: list[str]) -> Iterator[Server]:
    """Yield a server, which is killed at the end."""
    from moe_infinity.sizes import parse_size

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "moe_infinity", "serve", str(model), "--port", str(port)]
    drop_from_page_cache(model)
    with memory_cgroup(parse_size(limit, whole_bytes=0)) as group:

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        process = subprocess.Popen(
            command + options,
            preexec_fn=join,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,
        )
        running = Server(f"http://127.0.0.1:{port}", process, group)
        watcher = threading.Thread(target=_watch, args=(running,), daemon=True)
        watcher.start()
        try:
            _wait_until_ready(running)
            yield running
            running.peaks |= events(group)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            watcher.join()
            _wait_until_left(group)


def _wait_until_left(group: Path) -> None:
    """Wait for what the server has begun; it ends by itself when the server is gone."""
    end = time.monotonic() + 60
    while (group / "cgroup.procs").read_text() and time.monotonic() < end:
        time.sleep(0.1)


def _wait_until_ready(running: Server) -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if running.process.poll() is not None:
            raise SystemExit(f"the server ended with {running.process.returncode}")
        try:
            if httpx.get(f"{running.url}/health/ready", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {WAIT_S:.0f} s")


def _watch(running: Server) -> None:
    while running.process.poll() is None:
        now = sample(running.group)
        for name, count in now.items():
            running.peaks[name] = max(count, running.peaks.get(name, 0))
        time.sleep(0.2)


class Agent:
    """One user, whose conversation grows turn by turn."""

    def __init__(self, number: int, words: list[str], args: argparse.Namespace) -> None:
        self._number = number
        self._words = words
        self._args = args
        self._random = random.Random(number)
        self._begin()

    def _begin(self) -> None:
        rules = RULES * 8 + f"Your name is {self._random.randrange(1 << 30)}."
        self._messages = [{"role": "system", "content": rules}]

    def next_turn(self) -> Turn:
        result = self._piece(self._args.tokens // self._args.turns)
        self._messages.append({"role": "user", "content": f"Result of read_file:\n{result}"})
        return Turn(self._number, list(self._messages))

    def note(self, turn: Turn) -> None:
        self._messages.append({"role": "assistant", "content": turn.text})
        if turn.prompt_tokens >= self._args.tokens:
            self._begin()

    def _piece(self, num_tokens: int) -> str:
        num_words = max(1, int(num_tokens * self._args.words_per_token))
        start = self._random.randrange(len(self._words))
        return " ".join((self._words[start:] + self._words)[:num_words])


def words() -> list[str]:
    texts = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]
    return " ".join(texts).split()


def run_agents(running: Server, args: argparse.Namespace) -> list[Turn]:
    """Let all agents work until the time is over; returns their turns, in the order of each."""
    turns: list[Turn] = []
    failed: list[BaseException] = []
    end = time.monotonic() + args.seconds

    def work(number: int) -> None:
        agent = Agent(number, words(), args)
        try:
            while time.monotonic() < end and not failed:
                turn = agent.next_turn()
                running.ask(turn, args.answer)
                agent.note(turn)
                turns.append(turn)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(args.agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return turns


def compare(turns: list[Turn], args: argparse.Namespace) -> dict[str, int]:
    """Ask each turn again, alone, as far as time allows."""
    counts = {"compared": 0, "different": 0}
    end = time.monotonic() + args.check_seconds
    with server(args.model, args.limit, ["--prompt-store", "off", *args.serve]) as running:
        for turn in turns:
            if time.monotonic() > end:
                break
            alone = Turn(turn.agent, turn.messages)
            running.ask(alone, args.answer)
            counts["compared"] += 1
            counts["different"] += alone.text != turn.text
    return counts


def show(running: Server, turns: list[Turn], what: str) -> None:
    stats = running.stats()["engine"]
    row = {
        "what": what,
        "turns": len(turns),
        "prompt_tokens": [turn.prompt_tokens for turn in turns],
        "cached_tokens": [turn.cached_tokens for turn in turns],
        "first_s": [round(turn.first_s, 2) for turn in turns],
        "longest_gap_of_clients_s": round(max(turn.gap_s for turn in turns), 2),
        "longest_gap_s": round(stats["longest_gap_s"], 2),
        "computed_prompt_tokens": stats["prompt_tokens"] - stats["cached_tokens"],
        "held_bytes": running.peaks.get("held"),
        **events(running.group),
    }
    print(json.dumps(row), flush=True)


def one_agent(args: argparse.Namespace) -> list[Turn]:
    """One conversation; behind a turn the server may be killed and begun anew."""
    agent = Agent(0, words(), args)
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(dir=Path.home()) as store:
        options = ["--prompt-store", store, *args.serve]
        parts = [args.restart_after, args.turns - args.restart_after]
        for part in [args.turns] if not args.restart_after else parts:
            with server(args.model, args.limit, options) as running:
                first = len(turns)
                for _ in range(part):
                    turn = agent.next_turn()
                    running.ask(turn, args.answer)
                    agent.note(turn)
                    turns.append(turn)
                show(running, turns[first:], "part")
                _settle(Path(store))
            _forget(Path(store))
    return turns


def _settle(folder: Path) -> None:
    """Wait until nothing more is written."""
    before = -1
    while (now := sum(path.stat().st_size for path in folder.rglob("*.block"))) != before:
        before = now
        time.sleep(1.0)


def _forget(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*.block"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", default="4GiB", help="of the server, page cache included")
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="with several agents")
    parser.add_argument("--turns", type=int, default=10, help="of a conversation")
    parser.add_argument("--tokens", type=int, default=20_000, help="of a whole conversation")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--restart-after", type=int, default=0, help="turns; with one agent")
    parser.add_argument("--check-seconds", type=float, default=600.0)
    parser.add_argument("--words-per-token", type=float, default=0.35)
    parser.add_argument("--serve", action="append", default=[], help="an option of the server")
    args = parser.parse_args()
    if args.agents == 1:
        turns = one_agent(args)
    else:
        with server(args.model, args.limit, ["--prompt-store", "off", *args.serve]) as running:
            turns = run_agents(running, args)
            show(running, turns, f"{args.agents} agents")
    if args.check_seconds:
        print(json.dumps(compare(turns, args)))


if __name__ == "__main__":
    main()
