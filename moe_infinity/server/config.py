"""Options of the server. Each is declared once: as a field here and as an option of the command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from moe_infinity.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of `moe-infinity serve` that are not the model's. Raises ConfigError."""

    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all addresses.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, Option(min=0, max=65535, help="Port to listen on; 0 takes one that is free.")
    ] = 8000
    api_key: Annotated[
        str | None,
        Option(
            help="Key that requests must send. Better given in the environment, which `ps` does "
            "not show.",
            envvar="MOE_INFINITY_API_KEY",
        ),
    ] = None
    served_name: Annotated[
        str | None,
        Option(help="Name of the model for clients. Default: its folder's name or hub id."),
    ] = None
    max_batch: Annotated[
        int, Option(min=1, help="Sequences that decode together. 1 gives the bits of generate().")
    ] = 8
    max_queue: Annotated[
        int, Option(min=1, help="Sequences that may wait. More are refused with status 429.")
    ] = 64
    max_context: Annotated[
        int | None,
        Option(min=2, help="The most tokens of prompt and answer. Default: the model's."),
    ] = None
    max_new_tokens: Annotated[
        int,
        Option(min=1, help="The most tokens of a chat answer whose request sets no limit."),
    ] = 512
    prefill_chunk: Annotated[
        int, Option(min=1, help="Tokens of a prompt that one step computes.")
    ] = 512
    prefix_cache: Annotated[
        str | None,
        Option(
            metavar="SIZE|off",
            help="Memory for what later requests may begin with, e.g. 2GiB. Default: a tenth of "
            "what is free, and off with --max-batch 1 --exact.",
        ),
    ] = None
    deadline: Annotated[
        float, Option(min=0.001, help="Seconds that a request may take, waiting included.")
    ] = 600.0
    max_body: Annotated[int, Option(min=1, help="The most bytes of a request body.")] = 4 << 20

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key is empty")
