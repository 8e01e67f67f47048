"""`moe-infinity doctor`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer
from rich.markup import escape

from moe_infinity.cli.options import AsJson
from moe_infinity.cli.terminal import stderr, write
from moe_infinity.errors import ConfigError

COLUMN = 18


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not measure the disk, which takes seconds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look at this machine and its packages, and say what to change.

    Exit code 1 if something has to be changed before models run. Changes nothing.
    """
    try:
        from moe_infinity.tools.doctor.examination import examine
    except ImportError as error:
        raise ConfigError(
            f"doctor itself needs {error.name}, which cannot be imported\n"
            f"hint: pip install {error.name}"
        ) from error
    lines = []
    with stderr.status("looking at packages, memory and disks"):
        for line in examine(is_quick=quick):
            lines.append(line)
            if not as_json:
                write(f"{line.state:<8} {line.check:<{COLUMN}} {line.finding}\n")
                if line.hint:
                    write(f"{'':<8} {'':<{COLUMN}} -> {line.hint}\n")
    states = Counter(line.state for line in lines)
    if as_json:
        counts = {"errors": states["error"], "warnings": states["warning"]}
        write(json.dumps({"lines": [line._asdict() for line in lines], **counts}) + "\n")
    stderr.print(escape(f"{states['error']} errors, {states['warning']} warnings"))
    if states["error"]:
        raise typer.Exit(1)
