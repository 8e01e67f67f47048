"""benchmarks/gpu_check.py: its logic on a fake device, and what it says without a GPU."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_check.py"


def call(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=600
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script's own folder is added to it
    with pytest.raises(SystemExit, match="finds no CUDA device; --fake"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_a_fake_device_every_stage_runs_and_every_token_is_right(tmp_path):
    done = call("--fake", "--out", str(tmp_path), "--minutes", "60")
    rows = json.loads((tmp_path / "gpu_check.json").read_text())
    assert done.returncode == 0, done.stdout[-3000:]
    same = [row["value"] for row in rows if row["name"] == "same tokens"]
    tiny, budgets = 18 + 18 + 9 + 3 * 12, 3 * (3 + 3 + 1 + 3 + 3)  # of five shapes, three ways
    assert len(same) == tiny + budgets + 5
    assert all(same)
    assert [row["captured"] for row in rows if row["name"] == "fast path, all hits"] == ["True"] * 5
    assert {
        "prefill, 512 tokens", "decode, 8 GB", "machinery, per layer", "fast path, all hits",
        "fast path, all hits, no graph", "fast path, 8 GB, fill", "slot_moe as its twin",
    } <= {row["name"] for row in rows}  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == []
