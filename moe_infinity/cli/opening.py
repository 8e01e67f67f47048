"""A model opened for one command. Without torch, which `--help` should not wait for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from moe_infinity.cli.terminal import stderr

if TYPE_CHECKING:
    from moe_infinity.model import MoE


@contextmanager
def open_model(model: str, **options: Any) -> Iterator[MoE]:
    """A checkpoint folder or hub id as a MoE, closed when the command ends.

    `options` are fields of OffloadConfig. Raises what `MoE(...)` raises.
    """
    # Imported here: torch and transformers take seconds to import.
    from transformers.utils.logging import disable_progress_bar

    from moe_infinity.model import MoE

    if not stderr.is_terminal:
        disable_progress_bar()
    with MoE(model, **options) as moe:
        # Else Python looks through all that was imported and loaded now and then, in 0.3 s.
        gc.freeze()
        try:
            yield moe
        finally:
            gc.unfreeze()


def show_preload(moe: MoE) -> None:
    """With preload="wait": wait for the experts, with a progress bar on a terminal."""
    if not moe.is_ready:
        with Progress(console=stderr, transient=True) as progress:
            task = progress.add_task("loading experts", total=None)
            moe.preload(lambda done, total: progress.update(task, completed=done, total=total))
