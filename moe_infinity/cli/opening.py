"""A model opened for one command. Without torch, which `--help` should not wait for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from moe_infinity.cli.progress import byte_bar, count_bar
from moe_infinity.cli.pulling import ensure_here

if TYPE_CHECKING:
    from moe_infinity.model import MoE


@contextmanager
def open_model(model: str, *, yes: bool, **options: Any) -> Iterator[MoE]:
    """A checkpoint folder, GGUF file or hub id as a MoE, closed when the command ends. Shows how
    far it is loaded. `yes`: a model that is not here is downloaded without a question.

    `options` are fields of OffloadConfig. Raises what `MoE(...)` and `ensure_here` raise.
    """
    # Imported here: torch and transformers take seconds to import.
    from transformers.utils.logging import disable_progress_bar

    from moe_infinity.cluster.model import ClusterMoE
    from moe_infinity.model import MoE

    model_class = ClusterMoE if "expert_hosts" in options else MoE
    checkpoint = checkpoint_for(model, yes=yes, cluster=options.get("cluster"))
    disable_progress_bar()  # of transformers
    with byte_bar("loading weights") as on_bytes:
        moe = model_class(checkpoint, on_bytes=on_bytes, **options)
    with moe:
        # Else Python looks through all that was imported and loaded now and then, in 0.3 s.
        gc.freeze()
        try:
            yield moe
        finally:
            gc.unfreeze()


def checkpoint_for(model: str, *, yes: bool, cluster: str | None) -> str:
    """What to open for a model, on this machine by now. On other machines of a cluster it is where
    they have it, so there a hub id stays one. Raises what `ensure_here` raises.
    """
    here = ensure_here(model, yes=yes)
    return here if cluster is None else model


def show_preload(moe: MoE) -> None:
    """With preload="wait": wait for the experts, with a progress bar on a terminal."""
    if not moe.is_ready:
        with count_bar("loading experts") as on_experts:
            moe.preload(on_experts)
