"""Print the oldest versions that pyproject.toml admits, as constraints for pip: `make test-oldest`.

    python scripts/oldest.py pyproject.toml constraints.txt > oldest.txt

What the package needs at run time is the oldest. The tools of the tests keep their pins, if
nothing at run time is bound to them; whatever else these need, pip chooses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LISTS = ("dependencies", "serve")  # of what runs for a user
TOOLS = "dev"
NAME = r"[\w.-]+"
LOWEST = re.compile(rf'"({NAME})(?:\[[\w,]+\])?>=([\w.]+)')


def lowest_of(project: str, list_name: str) -> dict[str, str]:
    """The lower bounds in one list of pyproject.toml, by name. (Python 3.10 reads no TOML.)"""
    found = re.search(rf"^{list_name} = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"pyproject.toml has no list {list_name}")
    return {name.replace("_", "-").lower(): bound for name, bound in LOWEST.findall(found[1])}


def oldest(project: str, pins: str) -> Iterator[str]:
    run_time: dict[str, str] = {}
    for list_name in LISTS:
        run_time |= lowest_of(project, list_name)
    yield from (f"{name}=={bound}" for name, bound in run_time.items())
    tools = lowest_of(project, TOOLS).keys() - run_time.keys() - {"triton"}  # torch chooses it
    for line in pins.splitlines():
        if line.partition("==")[0].lower() in tools:
            yield line


if __name__ == "__main__":
    project, pins = (Path(name).read_text(encoding="utf-8") for name in sys.argv[1:])
    print(*oldest(project, pins), sep="\n")
