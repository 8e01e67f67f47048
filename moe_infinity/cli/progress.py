"""Progress bars: on stderr, on a terminal only, gone when they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

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

from moe_infinity.cli.terminal import stderr

OnProgress = Callable[[int, int], None]  # done, of how many
Bar = AbstractContextManager[OnProgress]


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
