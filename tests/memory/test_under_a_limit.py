"""A model larger than a memory control group's limit runs in it, with a budget or without one."""

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
    """390 MiB, with a tokenizer. Python, torch and transformers take 350 MiB themselves."""
    for file in hollow_checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    save_tokenizer(tmp_path)
    return tmp_path


def soak(checkpoint: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(SOAK), str(checkpoint), "--limit", f"{LIMIT_MIB}MiB"]
    command += ["--tokens", str(TOKENS), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot make a memory cgroup" in done.stderr:
        pytest.skip(done.stderr.strip())
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["stayed_under"], result
    assert (result["tokens"], result["oom_kills"], result["peak_swap_bytes"]) == (TOKENS, 0, 0)
    assert 100 << 20 < result["peak_held_bytes"] < result["limit_bytes"]
    return result


def test_the_automatic_budget_leaves_room_below_the_limit(checkpoint):
    result = soak(checkpoint)
    assert 0 < result["slots"] < 32, "all 32 experts and the rest would not fit"


def test_with_a_budget_the_page_cache_is_left_alone(checkpoint):
    result = soak(checkpoint, "--host-memory", "30MiB")
    assert result["slots"] == 2
    assert result["read_bytes"] > 200 << 20
    assert result["peak_page_cache_bytes"] < 100 << 20
    assert result["limit_met"] == 0
