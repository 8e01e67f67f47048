"""`moe-infinity cluster ...`"""

from __future__ import annotations

from typing import Annotated

import typer

from moe_infinity.cli.serve import require_extra
from moe_infinity.cli.terminal import write

cluster = typer.Typer(help="Several hosts, on Ray.", no_args_is_help=True)


@cluster.callback()
def several() -> None:
    """Several hosts, on Ray. Needs the extra cluster."""


@cluster.command()
def demo(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder.", metavar="MODEL")
    ] = "models/demo",
) -> None:
    """Start two local Ray nodes, an expert host and two replicas, kill some, and compare tokens.
    Exit code 0 only if all were the same.
    """
    require_extra(["ray", "fastapi", "httpx"], "cluster")
    from moe_infinity.cluster.demo import demo as run

    if not run(model, lambda line: write(line + "\n")):
        write("not all was as it should be\n")
        raise typer.Exit(1)
    write("all as with one process\n")
