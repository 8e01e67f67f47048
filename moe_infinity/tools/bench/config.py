"""The options of `moe-infinity bench`, each declared once. Without torch, for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moe_infinity.errors import ConfigError

DEFAULT = "default"  # the budget that a model chooses by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Options of `moe-infinity bench` that are not the model's."""

    prompt: Annotated[
        str, typer.Option(help="Lengths of prompts in tokens, separated by commas.")
    ] = "128,600"
    decode: Annotated[
        int, typer.Option(min=0, help="Tokens to decode after the shortest prompt; 0 for none.")
    ] = 64
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for experts: one or several of '8GiB', bytes, or '25%' of all experts, "
            "separated by commas. Default: that of `run`."
        ),
    ] = None
    repeat: Annotated[
        int, typer.Option(min=1, help="How often everything is measured, after a warm-up.")
    ] = 3
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text of prompts and of what is decoded. Default: tokens drawn at random, which "
            "hit less often than those of a text.",
            exists=True,
            dir_okay=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _lengths_in(self.prompt)
        self.read_text()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of prompts, each once."""
        return _lengths_in(self.prompt)

    def read_text(self) -> str:
        """The text of --text, or nothing. Raises ConfigError if it cannot be read."""
        try:
            return "" if self.text is None else self.text.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text: {self.text} cannot be read: {error}") from error

    @property
    def budgets(self) -> dict[str, str | None]:
        """The host_memory of each model, by the name of its row."""
        if self.host_memory is None:
            return {DEFAULT: None}
        return {text.strip(): text.strip() for text in self.host_memory.split(",")}


def _lengths_in(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_length, text.split(","))))


def _length(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(
            f"--prompt: {text!r} is no number of tokens above 0\nhint: as in --prompt 128,600"
        )
    return int(text)
