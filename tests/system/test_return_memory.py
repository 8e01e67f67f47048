"""Freed memory goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
from pathlib import Path
from moe_infinity.system.memory import return_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

made = [bytes(1000) for _ in range(200_000)]
kept = made[-1]
del made
before = resident()
return_free_memory()
assert before - resident() > 150e6, (before, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others give it back or do not")
def test_freed_memory_goes_back_to_the_system():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
