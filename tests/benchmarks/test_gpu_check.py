"""benchmarks/gpu_check.py: its three commands on a fake device, and what it says without a GPU."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"
pytestmark = pytest.mark.timeout(900)


def command_of(folder: Path, command: str, *more: str) -> list[str]:
    options = ["--fake", "--minutes", "60", "--out", str(folder), "--carried", str(folder)]
    return [sys.executable, str(SCRIPT), command, *options, *more]


def rows_of(folder: Path, command: str, *more: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        command_of(folder, command, *more), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["wrong"], last["failed"]) == ([], [])
    return read(folder / f"{command}.jsonl")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "time", "--out", str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script's own folder is added to it
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(SystemExit, match="finds no CUDA device; --fake"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_correct_checks_tests_tokens_and_logits(tmp_path):
    rows = rows_of(tmp_path, "correct")
    right = [(row["stage"], row["value"]) for row in rows if isinstance(row["value"], bool)]
    assert all(value for _, value in right)
    assert len([stage for stage, _ in right if stage.startswith("tokens of tiny")]) == 3 * 4
    assert len([stage for stage, _ in right if stage.startswith("logits of")]) == 3 * 2
    assert len([stage for stage, _ in right if stage.startswith("tests of")]) == 2
    of_graphs = [stage for stage, _ in right if stage.startswith("graphs, ")]
    assert len(of_graphs) == 3 * 2 * 2 + 3 * 2 + 3  # tokens, logits, tests
    assert {"link", "page-locking", "kernels read locked pages at"} <= {r["name"] for r in rows}


@pytest.mark.slow
def test_time_gives_what_a_layer_takes_in_every_way(tmp_path):
    rows = rows_of(tmp_path, "time")
    ways = {"default", "graphs", "transformers", "transformers, compiled"}
    assert {row["way"] for row in rows if row["name"] == "a layer"} == ways
    assert {row["bound_by"] for row in rows if row["name"] == "token"} <= {
        "device memory", "matrix product",
    }  # fmt: skip
    assert {(row["batch"], row["prompt"]) for row in rows if row["name"] == "first token"} == {
        (1, 64), (3, 64), (1, 128),
    }  # fmt: skip
    nodes = [row["nodes"] for row in rows if row["name"] == "kernels: all"]
    assert len(nodes) == 4  # by default 24 layers and 8, and so by graphs
    assert nodes[0] > nodes[1] > 0
    assert nodes[2] > nodes[3] > 0


@pytest.mark.slow
def test_offloaded_is_killed_and_goes_on_with_recorded_requests(tmp_path):
    for name, num_experts, top_k in (("deepseek-v2-lite", 64, 6), ("gpt-oss-20b", 32, 4)):
        ranks = np.random.default_rng(0).random((3, 104, 26, num_experts)).argsort(axis=3)
        np.save(tmp_path / f"{name}.npy", ranks[..., :top_k].astype(np.uint8))
    file = tmp_path / "offloaded.jsonl"
    with subprocess.Popen(command_of(tmp_path, "offloaded"), stdout=subprocess.DEVNULL) as first:
        while not (file.exists() and any(row["name"] == "token" for row in read(file))):
            assert first.poll() is None
            time.sleep(0.2)
        first.send_signal(signal.SIGKILL)
    before = read(file)
    rows = rows_of(tmp_path, "offloaded", "--resume")
    assert rows[: len(before)] == before
    ended = [row["stage"] for row in rows if row["name"] == "ended"]
    again = {stage for stage in ended if ended.count(stage) > 1}
    assert all(stage == "machine" or stage.startswith("write ") for stage in again)
    assert "machine" in again
    same = [row["value"] for row in rows if row["name"] == "same tokens"]
    assert all(same)
    assert len(same) == 3 * 2 + 2 * 2 + 2 * 2  # 8 GB by the host, 12 GB, 24 GB
    assert {(row["model"], row["routing"]) for row in rows if "routing" in row} == {
        ("qwen3-30b-a3b", "random"), ("deepseek-v2-lite", "random"),  # cold
        ("deepseek-v2-lite", "recorded"), ("gpt-oss-20b", "recorded"),
    }  # fmt: skip
    served = [row["batch"] for row in rows if row["name"] == "token" and row["way"] == "server"]
    assert served == [1, 3]
