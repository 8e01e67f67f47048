"""`moe-infinity plan`: what to expect of a model on a machine, before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moe_infinity.cli.models import config_of
from moe_infinity.cli.options import ConfigFrom, KvDtype, Model
from moe_infinity.cli.terminal import stderr, write
from moe_infinity.tools.planning.machine import parse_machine


def plan(
    model: Model,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not measure the disk, which takes 3 seconds.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of a page.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Plan for another machine: 'ram=32GiB,disk=3GB/s,gpu=24GiB,link=25GB/s,cores=8,"
            "memory=60GB/s'. What is left out is assumed.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="As of `run`, whose default is taken if this is left out.")
    ] = None,
    config_from: ConfigFrom = None,
    kv_dtype: KvDtype = "auto",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Take hit rates from this trace of the model (.npz), not from recorded models.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Say whether a model fits a machine, how fast it will be, and why.

    Reads config and headers only, those of a hub id over the network.
    """
    told = parse_machine(machine) if machine is not None else None
    config_of({"host_memory": host_memory, "kv_dtype": kv_dtype})
    # Imported here: torch takes seconds to import.
    from moe_infinity.tools.planning.fit import sizes_of
    from moe_infinity.tools.planning.page import page
    from moe_infinity.tools.planning.planner import PlannedRun, make_plan, measured_machine
    from moe_infinity.tools.planning.speed import Constants

    with stderr.status("reading headers"):
        sizes = sizes_of(model, config_from=config_from, kv_dtype=kv_dtype)
    with stderr.status("measuring this machine"):
        found = told or measured_machine(sizes, measures_disk=not quick)
    planned = PlannedRun(host_memory=host_memory, config_from=config_from, trace=trace)
    made = make_plan(sizes, found, planned, Constants())
    write((json.dumps(made.as_dict()) if as_json else page(made)) + "\n")
