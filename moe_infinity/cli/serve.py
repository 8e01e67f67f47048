"""`moe-infinity serve`, and `moe-infinity chat --url`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_infinity.cli.models import checkpoint_for, config_of, open_model
from moe_infinity.cli.options import Model, ModelOptions, Yes, taken, with_options_of
from moe_infinity.cli.read_ahead import reading_ahead
from moe_infinity.cli.terminal import talk
from moe_infinity.cluster.config import ClusterOptions, ReplicaOptions
from moe_infinity.errors import ConfigError
from moe_infinity.server import limits
from moe_infinity.server.config import ServeConfig
from moe_infinity.system.garbage import no_garbage_collection

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
OF_CHAT_WITH_SERVER = ("url", "api_key", "max_new_tokens", "temperature", "top_p", "seed")


def show_limits(is_asked: bool) -> None:
    """Print the most of everything that a client chooses the size of."""
    if not is_asked:
        return
    typer.echo("Limits of requests: what, the most, the status beyond it, the field or option.\n")
    rows = limits.table()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
    raise typer.Exit


HelpLimits = Annotated[
    bool,
    typer.Option(
        "--help-limits",
        is_eager=True,
        callback=show_limits,
        help="Show the most of everything that a client chooses the size of, and exit.",
    ),
]


@with_options_of(ServeConfig, ReplicaOptions, ModelOptions, ClusterOptions)
def serve(model: Model, yes: Yes = False, help_limits: HelpLimits = False, **options: Any) -> None:
    """Serve a model to several users with OpenAI's and Anthropic's HTTP APIs, and a page at /."""
    require_extra()
    config = taken(ServeConfig, options)
    several = taken(ReplicaOptions, options)
    if several.replicas is not None:
        require_extra(["ray"], "cluster")
    of_model = config_of(options)
    config.keys()  # a file that cannot be read is an error before anything slow
    here = checkpoint_for(model, yes=yes, cluster=options["cluster"])
    with reading_ahead(here, of_model), no_garbage_collection():
        from moe_infinity.server.serve import bound_sockets, serve_model

    if config.served_name is None and not Path(model).exists():
        config = replace(config, served_name=model)  # a hub id, whatever folder it is in
    if several.replicas is not None:
        from moe_infinity.cluster.serving import serve_replicas

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
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
) -> None:
    """Talk to a server on the terminal.

    Raises ConfigError if httpx is not installed, MoEInfinityError if the server refuses a request.
    """
    require_extra(["httpx"])
    from moe_infinity.cli.chat_client import stream_chat

    said = {"temperature": temperature, "top_p": top_p, "seed": seed}
    settings: dict[str, Any] = {"max_tokens": max_new_tokens}
    settings |= {name: value for name, value in said.items() if value is not None}
    key = next(iter((api_key or "").split()), None)  # `serve` takes several in the same variable
    talk(partial(stream_chat, url, key, settings))


def require_extra(needs: Sequence[str] = NEEDS, extra: str = "serve") -> None:
    """Raises ConfigError if a package that only an extra brings is not installed."""
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'moe-infinity[{extra}]'")
