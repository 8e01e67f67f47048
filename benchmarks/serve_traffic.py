"""Traffic on all routes of a server that generate, for serve_load.py: requests of each kind, whole
and as streams, and how to read their answers.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

NUM_CLIENTS = 16
DROPPED, BAD = 0.2, 0.05  # shares of requests
BEGINNINGS = (
    "Once upon a time", "The old house stood at the edge of", "def sum_of_squares(", "What is a",
    "Question: How many", "Le soir tombait sur", "In the morning the doctor", "Es war einmal",
)  # fmt: skip
PROMPTS = [f"{words} {number}" for number in range(4) for words in BEGINNINGS]
TOOL = {
    "name": "weather",
    "description": "The weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 12}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BAD_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {}),
    ("completions", {"prompt": 5}),
    ("completions", {"prompt": "x", "colour": "red"}),
    ("chat/completions", {"messages": []}),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}),
    ("responses", {"input": 3.5}),
    ("messages", {"messages": [{"role": "user", "content": "x"}]}),  # without max_tokens
    ("embeddings", {"input": {}}),
]


def of_event(event: dict[str, Any], *path: str | int) -> Any:
    """What is at the end of the path, "" if it ends before."""
    found: Any = event
    for name in path:
        try:
            found = found[name]
        except (KeyError, IndexError, TypeError):
            return ""
    return found or ""


@dataclass(frozen=True)
class Kind:
    """One kind of request."""

    route: str  # below /v1
    body: Callable[[str, int], dict[str, Any]]  # from a prompt and the most tokens of an answer
    text: Callable[[dict[str, Any]], str]  # of an answer
    piece: Callable[[dict[str, Any]], str] | None = None  # of an event; None: it has no streams


def chat(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": prompt}
    return {"messages": [message], "max_tokens": tokens, "temperature": 0, **more}


def chat_with_tool(prompt: str, tokens: int) -> dict[str, Any]:
    tools = [{"type": "function", "function": TOOL}]
    return chat(prompt, tokens + 40, tools=tools, tool_choice="required", parallel_tool_calls=False)


def chat_with_schema(prompt: str, tokens: int) -> dict[str, Any]:
    schema = {"name": "person", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    return chat(prompt, tokens + 40, response_format=form)


def response(prompt: str, tokens: int) -> dict[str, Any]:
    return {"input": prompt, "max_output_tokens": tokens, "temperature": 0}


def joined(items: Sequence[dict[str, Any]], *path: str | int) -> str:
    return "".join(of_event(item, *path) for item in items)


def arguments_in(message: dict[str, Any]) -> str:
    return of_event(message, "tool_calls", 0, "function", "arguments")


COMPLETION = Kind(
    "completions",
    lambda prompt, tokens: {"prompt": prompt, "max_tokens": tokens, "temperature": 0},
    lambda answer: answer["choices"][0]["text"],
    lambda event: of_event(event, "choices", 0, "text"),
)
KINDS = {
    "completion": COMPLETION,
    "chat": Kind(
        "chat/completions",
        chat,
        lambda answer: answer["choices"][0]["message"]["content"] or "",
        lambda event: of_event(event, "choices", 0, "delta", "content"),
    ),
    "tool": Kind(
        "chat/completions",
        chat_with_tool,
        lambda answer: arguments_in(answer["choices"][0]["message"]),
        lambda event: arguments_in(of_event(event, "choices", 0, "delta") or {}),
    ),
    "schema": Kind(
        "chat/completions",
        chat_with_schema,
        lambda answer: answer["choices"][0]["message"]["content"] or "",
        lambda event: of_event(event, "choices", 0, "delta", "content"),
    ),
    "response": Kind(
        "responses",
        response,
        lambda answer: "".join(
            joined(item.get("content", ()), "text") for item in answer["output"]
        ),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "message": Kind(
        "messages",
        lambda prompt, tokens: {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0.0,
        },
        lambda answer: joined(answer["content"], "text"),
        lambda event: of_event(event, "delta", "text"),
    ),
    "embedding": Kind(
        "embeddings",
        lambda prompt, tokens: {"input": prompt},
        # Neighbours in a batch change the last bits.
        lambda answer: " ".join(f"{x:.2f}" for x in answer["data"][0]["embedding"][:16]),
    ),
}


def answers_alone(url: str, max_tokens: int) -> dict[tuple[str, str], str]:
    """What each prompt gets when nothing else runs, by kind and prompt."""
    found = {}
    for name, kind in KINDS.items():
        for prompt in PROMPTS:
            body = kind.body(prompt, max_tokens)
            answer = httpx.post(f"{url}/v1/{kind.route}", json=body, timeout=60)
            if answer.status_code != 200:
                raise SystemExit(f"{name}: {answer.text[:300]}")
            found[name, prompt] = kind.text(answer.json())
    return found


@dataclass
class Load:
    """Clients that send requests and compare the answers with the expected ones."""

    url: str
    expected: dict[tuple[str, str], str]
    gaps: Sequence[float]  # seconds between requests of a client
    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)  # by route
    wrong: list[str] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    async def run(self, seconds: float, max_tokens: int) -> None:
        end = asyncio.get_running_loop().time() + seconds
        async with httpx.AsyncClient(timeout=120) as http:

            async def client() -> None:
                while asyncio.get_running_loop().time() < end:
                    await asyncio.sleep(self.random.choice(self.gaps))
                    await self._ask(http, max_tokens)

            await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    async def _ask(self, http: httpx.AsyncClient, max_tokens: int) -> None:
        dice = self.random.random()
        if dice < BAD:
            route, body = self.random.choice(BAD_BODIES)
            answer = await http.post(f"{self.url}/v1/{route}", json=body)
            self.statuses[route, answer.status_code] += 1
            self._note("bad body refused", answer.status_code == 400, answer.text)
            return
        name = self.random.choice([*KINDS])
        prompt = self.random.choice(PROMPTS)
        kind = KINDS[name]
        body = kind.body(prompt, max_tokens)
        streams = kind.piece is not None
        if dice < BAD + DROPPED and streams:
            await self._stream(http, kind, body, pieces=self.random.randrange(10))
            self.outcomes["dropped"] += 1
            return
        is_streamed = streams and self.random.random() < 0.5
        get = self._stream if is_streamed else self._whole
        text = await get(http, kind, body)
        if text is None:
            self.outcomes["busy"] += 1
            return
        what = f"{name}, streamed" if is_streamed else name
        self._note(what, text == self.expected[name, prompt], f"{what} {prompt!r}: {text!r}")

    async def _whole(self, http: httpx.AsyncClient, kind: Kind, body: Any) -> str | None:
        """None if the server was busy."""
        answer = await http.post(f"{self.url}/v1/{kind.route}", json=body)
        self.statuses[kind.route, answer.status_code] += 1
        if answer.status_code == 429:
            await asyncio.sleep(float(answer.headers["retry-after"]))
            return None
        return kind.text(answer.json())

    async def _stream(
        self, http: httpx.AsyncClient, kind: Kind, body: Any, pieces: float = float("inf")
    ) -> str | None:
        """Leaves after so many events. None if the server was busy."""
        assert kind.piece is not None
        text = ""
        url = f"{self.url}/v1/{kind.route}"
        async with http.stream("POST", url, json=body | {"stream": True}) as answer:
            self.statuses[kind.route, answer.status_code] += 1
            if answer.status_code == 429:
                await answer.aread()
                await asyncio.sleep(float(answer.headers["retry-after"]))
                return None
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += kind.piece(json.loads(line[6:]))
                    pieces -= 1
                if pieces < 0:
                    break
        return text

    def _note(self, outcome: str, is_right: bool, what: str) -> None:
        self.outcomes[outcome] += 1
        if not is_right:
            self.wrong.append(what)
