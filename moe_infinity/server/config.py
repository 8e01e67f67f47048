"""Options of the server. Each is declared once: as a field here and as an option of the command."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from moe_infinity.errors import ConfigError
from moe_infinity.server.limits import BODY, DEADLINE, QUEUE
from moe_infinity.sizes import parse_size

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
        list[str] | None,
        Option(
            help="Key that requests must send; may be given again, one for each user. Better in "
            "the environment, separated by spaces, or in a file: `ps` shows neither.",
            envvar="MOE_INFINITY_API_KEY",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, Option(help="A file with such keys, one a line.", dir_okay=False)
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        Option(
            help="Name by which browsers may reach a server on loopback, as behind a proxy; may be "
            "given again. Always allowed: localhost and addresses."
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        Option(
            metavar="ORIGIN",
            help="Origin whose pages may use this server from a browser, as https://app.example, "
            "or '*' for all; may be given again.",
        ),
    ] = None
    served_name: Annotated[
        str | None,
        Option(
            "--model-name",
            "--served-name",
            metavar="NAMES",
            help="Names of the model for clients, separated by commas; answers have the first. "
            "Default: its folder's name or hub id.",
        ),
    ] = None
    any_model: Annotated[
        bool, Option("--any-model", help="Take requests whatever model they name.")
    ] = False
    max_batch: Annotated[
        int, Option(min=1, help="Sequences that decode together. 1 gives the bits of generate().")
    ] = 8
    max_queue: Annotated[
        int,
        Option(
            min=1, help="Sequences of a client that may wait. More are refused with status 429."
        ),
    ] = QUEUE.most
    max_context: Annotated[
        int | None,
        Option(min=2, help="The most tokens of prompt and answer. Default: the model's."),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="The most tokens of a chat answer whose request sets no limit. Default: what the "
            "context leaves.",
        ),
    ] = None
    allow_media: Annotated[
        list[str] | None,
        Option(
            metavar="PLACE",
            help="Where images may come from beside data URLs: a folder, or the beginning of a URL "
            "as https://images.example/; https:// allows all public hosts. May be given again; "
            "'none' refuses all images.",
        ),
    ] = None
    strict_fields: Annotated[
        bool,
        Option(
            "--strict-fields",
            help="Refuse requests with a field that has no effect here. Default: it is ignored.",
        ),
    ] = False
    prefill_chunk: Annotated[
        int | None,
        Option(
            min=1,
            help="Tokens of a prompt that one pass computes. Default: 512; where not all experts "
            "are in memory, as many as fit, since each pass reads the absent ones.",
        ),
    ] = None
    max_gap: Annotated[
        float,
        Option(
            min=0.0,
            help="Seconds that an answer waits for its next token while a long prompt is computed.",
        ),
    ] = 5.0
    prefix_cache: Annotated[
        str | None,
        Option(
            metavar="SIZE|off",
            help="Memory for what later requests may begin with, e.g. 2GiB. Default: a tenth of "
            "what is free, and off with --max-batch 1 --exact.",
        ),
    ] = None
    prompt_store: Annotated[
        str | None,
        Option(
            metavar="FOLDER|off",
            help="Where prefixes are kept on disk, for after a restart. Default: the user's cache "
            "folder, and off where --prefix-cache is off.",
        ),
    ] = None
    prompt_store_size: Annotated[
        str, Option(metavar="SIZE", help="The most disk space for it, e.g. 2GiB; 1 GiB stays free.")
    ] = "10GiB"
    deadline: Annotated[
        float, Option(min=0.001, help="Seconds that a request may take, waiting included.")
    ] = DEADLINE.most
    max_body: Annotated[int, Option(min=1, help="The most bytes of a request body.")] = BODY.most

    def __post_init__(self) -> None:
        if self.api_key is not None and not all(key.strip() for key in self.api_key):
            raise ConfigError("the API key is empty")
        if self.served_name is not None and not self.names():
            raise ConfigError("--model-name: there is no name in it")
        if self.prefix_cache not in (None, "off"):
            parse_size(self.prefix_cache, whole_bytes=0)
        parse_size(self.prompt_store_size, whole_bytes=0)
        for origin in self.cors or ():
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(f"--cors {origin}: an origin is like https://app.example:8443")

    @property
    def gap_share_s(self) -> float:
        """The part of `max_gap` after which others go on: the rest of a layer, a short prompt and a
        step may follow, each as long.
        """
        return self.max_gap / 3

    def names(self) -> tuple[str, ...]:
        """The names of the model that were given."""
        return tuple(filter(None, map(str.strip, (self.served_name or "").split(","))))

    def keys(self) -> tuple[str, ...]:
        """All API keys; without any, requests need none. Raises ConfigError for a file that cannot
        be read, or has no key.
        """
        keys = [key.strip() for key in self.api_key or ()]
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{self.api_key_file}: cannot be read: {error}") from error
            found = [line.strip() for line in lines if line.strip()]
            if not found:
                raise ConfigError(f"{self.api_key_file}: has no API key")
            keys += found
        return tuple(keys)
