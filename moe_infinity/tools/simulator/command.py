"""The options of `simulate`, and what it does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from moe_infinity.cache.policies import ACTIVATION_AWARE
from moe_infinity.cli.options import above_zero
from moe_infinity.cli.terminal import stderr
from moe_infinity.errors import ConfigError
from moe_infinity.predict.knowledge import FACTORS
from moe_infinity.tools.pictures.figures import check_picture
from moe_infinity.tools.simulator.baselines import SIMULATED_POLICIES
from moe_infinity.tools.simulator.routers import ROUTERS

if TYPE_CHECKING:
    from moe_infinity.tools.simulator.cluster import ClusterExperiment
    from moe_infinity.tools.simulator.laboratory import Experiment

POLICIES = "lru,lfu,request-lfu,moe-infinity-v3,activation-aware"

Traces = Annotated[
    list[Path],
    typer.Argument(help="Traces (.npz), or folders that contain an experts.npz.", exists=True),
]


@dataclass(kw_only=True)
class ReplayOptions:
    """What to replay on which machine."""

    policy: Annotated[
        str | None,
        typer.Option(
            help=f"Separated by commas: {', '.join(SIMULATED_POLICIES)}; belady is always added. "
            f"Default: {POLICIES}; with --replicas {ACTIVATION_AWARE}."
        ),
    ] = None
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
    users: Annotated[
        int,
        typer.Option(
            min=1,
            help="Users whose requests are interleaved; with --replicas, requests that a replica "
            "decodes at once.",
        ),
    ] = 1
    without: Annotated[
        str,
        typer.Option(
            help=f"Factors to leave out of predictions, separated by commas: {', '.join(FACTORS)}."
        ),
    ] = ""


@dataclass(kw_only=True)
class ReplicaOptions:
    """Several machines."""

    replicas: Annotated[
        str | None,
        typer.Option(help="Numbers of machines that have the whole model each, as in '1,2,4'."),
    ] = None
    router: Annotated[
        str,
        typer.Option(
            help="With --replicas: what chooses the machine of a request, separated by commas: "
            f"{', '.join(ROUTERS)}."
        ),
    ] = "round-robin,least-loaded,hash,eam"
    arrivals: Annotated[
        Path | None,
        typer.Option(
            help="With --replicas: CSV with a column arrival_s, stretched to --rate. Default: at "
            "random times.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    rate: Annotated[
        float,
        typer.Option(
            callback=above_zero, help="With --replicas: requests a minute, for each machine."
        ),
    ] = 1.0
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With --replicas: cut each request to so many tokens."),
    ] = None


@dataclass(kw_only=True)
class SimulationOptions:
    """How a simulation runs, and what it draws."""

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


def simulated(files: Sequence[Path], options: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Rows, and a table of them for people. Raises ConfigError, TraceError, OutputError."""
    # Not needed by other commands.
    from moe_infinity.system.machine import num_cores
    from moe_infinity.tools.pictures.hit_rates import draw_hit_rates
    from moe_infinity.tools.simulator import cluster, laboratory

    plot = options["plot"]
    if plot is not None:
        if options["replicas"] is not None:
            raise ConfigError("--plot draws one machine: leave out --plot or --replicas")
        check_picture(plot)
    with simulation_progress() as on_work:
        jobs = options["jobs"] or num_cores()
        if options["replicas"] is not None:
            together = cluster_experiment_of(options)
            rows = cluster.run_cluster(files, together, jobs=jobs, on_requests=on_work)
            return rows, f"{cluster.table_of(rows)}\n{assumed(options)}"
        alone = experiment_of(options)
        rows = laboratory.run_experiment(files, alone, jobs=jobs, on_steps=on_work)
    if plot is not None:
        draw_hit_rates(rows, plot)
    return rows, f"{laboratory.table_of(rows)}\n{assumed(options)}"


def assumed(options: Mapping[str, Any]) -> str:
    """What the times of a table stand on."""
    return (
        f"Times: experts of {options['expert_bytes']} (--expert-bytes) over {options['bandwidth']} "
        f"(--bandwidth), {options['compute_us']:g} us for each layer (--compute-us)."
    )


@contextmanager
def simulation_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, with the time that is left."""
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("simulating", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def experiment_of(options: Mapping[str, Any]) -> Experiment:
    """On one machine. Raises ConfigError."""
    from moe_infinity.tools.simulator.laboratory import Experiment

    return Experiment.from_text(
        policies=options["policy"] or POLICIES,
        prefetch=options["prefetch"],
        draw=options["draw"],
        users=options["users"],
        without=options["without"],
        **common_of(options),
    )


def cluster_experiment_of(options: Mapping[str, Any]) -> ClusterExperiment:
    """On several. Raises ConfigError."""
    from moe_infinity.tools.simulator.cluster import ClusterExperiment

    return ClusterExperiment.from_text(
        policies=options["policy"] or ACTIVATION_AWARE,
        replicas=options["replicas"],
        routers=options["router"],
        rate=options["rate"] / 60,
        arrivals=options["arrivals"],
        num_places=options["users"],
        num_requests=options["draw"],
        num_tokens=options["tokens"],
        **common_of(options),
    )


def common_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What experiments on one machine and on several have in common."""
    return {
        "capacities": options["capacity"],
        "bandwidth": options["bandwidth"],
        "expert_bytes": options["expert_bytes"],
        "layer_us": options["compute_us"],
        "warmup": options["warmup"],
        "seed": options["seed"],
    }
