"""`moe-infinity simulate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_infinity.cli.options import AsJson, taken, with_options_of
from moe_infinity.cli.terminal import count_bar, write
from moe_infinity.predict.tables import FACTORS
from moe_infinity.tools.pictures.figures import check_picture
from moe_infinity.tools.simulator.baselines import SIMULATED_POLICIES

Traces = Annotated[
    list[Path],
    typer.Argument(help="Traces (.npz), or folders that contain an experts.npz.", exists=True),
]


@dataclass(kw_only=True)
class SimulationOptions:
    """The options of a replay."""

    policy: Annotated[
        str,
        typer.Option(
            help=f"Separated by commas: {', '.join(SIMULATED_POLICIES)}; belady is always added."
        ),
    ] = "lru,lfu,request-lfu,moe-infinity-v3,activation-aware"
    capacity: Annotated[
        str, typer.Option(help="Separated by commas: '10%' of all experts, or a number of slots.")
    ] = "10%,20%,30%"
    prefetch: Annotated[
        bool, typer.Option("--prefetch", help="Load experts ahead with the policies that predict.")
    ] = False
    bandwidth: Annotated[str, typer.Option(help="Bandwidth of the link that loads experts.")] = (
        "1.2GB/s"
    )
    expert_bytes: Annotated[str, typer.Option(help="Size of one expert.")] = "13MB"
    compute_us: Annotated[
        float,
        typer.Option(
            min=0.001, max=1e9, help="Microseconds from the routing of a layer to the next."
        ),
    ] = 1000.0
    warmup: Annotated[int, typer.Option(min=0, help="Requests to replay first and not count.")] = 0
    draw: Annotated[
        int | None, typer.Option(min=1, help="Replay this many requests, drawn at random.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of that draw.")] = 0
    users: Annotated[int, typer.Option(min=1, help="Users whose requests are interleaved.")] = 1
    without: Annotated[
        str,
        typer.Option(
            help=f"Factors to leave out of predictions, separated by commas: {', '.join(FACTORS)}."
        ),
    ] = ""
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that replay at once; fewer need less memory. Default: the cores that "
            "this one may use.",
            show_default=False,
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw hit rates over capacities: a file .svg or .png. Needs the extra plot.",
            dir_okay=False,
        ),
    ] = None


@with_options_of(SimulationOptions)
def simulate(traces: Traces, as_json: AsJson = False, **options: Any) -> None:
    """Replay recorded routing with other policies and capacities. Needs no model."""
    # Imported here: no other command needs them.
    from moe_infinity.system.machine import num_cores
    from moe_infinity.tools.pictures.figures import draw_hit_rates
    from moe_infinity.tools.simulator.laboratory import Experiment, run_experiment, table_of

    asked = taken(SimulationOptions, options)
    if asked.plot is not None:
        check_picture(asked.plot)
    experiment = Experiment.from_text(
        policies=asked.policy,
        capacities=asked.capacity,
        bandwidth=asked.bandwidth,
        expert_bytes=asked.expert_bytes,
        layer_us=asked.compute_us,
        prefetch=asked.prefetch,
        warmup=asked.warmup,
        draw=asked.draw,
        seed=asked.seed,
        users=asked.users,
        without=asked.without,
    )
    files = [path / "experts.npz" if path.is_dir() else path for path in traces]
    with count_bar("simulating") as on_steps:
        rows = run_experiment(files, experiment, jobs=asked.jobs or num_cores(), on_steps=on_steps)
    if asked.plot is not None:
        draw_hit_rates(rows, asked.plot)
    times = (
        f"Times: experts of {asked.expert_bytes} (--expert-bytes) over {asked.bandwidth} "
        f"(--bandwidth), {asked.compute_us:g} us for each layer (--compute-us)."
    )
    write((json.dumps({"rows": rows}) if as_json else f"{table_of(rows)}\n{times}") + "\n")
