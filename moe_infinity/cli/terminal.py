"""The terminal: answers go to stdout; messages, questions and progress bars go to stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import TextIOWrapper

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from moe_infinity.errors import ConfigError, OutputError
from moe_infinity.printable import printable_lines

OnProgress = Callable[[int, int], None]  # done, of how many
Bar = AbstractContextManager[OnProgress]

stderr = Console(stderr=True, highlight=False, emoji=False)


def talk(answer: Callable[[list[dict[str, str]]], Iterator[str]]) -> None:
    """Hold a conversation. `answer` generates pieces of text from the messages so far. What is not
    printable in them is escaped.
    """
    messages: list[dict[str, str]] = []
    if stderr.is_terminal:
        stderr.print("An empty line or Ctrl-D ends the chat, Ctrl-C an answer.")
    for line in user_lines():
        messages.append({"role": "user", "content": line})
        text = ""
        try:
            for piece in answer(messages):
                write(printable_lines(piece))
                text += piece
        except KeyboardInterrupt:
            stderr.print("(stopped)")
        write("\n")
        messages.append({"role": "assistant", "content": text.strip()})


def user_lines() -> Iterator[str]:
    """Lines typed after a prompt sign, until an empty line or the end of input."""
    while True:
        try:
            with utf8_only("the input"):
                line = stderr.input("[bold]> [/bold]").strip()
                line.encode()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        yield line


@contextmanager
def utf8_only(what: str) -> Iterator[None]:
    """Raises ConfigError for a UnicodeError inside: Python may also read other bytes as surrogates,
    which `encode` refuses.
    """
    try:
        yield
    except UnicodeError as error:
        raise ConfigError(f"{what} is not UTF-8 text: {error}") from error


def write(text: str) -> None:
    """Print text to stdout at once, escaped where a terminal would obey it. Raises OutputError if
    stdout takes no more of it.
    """
    try:
        if sys.stdout.isatty():
            text = printable_lines(text)
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left: click ends the command without a word
        raise
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, Python flushes stdout at its end
        raise OutputError(f"stdout cannot be written: {error.strerror}") from error


def shown(text: object) -> str:
    """A text of others for `stderr.print`, where neither its markup nor its control characters have
    an effect.
    """
    return escape(printable_lines(str(text)))


class PrintableRecord(logging.LogRecord):
    """A line of a log, of this package or another, whose message a terminal cannot obey."""

    def getMessage(self) -> str:
        return printable_lines(super().getMessage())


def prepare_streams() -> None:
    """Let stdout and stderr show "?" for what their encoding lacks, and a closed stdin be empty.
    Raises OutputError if stdout is closed.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115, as open as the process
    if sys.stdout is None:
        raise OutputError("stdout is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def byte_bar(what: str) -> Bar:
    """In bytes, with rate and time left."""
    return _bar(what, DownloadColumn(), TransferSpeedColumn())


def count_bar(what: str) -> Bar:
    """In whatever is counted, with time left."""
    return _bar(what, MofNCompleteColumn())


@contextmanager
def _bar(what: str, *columns: ProgressColumn) -> Iterator[OnProgress]:
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    is_hidden = not stderr.is_interactive  # no terminal, or a dumb one
    with Progress(*shown, console=stderr, transient=True, disable=is_hidden) as progress:
        task = progress.add_task(what, total=None)

        def update(done: int, total: int) -> None:
            if progress.tasks[task].total is None:  # what was done before has no rate
                progress.reset(task, total=total, completed=done)
            else:
                progress.update(task, completed=done, total=total)

        yield update
