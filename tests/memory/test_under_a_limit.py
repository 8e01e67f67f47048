"""A model that fits into the machine, but not below the limit of its memory control group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import save_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"
LIMIT_MIB, TOKENS = 640, 12


@pytest.fixture
def checkpoint(hollow_checkpoint, tmp_path) -> Path:
    """A checkpoint of 390 MiB, with a tokenizer. Python, torch and transformers take 350 MiB."""
    for file in hollow_checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    save_tokenizer(tmp_path)
    return tmp_path


def test_the_automatic_budget_leaves_room_below_the_limit(checkpoint):
    command = [sys.executable, str(SOAK), str(checkpoint), "--limit", f"{LIMIT_MIB}MiB"]
    done = subprocess.run([*command, "--tokens", str(TOKENS)], capture_output=True, text=True)
    if "cannot make a memory cgroup" in done.stderr:
        pytest.skip(done.stderr.strip())
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["stayed_under"], result
    assert (result["tokens"], result["oom_kills"], result["peak_swap_bytes"]) == (TOKENS, 0, 0)
    assert 100 << 20 < result["peak_held_bytes"] < result["limit_bytes"]
    assert 0 < result["slots"] < 32, "all 32 experts and the rest would not fit"
