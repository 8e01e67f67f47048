"""What is measured. Each option is declared once: as a field here and as one of the command."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

DEFAULT = "default"  # the budget that a model chooses by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Options of `moe-infinity bench` that are not the model's."""

    prompt: Annotated[str, Option(help="Lengths of prompts in tokens, separated by commas.")] = (
        "128,600"
    )
    decode: Annotated[
        int, Option(min=0, help="Tokens to decode after the shortest prompt; 0 for none.")
    ] = 64
    host_memory: Annotated[
        str | None,
        Option(
            help="Memory for experts: one or several of '8GiB', bytes, or '25%' of all experts, "
            "separated by commas. Default: 70% of what is free."
        ),
    ] = None
    repeat: Annotated[
        int, Option(min=1, help="How often everything is measured, after a warm-up.")
    ] = 3
    text: Annotated[
        Path | None,
        Option(
            help="Text of prompts and of what is decoded. Default: tokens drawn at random, which "
            "hit less often than those of a text.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    compare: Annotated[
        str | None,
        Option(
            help="Measure llama.cpp with this file, too. Needs llama-cpp-python.",
            metavar="llama.cpp:FILE.gguf",
        ),
    ] = None
    llama_python: Annotated[
        str,
        Option(
            help="With --compare: the Python interpreter that has llama-cpp-python.",
            show_default="this one",
        ),
    ] = sys.executable

    @property
    def budgets(self) -> list[str]:
        """Names of the budgets, DEFAULT if there is none."""
        texts = (self.host_memory or DEFAULT).split(",")
        return list(dict.fromkeys(text.strip() for text in texts))


def host_memory_of(budget: str) -> str | None:
    """A budget as OffloadConfig has it."""
    return None if budget == DEFAULT else budget
