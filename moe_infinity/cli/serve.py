"""`moe-infinity serve`, and `moe-infinity chat --url`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from moe_infinity.cli.opening import open_model
from moe_infinity.cli.options import ApiKey, Model, with_model_options
from moe_infinity.cli.terminal import talk
from moe_infinity.errors import ConfigError

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
OF_CHAT_WITH_SERVER = ("url", "api_key", "max_new_tokens", "temperature", "top_p", "seed")

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses.")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes one that is free.")
]
ServedName = Annotated[
    str | None,
    typer.Option(help="Name of the model for clients. Default: its folder's name or hub id."),
]
MaxBatch = Annotated[
    int, typer.Option(min=1, help="Sequences that decode together. 1 gives the bits of generate().")
]
MaxQueue = Annotated[
    int, typer.Option(min=1, help="Sequences that may wait. More are refused with status 429.")
]
MaxContext = Annotated[
    int | None,
    typer.Option(min=2, help="The most tokens of prompt and answer. Default: the model's."),
]
AnswerTokens = Annotated[
    int, typer.Option(min=1, help="The most tokens of a chat answer whose request sets no limit.")
]
PrefillChunk = Annotated[
    int, typer.Option(min=1, help="Tokens of a prompt that one step computes.")
]
Deadline = Annotated[
    float, typer.Option(min=0.001, help="Seconds that a request may take, waiting included.")
]
MaxBody = Annotated[int, typer.Option(min=1, help="The most bytes of a request body.")]


@with_model_options
def serve(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    served_name: ServedName = None,
    max_batch: MaxBatch = 8,
    max_queue: MaxQueue = 64,
    max_context: MaxContext = None,
    max_new_tokens: AnswerTokens = 512,
    prefill_chunk: PrefillChunk = 512,
    deadline: Deadline = 600.0,
    max_body: MaxBody = 4 << 20,
    **options: Any,
) -> None:
    """Serve a model to several users with OpenAI's HTTP API, and a page at /."""
    require_extra()
    from moe_infinity.server.config import ServeConfig
    from moe_infinity.server.serve import bound_sockets, serve_model

    config = ServeConfig(
        host=host, port=port, api_key=api_key, model_name=served_name, max_batch=max_batch,
        max_queue=max_queue, max_context=max_context, max_new_tokens=max_new_tokens,
        prefill_chunk=prefill_chunk, deadline_s=deadline, max_body_bytes=max_body,
    )  # fmt: skip
    with bound_sockets(config) as sockets, open_model(model, **options) as moe:
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
    from moe_infinity.server.client import ChatClient

    talk(ChatClient(url, api_key, max_new_tokens, temperature, top_p, seed).stream)


def require_extra(needs: Sequence[str] = NEEDS) -> None:
    """Raises ConfigError if a package that only server and client need is not installed."""
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'moe-infinity[serve]'")
