"""Print constraints for pip: the oldest or the newest versions that pyproject.toml admits.

    python scripts/admitted.py oldest > constraints.txt

`make test-oldest` and `make test-newest` install with them. What the package needs at run time is
at its lower bound, or free. The tools of the tests keep the pins of constraints.txt, and pip
chooses whatever else is needed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTS = ("dependencies", "serve")  # of what runs for a user
TOOLS = "dev"
LOWEST = re.compile(r'"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)')


def lowest_of(project: str, list_name: str) -> dict[str, str]:
    """The lower bounds in one list of pyproject.toml, by name. (Python 3.10 reads no TOML.)"""
    found = re.search(rf"^{list_name} = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"pyproject.toml has no list {list_name}")
    return {name.replace("_", "-").lower(): bound for name, bound in LOWEST.findall(found[1])}


def constraints(which: str, project: str, pins: str) -> Iterator[str]:
    """The lines for "oldest" or "newest"."""
    run_time: dict[str, str] = {}
    for list_name in LISTS:
        run_time |= lowest_of(project, list_name)
    if which == "oldest":
        yield from (f"{name}=={bound}" for name, bound in run_time.items())
    tools = lowest_of(project, TOOLS).keys() - run_time.keys() - {"triton"}  # torch chooses it
    yield from (line for line in pins.splitlines() if line.partition("==")[0].lower() in tools)


if __name__ == "__main__":
    if sys.argv[1:] not in (["oldest"], ["newest"]):
        sys.exit(__doc__)
    texts = [(ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "constraints.txt")]
    print(*constraints(sys.argv[1], *texts), sep="\n")
