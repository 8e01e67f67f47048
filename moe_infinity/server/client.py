"""`moe-infinity chat --url`: a conversation with a server that speaks OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from moe_infinity.errors import MoEInfinityError

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ChatClient:
    """A server and how to ask it."""

    url: str  # with or without the /v1 at the end
    api_key: str | None
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Pieces of the answer. Raises MoEInfinityError with what the server said."""
        base = self.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        body: dict[str, Any] = {
            "messages": messages,
            "stream": True,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }
        if self.temperature > 0:
            body |= {"top_p": self.top_p or 1.0}
        if self.seed is not None:
            body |= {"seed": self.seed}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        try:
            with httpx.stream(
                "POST", f"{base}/v1/chat/completions", json=body, headers=headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise MoEInfinityError(f"{base}: {_said(response.read())}")
                yield from _pieces(response)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise MoEInfinityError(f"{base}: no answer: {error}") from error


def _pieces(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        payload = line.removeprefix("data: ")
        if payload == line or payload == "[DONE]":
            continue
        chunk = json.loads(payload)
        if "error" in chunk:
            raise MoEInfinityError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
