"""The options of `moe-infinity bench`, each declared once. Without torch, for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

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
            "separated by commas. Default: 70% of what is free."
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

    @property
    def budgets(self) -> dict[str, str | None]:
        """The host_memory of each model, by the name of its row."""
        if self.host_memory is None:
            return {DEFAULT: None}
        return {text.strip(): text.strip() for text in self.host_memory.split(",")}
