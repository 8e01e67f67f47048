"""`moe-infinity serve`, and `moe-infinity chat --url`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from moe_infinity.cli.models import checkpoint_for, open_model
from moe_infinity.cli.options import Model, ModelOptions, Yes, taken, with_options_of
from moe_infinity.cli.terminal import talk
from moe_infinity.cluster.config import ClusterOptions
from moe_infinity.errors import ConfigError, MoEInfinityError
from moe_infinity.server.config import ServeConfig

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
OF_CHAT_WITH_SERVER = ("url", "api_key", "max_new_tokens", "temperature", "top_p", "seed")


@dataclass(kw_only=True)
class ServedReplicas:
    """Several processes that serve one model, on Ray."""

    replicas: Annotated[
        str | None,
        typer.Option(
            help="How many, each with the whole model and its own memory: '2', or '1-4' for as "
            "many as the queue needs. Needs the extra cluster.",
            metavar="N|MIN-MAX",
        ),
    ] = None
    router: Annotated[
        str,
        typer.Option(
            help="Which of them gets a request: least-loaded, or hash, by the header x-session-id."
        ),
    ] = "least-loaded"


@with_options_of(ServeConfig, ServedReplicas, ModelOptions, ClusterOptions)
def serve(model: Model, yes: Yes = False, **options: Any) -> None:
    """Serve a model to several users with OpenAI's and Anthropic's HTTP APIs, and a page at /."""
    require_extra()
    from moe_infinity.server.serve import bound_sockets, serve_model

    config = taken(ServeConfig, options)
    several = taken(ServedReplicas, options)
    if config.served_name is None and not Path(model).exists():
        config = replace(config, served_name=model)  # a hub id, whatever folder it is in
    if several.replicas is not None:
        require_extra(["ray"], "cluster")
        from moe_infinity.cluster.serving import serve_replicas

        here = checkpoint_for(model, yes=yes, cluster=options["cluster"])
        serve_replicas(here, config, options, replicas=several.replicas, router=several.router)
        return
    with bound_sockets(config) as sockets, open_model(model, yes=yes, **options) as moe:
        serve_model(moe, config, sockets)


def refuse_model_options(context: typer.Context) -> None:
    """Raises ConfigError if `chat --url` was given options of a model that is loaded here."""
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in OF_CHAT_WITH_SERVER and _is_typed(context, option.name)
    ]
    if given:
        raise ConfigError(f"{', '.join(given)}: this is the server's to choose, not with --url")


def _is_typed(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def chat_with_server(
    url: str,
    api_key: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
) -> None:
    """Talk to a server on the terminal.

    Raises ConfigError if httpx is not installed, MoEInfinityError if the server refuses a request.
    """
    require_extra(["httpx"])
    from moe_infinity.cli.serve import stream_chat

    settings = {"max_tokens": max_new_tokens, "temperature": temperature}
    if temperature > 0:
        settings["top_p"] = top_p
    if seed is not None:
        settings["seed"] = seed
    talk(partial(stream_chat, url, api_key, settings))


def require_extra(needs: Sequence[str] = NEEDS, extra: str = "serve") -> None:
    """Raises ConfigError if a package that only an extra brings is not installed."""
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'moe-infinity[{extra}]'")


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
