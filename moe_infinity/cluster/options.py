"""The options of expert hosts on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(kw_only=True)
class ClusterOptions:
    """Options of `ClusterConfig` that `OffloadConfig` does not have."""

    expert_hosts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Other hosts that share the experts, each with host memory of its own; without "
            "--cluster processes of this machine.",
        ),
    ] = 0
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Address of a Ray cluster for --expert-hosts or --replicas. Needs the extra "
            "cluster.",
            metavar="ADDRESS",
        ),
    ] = None
    expert_host_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds of silence after which one of them is given up."),
    ] = 2.0
