"""The client of `moe-infinity chat --url`: it talks to any server with OpenAI's chat API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from moe_infinity.errors import MoEInfinityError

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 660.0  # without a byte; our own server gives up after 600 s (--deadline)
MAX_SHOWN = 200  # characters of an unexpected answer in an error


def stream_chat(
    url: str, api_key: str | None, settings: Mapping[str, Any], messages: list[dict[str, str]]
) -> Iterator[str]:
    """Pieces of the answer to a conversation.

    `url` may end with /v1; `settings` are further fields of the request. Raises MoEInfinityError
    with the server's message, or if there is no answer.
    """
    base = url.rstrip("/").removesuffix("/v1")
    # In bytes, because a key may have any letters.
    headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
    body = {"messages": messages, "stream": True, **settings}
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    try:
        with httpx.stream(
            "POST", f"{base}/v1/chat/completions", json=body, headers=headers, timeout=timeout
        ) as response:
            if response.status_code != 200:
                raise MoEInfinityError(_message_of(response.read()))
            yield from _pieces(response)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise MoEInfinityError(f"{base}: no answer: {error}") from error
    except MoEInfinityError as error:
        raise MoEInfinityError(f"{base}: {error}") from error


def _pieces(response: httpx.Response) -> Iterator[str]:
    has_begun = False
    for line in response.iter_lines():
        field, _, payload = line.partition(":")
        if field == "data":
            has_begun = True
            yield _text_of(payload.strip())
    if not has_begun:
        raise MoEInfinityError("no stream of events: is this the address of a chat server?")


def _text_of(payload: str) -> str:
    """The text of an event. Raises MoEInfinityError for an error or an unknown event."""
    if payload == "[DONE]":
        return ""
    try:
        chunk = json.loads(payload)
        if chunk.get("error") is None:
            texts = [choice["delta"].get("content") for choice in chunk["choices"]]
            return "".join(text or "" for text in texts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoEInfinityError(f"not a chunk of an answer: {payload[:MAX_SHOWN]}") from error
    raise MoEInfinityError(_message_of(payload.encode()))


def _message_of(body: bytes) -> str:
    """The message of an error object, or the beginning of any other body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:MAX_SHOWN].decode(errors="replace")
