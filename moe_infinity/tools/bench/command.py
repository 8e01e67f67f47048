"""`moe-infinity bench`."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moe_infinity.cli.models import config_of, ensure_here, open_model
from moe_infinity.cli.options import AsJson, Model, ModelOptions, Yes, taken, with_options_of
from moe_infinity.cli.terminal import stderr, write
from moe_infinity.tools.bench.config import BenchConfig

if TYPE_CHECKING:
    from moe_infinity.tools.bench.measuring import BenchTest

OF_MODEL = (
    "device", "device_memory", "policy", "prefetch", "early_router", "preload", "stream_layers",
    "config_from", "dtype", "expert_dtype", "kv_dtype", "exact", "experts_implementation",
    "gpu_engine", "trust_remote_code",
)  # fmt: skip


@with_options_of(ModelOptions, only=OF_MODEL)
@with_options_of(BenchConfig)
def bench(model: Model, yes: Yes = False, as_json: AsJson = False, **options: Any) -> None:
    """Measure prompts and decoding in tokens per second, beside the best that could be."""
    config = taken(BenchConfig, options)
    for host_memory in config.budgets.values():
        config_of(options | {"host_memory": host_memory})
    here = ensure_here(model, yes=yes)
    # Imported here: torch takes seconds to import.
    from moe_infinity.tools.bench.benchmark import run_bench

    opened = partial(open_model, yes=yes)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    is_shown = stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("measuring memory, processor and disk", total=None)

        def show(model: str, test: BenchTest) -> None:
            progress.update(task, description=f"{model}: {test.name}")

        result = run_bench(here, config, options, open_model=opened, on_run=show)
    write((json.dumps(result.as_dict()) if as_json else str(result)) + "\n")
