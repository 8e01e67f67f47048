"""What holds benchmarks/gpu_check.py together: stages that die, do not end, or find no time."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out" / "time.jsonl"


@pytest.fixture
def check(modules, file):
    return modules("gpu_stage").Check(file, is_fake=True, minutes=1)


def values(check: Any) -> dict[str, Any]:
    """Without when stages began, and how long they took."""
    kept = [r for r in check.rows() if r["name"] != "begun" and r["unit"] != "s"]
    return {f"{row['stage']}: {row['name']}": row["value"] for row in kept}


def test_a_stage_that_is_killed_or_fails_is_a_row_and_the_next_one_runs(check):
    def killed():
        check.add("seen before", 1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    def failing():
        raise ValueError("not today")

    check.stage("first", 1, killed)
    check.stage("second", 1, failing)
    check.stage("third", 1, lambda: check.add("known before", str(check.value("seen before"))))
    assert values(check) == {
        "first: seen before": 1.0,
        "first: ended": "failed: its process ended with -9",
        "second: ended": "failed: ValueError: not today",
        "third: known before": "1.0",
    }


def test_a_run_goes_on_with_what_an_earlier_one_has_not_done(check, modules, file):
    def failing():
        check.add("seen", 1.0)
        raise ValueError("not today")

    def measuring():
        check.add("seen", 2.0)

    names = "machine", "first", "second", "third", "write a shape"
    for name in names:
        run = failing if name == "first" else measuring
        check.stage(name, 61 if name == "third" else 1, run)
    Check = modules("gpu_stage").Check
    without_time = Check(file, is_fake=True, minutes=0, is_resumed=True)
    without_time.stage("first", 1, measuring)
    assert without_time.rows() == check.rows()
    resumed = Check(file, is_fake=True, minutes=1, is_resumed=True)
    for name in names:
        resumed.stage(name, 1, lambda: resumed.add("seen", 3.0))
    assert values(resumed) == {
        "second: seen": 2.0, "machine: seen": 3.0, "first: seen": 3.0, "third: seen": 3.0,
        "write a shape: seen": 3.0,
    }  # fmt: skip


def test_rows_of_an_earlier_run_are_not_overwritten(check, modules, file):
    with pytest.raises(SystemExit, match="--resume goes on with it"):
        modules("gpu_stage").Check(file, is_fake=True)


def test_a_stage_that_does_not_end_is_left_with_all_that_it_has_started(modules, file, tmp_path):
    check = modules("gpu_stage").Check(file, is_fake=True, minutes=0.03)
    told = tmp_path / "pids"

    def endless():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "60"])
        told.write_text(f"{os.getpid()} {child.pid}")
        check.add("seen before", True)
        time.sleep(60)

    check.stage("endless", 0, endless)
    assert values(check) == {
        "endless: seen before": True,
        "endless: ended": "failed: it took too long",
    }
    for pid in told.read_text().split():
        stat = Path(f"/proc/{pid}/stat")  # a killed child may wait for its parent's parent
        assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX"


def test_a_stage_ends_once_nobody_waits_for_it(check, monkeypatch):
    def orphan():
        monkeypatch.setattr(os, "getppid", lambda: 1)
        check.add("seen", True)

    check.stage("first", 1, orphan)
    assert values(check) == {"first: ended": "failed: its process ended with 1"}


def test_a_stage_without_time_is_left_out(check):
    check.stage("long", 61, lambda: check.add("seen", True))
    assert values(check) == {"long: ended": "left out: no time"}


def test_what_cannot_be_written_fails_its_stage_and_a_full_disk_none(check, file, monkeypatch):
    check.stage("first", 1, lambda: check.add("seen", np.float32(1)))
    assert values(check)["first: ended"].startswith("failed: TypeError")
    with file.open("a") as opened:
        opened.write('{"stage": "first", "na')  # as much as a full disk took
    open_file = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        if "a" in mode:
            raise OSError(28, "No space left on device")
        return open_file(self, mode, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        check.stage("second", 1, lambda: check.add("seen", 1.0))
    check.stage("third", 1, lambda: check.add("seen", 2.0))
    assert values(check)["third: seen"] == 2.0


def test_a_figure_is_given_as_a_share_of_what_bounds_it(check, modules, file):
    Bound = modules("gpu_stage").Bound
    check.add("link", 50.0, "GB/s")
    check.add("token", 4.0, "ms", check.takes(1e8, by="link"))
    check.add("rate", 20.0, "GB/s", Bound("link", 50.0))
    rows = [json.loads(line) for line in file.read_text().split("\n")[1:]]
    assert [(r["bound_by"], r["bound"], r.get("of_bound")) for r in rows] == [
        ("itself", None, None), ("link", 2.0, 0.5), ("link", 50.0, 0.4),
    ]  # fmt: skip


def test_a_checkpoint_is_there_as_long_as_a_stage_needs_it(check, modules):
    gpu_models, Stage = modules("gpu_models"), modules("gpu_stage").Stage
    shape = gpu_models.Shape("qwen3", gpu_models.qwen3, 2, 48, 58.0, is_tiny=True)

    def seen(check: Any, folder: Path, shape: Any) -> None:
        sizes = gpu_models.sizes_of(folder)
        files = [file.stat().st_size for file in folder.glob("*.safetensors")]
        check.add("bytes", sum(sizes.values()) / sum(files))
        check.add("folder", str(folder))

    def gone(check: Any) -> None:
        check.add("gone", not Path(check.value("folder")).exists())

    check.run(
        [Stage("first", 1, seen, shape), Stage("second", 1, seen, shape), Stage("third", 1, gone)]
    )
    found = values(check)
    assert found["first: folder"] == found["second: folder"]
    assert found["third: gone"] is True
    assert 0.95 < found["first: bytes"] < 1  # and headers


def test_two_depths_tell_what_a_layer_takes_and_what_is_beside_them(check, modules):
    Bound = modules("gpu_stage").Bound
    for layers, ms in ((24, 7.0), (8, 3.0)):
        bound = Bound("device memory", layers / 16)
        check.add("token", ms, "ms", bound, way="graph", batch=1, layers=layers)
    check.add("token", 9.0, "ms", Bound("device memory", 1.0), way="other", batch=1, layers=24)
    modules("gpu_plans").slopes(check)
    found = {row["name"]: (row["value"], row["bound"]) for row in check.rows()[3:]}
    assert found == {
        "a layer": (0.25, 0.0625),
        "token, by these, of no layers": (1.0, 0.0),
        "token, by these, of 48 layers": (13.0, 3.0),
    }


def test_kernels_of_a_kind_are_found_by_their_names(modules):
    kind_of = modules("gpu_measure").kind_of
    assert kind_of("_resolve") == "find and copy experts"
    assert kind_of("_up") == "experts"
    assert kind_of("nvjet_tst_64x8_64x16_4x1_v_bz_TNT") == "matrix products"
    assert kind_of("vectorized_elementwise_kernel") == "others"
