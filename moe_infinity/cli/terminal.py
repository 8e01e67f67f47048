"""What commands print: answers to stdout, all else to stderr; and a conversation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from rich.console import Console

stderr = Console(stderr=True, highlight=False, emoji=False)


def talk(answer: Callable[[list[dict[str, str]]], Iterator[str]]) -> None:
    """A conversation on the terminal; `answer` gives pieces of text for the messages so far."""
    messages: list[dict[str, str]] = []
    for line in user_lines():
        messages.append({"role": "user", "content": line})
        text = ""
        try:
            for piece in answer(messages):
                write(piece)
                text += piece
        except KeyboardInterrupt:
            stderr.print("(stopped)")
        write("\n")
        messages.append({"role": "assistant", "content": text.strip()})


def user_lines() -> Iterator[str]:
    """Lines typed after a prompt sign, until an empty one or the end of input."""
    while True:
        try:
            line = stderr.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        yield line


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
