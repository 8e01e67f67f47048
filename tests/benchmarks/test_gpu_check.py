"""benchmarks/gpu_check.py: its logic on a fake device, and what it says without a GPU."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"


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


def recorded_trace(folder: Path, *, num_moe_layers: int, num_experts: int, top_k: int) -> None:
    """Of three requests, long enough to be replayed."""
    folder.mkdir()
    ranks = np.random.default_rng(0).random((3 * 110, num_moe_layers, num_experts)).argsort(axis=2)
    np.savez(
        folder / "experts.npz", experts=ranks[:, :, :top_k].astype(np.uint8),
        offsets=np.arange(4) * 110,
    )  # fmt: skip
    (folder / "sequences.jsonl").write_text("{}\n" * 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_a_fake_device_every_stage_runs_and_every_token_is_right(tmp_path):
    for name in ("deepseek-v2-lite_esft", "gpt-oss-20b_decode"):
        experts, top_k = (64, 6) if name.startswith("deepseek") else (32, 4)
        recorded_trace(tmp_path / name, num_moe_layers=26, num_experts=experts, top_k=top_k)
    done = call("--fake", "--out", str(tmp_path), "--minutes", "60", "--traces", str(tmp_path))
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert done.returncode == 0, done.stdout[-3000:]
    same = [row["value"] for row in rows if row["name"] == "same tokens"]
    tiny, budgets = 8 + 8 + 4 + 3 * 6, 3 * (3 + 3 + 1 + 3 + 3)  # of five shapes, three ways
    assert len(same) == tiny + budgets + 5
    assert all(same)
    assert [row["captured"] for row in rows if row["name"] == "fast path, all hits"] == ["True"] * 5
    assert {
        "prefill, 512 tokens", "decode, 8 GB", "machinery, per layer", "fast path, all hits",
        "fast path, all hits, no graph", "fast path, 8 GB, fill", "experts as their reference",
    } <= {row["name"] for row in rows}  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == []
    assert {(row["shape"], row["routing"]) for row in rows if "routing" in row} == {
        ("qwen3-30b-a3b", "random"), ("mixtral-8x7b", "random"), ("gpt-oss-120b", "random"),
        ("deepseek-v2-lite", "recorded"), ("gpt-oss-20b", "recorded"),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_shape_is_measured_with_all_its_layers_and_a_second_run_goes_on(tmp_path):
    recorded_trace(tmp_path / "gpt-oss-20b_decode", num_moe_layers=24, num_experts=32, top_k=4)
    recorded_trace(tmp_path / "deepseek-v2-lite_esft", num_moe_layers=26, num_experts=64, top_k=6)
    options = "--fake", "--out", str(tmp_path), "--traces", str(tmp_path), "--whole", "gpt-oss-20b"
    first = call(*options, "--minutes", "60")
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert first.returncode == 0, first.stdout[-3000:]
    capped = [row for row in rows if row["name"].startswith("fast path, 8 GB")]
    assert [(row["layers"], row["routing"]) for row in capped] == [(24, "recorded")] * 3
    second = call(*options, "--minutes", "0", "--resume", str(tmp_path / "gpu_check.json"))
    assert second.returncode == 0, second.stdout[-3000:]
    assert json.loads((tmp_path / "gpu_check.json").read_text())["rows"] == rows
