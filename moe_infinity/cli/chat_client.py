"""The client of `moe-infinity chat --url`: it talks to any server with OpenAI's chat API.

The server may be anybody's: what it sends is read as bytes, within limits, and never followed to
another address. `talk` makes its texts printable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from moe_infinity.errors import MoEInfinityError
from moe_infinity.printable import printable

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 660.0  # without a byte; our own server sends one every 5 s
MOST_LINE_BYTES = 1 << 20
MOST_ANSWER_LETTERS = 4 << 20  # they go back to the server with the next message
MOST_ERROR_BYTES = 64 << 10
MAX_MESSAGE = 2000  # letters of a server's error
MAX_SHOWN = 200  # characters of an unexpected answer in an error


def stream_chat(
    url: str, api_key: str | None, settings: Mapping[str, Any], messages: list[dict[str, str]]
) -> Iterator[str]:
    """Pieces of the answer to a conversation.

    `url` may end with /v1; `settings` are further fields of the request. Raises MoEInfinityError
    with the server's message, or if there is no answer.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {b"Content-Type": b"application/json", b"Accept-Encoding": b"identity"}
    if api_key:  # in bytes, because a key may have any letters
        headers[b"Authorization"] = f"Bearer {api_key}".encode()
    body = json.dumps({"messages": messages, "stream": True, **settings}).encode()
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    try:
        with httpx.stream(
            "POST",
            f"{base}/v1/chat/completions",
            content=body,
            headers=headers,
            timeout=timeout,
            follow_redirects=False,  # the key is for this address
        ) as response:
            if response.status_code != 200:
                raise MoEInfinityError(_refusal_of(response))
            yield from _pieces(response)
    except MoEInfinityError as error:
        raise MoEInfinityError(f"{base}: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError) as error:  # of a proxy
        raise MoEInfinityError(f"{base}: no answer: {error}") from error


def _pieces(response: httpx.Response) -> Iterator[str]:
    has_begun = False
    num_letters = 0
    for line in _lines(response):
        field, _, payload = line.partition(":")
        if field == "data":
            has_begun = True
            text = _text_of(payload.strip())
            num_letters += len(text)
            if num_letters > MOST_ANSWER_LETTERS:
                raise MoEInfinityError(f"the answer has more than {MOST_ANSWER_LETTERS} letters")
            yield text
    if not has_begun:
        raise MoEInfinityError("no stream of events: is this the address of a chat server?")


def _lines(response: httpx.Response) -> Iterator[str]:
    """Lines as they come. Raises MoEInfinityError for one that is too long."""
    rest = bytearray()
    for received in response.iter_raw():
        more, *begun = received.split(b"\n")
        rest += more
        for begin in begun:
            yield rest.decode(errors="replace").rstrip("\r")
            rest = bytearray(begin)
        if len(rest) > MOST_LINE_BYTES:
            raise MoEInfinityError(f"a line of the answer has more than {MOST_LINE_BYTES} bytes")
    yield rest.decode(errors="replace")


def _refusal_of(response: httpx.Response) -> str:
    """The message of an answer that is not 200."""
    if response.is_redirect:
        where = printable(response.headers["location"], MAX_SHOWN)
        return f"it redirects to {where}: if you trust that address, give it as --url"
    body = bytearray()
    for received in response.iter_raw():
        body += received
        if len(body) > MOST_ERROR_BYTES:
            break
    return _message_of(bytes(body))


def _text_of(payload: str) -> str:
    """The text of an event. Raises MoEInfinityError for an error or an unknown event."""
    if payload == "[DONE]":
        return ""
    try:
        chunk = json.loads(payload)
        if chunk.get("error") is None:
            texts = [choice["delta"].get("content") for choice in chunk["choices"]]
            return "".join(text or "" for text in texts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MoEInfinityError(f"not a chunk of an answer: {payload[:MAX_SHOWN]}") from error
    raise MoEInfinityError(_message_of(payload.encode()))


def _message_of(body: bytes) -> str:
    """The message of an error object, or the beginning of any other body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:MAX_MESSAGE]
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:MAX_SHOWN].decode(errors="replace")
