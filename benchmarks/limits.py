"""What benchmarks share: a process in a memory cgroup, files pushed out of the page cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup")
MOST_ARGUMENT_BYTES = 100_000  # Linux takes 128 KiB


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A group whose processes and page cache get `limit_bytes` and no swap; version 1 or 2 of the
    interface. Needs the right to make one (root in a container, as a rule).
    """
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if is_v2 else CGROUPS / "memory") / f"moe-infinity-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        for name in ("memory.max",) if is_v2 else ("memory.limit_in_bytes",):
            (group / name).write_text(str(limit_bytes))
    except OSError as error:
        raise SystemExit(f"cannot make a memory cgroup: {error}") from error
    for name, text in {"memory.swap.max": "0", "memory.swappiness": "0"}.items():
        if (group / name).exists():
            (group / name).write_text(text)
    try:
        yield group
    finally:
        group.rmdir()


def start(
    file: str, cell: dict[str, Any], group: Path | None, python: str = sys.executable
) -> subprocess.Popen[str]:
    """`python file --cell JSON` in a process of its own, in a memory group if one is given. A long
    prompt is no argument: then it is `--cell @FILE`, which peers_cell.py takes.
    """

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    text = json.dumps(cell)
    if len(text) < MOST_ARGUMENT_BYTES:
        command = [python, file, "--cell", text]
        return subprocess.Popen(command, preexec_fn=join, stdout=subprocess.PIPE, text=True)
    with open(os.memfd_create("cell"), "w+", encoding="utf-8") as memory:
        memory.write(text)
        memory.flush()
        memory.seek(0)
        place = memory.fileno()
        command = [python, file, "--cell", f"@/dev/fd/{place}"]
        return subprocess.Popen(
            command, preexec_fn=join, stdout=subprocess.PIPE, text=True, pass_fds=[place]
        )


def result_of(process: subprocess.Popen[str], timeout_s: float | None = None) -> dict[str, Any]:
    """The last line it prints, once it has ended. A process that takes longer is killed."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"failed": f"took longer than {timeout_s:.0f} s"}
    if process.returncode:
        return {"failed": f"exit status {process.returncode}"}  # -9: out of memory
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def run_limited(
    file: str,
    cell: dict[str, Any],
    limit_bytes: int | None,
    python: str = sys.executable,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """What `python file --cell JSON` prints last, run under this limit if there is one."""
    if limit_bytes is None:
        return result_of(start(file, cell, None, python), timeout_s)
    with memory_cgroup(limit_bytes) as group:
        return result_of(start(file, cell, group, python), timeout_s)


def drop_from_page_cache(path: Path) -> None:
    """The next reads of this file, or of the files of this folder, come from the disk."""
    for file in path.iterdir() if path.is_dir() else [path]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
