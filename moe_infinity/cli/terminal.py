"""The terminal: answers go to stdout, all else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from rich.console import Console

stderr = Console(stderr=True, highlight=False, emoji=False)


def talk(answer: Callable[[list[dict[str, str]]], Iterator[str]]) -> None:
    """Hold a conversation. `answer` generates pieces of text from the messages so far."""
    messages: list[dict[str, str]] = []
    if stderr.is_terminal:
        stderr.print("An empty line or Ctrl-D ends the chat, Ctrl-C an answer.")
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
    """Lines typed after a prompt sign, until an empty line or the end of input."""
    while True:
        try:
            line = stderr.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        yield line


def write(text: str) -> None:
    """Print text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
