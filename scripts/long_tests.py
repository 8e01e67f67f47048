"""Write tests/long_tests.txt from what pytest printed about durations.

    make test test-long PYTEST_ADDOPTS="--durations=0 --durations-min=0.5" | tee test.log
    python -m scripts.long_tests test.log

A test function is in the file if a set of its parameters took `SECONDS` or more in one of its parts
(setup, call, teardown). `make test` leaves these out, and `make test-long` runs them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "tests" / "long_tests.txt"
SECONDS = 0.5
DURATION = re.compile(r"([\d.]+)s (?:setup|call|teardown) +([^\[\s]+)")


def long_tests(log: str) -> list[str]:
    """Ids of test functions without parameters, sorted."""
    durations = (DURATION.match(line) for line in log.splitlines())
    return sorted({found[2] for found in durations if found and float(found[1]) >= SECONDS})


if __name__ == "__main__":
    FILE.write_text(
        "".join(f"{each}\n" for each in long_tests(Path(sys.argv[1]).read_text("utf-8")))
    )
