"""What holds benchmarks/gpu_check.py together: stages that die or do not end, and the routing of
recorded requests.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda.fast_device import CACHES, on_device
from tests.cuda.recorded_graph import record_graphs

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NUM_TOKENS = 6 + 8


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(name)


@pytest.fixture
def check(modules, tmp_path):
    return modules("gpu_stage").Check(tmp_path, tmp_path, is_fake=True, minutes=1)


def rows_of(check: Any, folder: Path) -> dict[str, Any]:
    """As they are written; without how long stages took."""
    told = json.loads((folder / "gpu_check.json").read_text())
    kind = {"is_fake": True, "whole": None}
    tokens = check.found.resident_tokens
    assert told == {"kind": kind, "resident_tokens": tokens, "rows": check.rows}
    return {f"{r['stage']}: {r['name']}": r["value"] for r in check.rows if r["unit"] != "s"}


def test_a_stage_that_is_killed_or_fails_is_a_row_and_the_next_one_runs(check, tmp_path):
    def killed():
        check.add("seen before", 1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    def failing():
        check.found.resident_tokens["a shape"] = [1, 2]
        raise ValueError("not today")

    def following():
        check.add("known before", str(check.found))

    check.stage("first", 1, killed)
    check.stage("second", 1, failing)
    check.stage("third", 1, following)
    assert rows_of(check, tmp_path) == {
        "first: seen before": 1.0,
        "first: stage": "failed: its process ended with -9",
        "second: stage": "failed: ValueError: not today",
        "third: known before": "Found(h2d_gbps=None, resident_tokens={'a shape': [1, 2]})",
    }


def test_a_run_goes_on_with_what_an_earlier_one_has_not_done(check, modules, tmp_path):
    def failing():
        check.add("seen", 1.0)
        raise ValueError("not today")

    def measuring():
        check.found.resident_tokens["a shape"] = [1, 2]
        check.add("seen", 2.0)

    check.stage("link", 1, measuring)
    check.stage("first", 1, failing)
    check.stage("second", 1, measuring)
    check.stage("third", 61, measuring)
    check.stage("a shape: write", 1, measuring)
    earlier = tmp_path / "earlier.json"
    (tmp_path / "gpu_check.json").rename(earlier)
    Check, out = modules("gpu_stage").Check, tmp_path / "out"
    with pytest.raises(SystemExit, match="another kind of run"):
        Check(out, tmp_path, is_fake=True, minutes=1, whole="a shape", resumed=earlier)
    without_time = Check(out, tmp_path, is_fake=True, minutes=0, resumed=earlier)
    without_time.stage("first", 1, measuring)
    assert without_time.rows == check.rows
    resumed = Check(out, tmp_path, is_fake=True, minutes=1, resumed=earlier)
    assert resumed.found.resident_tokens == {"a shape": [1, 2]}
    for name in ("link", "first", "second", "third", "a shape: write"):
        resumed.stage(name, 1, lambda: resumed.add("seen", 3.0))
    assert rows_of(resumed, out) == {
        "second: seen": 2.0, "link: seen": 3.0, "first: seen": 3.0, "third: seen": 3.0,
        "a shape: write: seen": 3.0,
    }  # fmt: skip


def test_a_stage_that_does_not_end_is_left(check, modules, tmp_path, monkeypatch):
    monkeypatch.setattr(modules("gpu_stage"), "FAKE_LIMIT_S", 0.3)
    told = tmp_path / "pid"

    def endless():
        check.add("seen before", True)
        told.write_text(str(os.getpid()))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    check.stage("endless", 1, endless)
    check.stage("next", 1, lambda: check.add("seen after", True))
    assert rows_of(check, tmp_path) == {
        "endless: seen before": True,
        "endless: stage": "failed: not over after 0 s",
        "next: seen after": True,
    }
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_a_stage_whose_own_child_lives_on_is_seen_to_die(check, modules, tmp_path, monkeypatch):
    monkeypatch.setattr(modules("gpu_stage"), "FAKE_LIMIT_S", 10.0)
    told = tmp_path / "pid"

    def killed():
        if child := os.fork():
            told.write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        os._exit(0)

    check.stage("first", 1, killed)
    os.kill(int(told.read_text()), signal.SIGKILL)
    assert rows_of(check, tmp_path) == {"first: stage": "failed: its process ended with -9"}


def test_what_cannot_be_written_fails_its_stage_and_a_full_disk_none(check, tmp_path, monkeypatch):
    check.stage("first", 1, lambda: check.add("seen", np.float32(1)))
    assert rows_of(check, tmp_path)["first: stage"].startswith("failed: TypeError")
    before = (tmp_path / "gpu_check.json").read_text()

    def full(file: Path, text: str) -> None:
        file.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        check.stage("second", 1, lambda: check.add("seen", 1.0))
    assert (tmp_path / "gpu_check.json").read_text() == before
    check.stage("third", 1, lambda: check.add("seen", 2.0))
    assert {"second: seen", "third: seen"} <= rows_of(check, tmp_path).keys()


def test_a_stage_without_time_is_left_out(check, tmp_path):
    check.stage("long", 61, lambda: check.add("seen", True))
    assert rows_of(check, tmp_path) == {"long: stage": "left out: no time"}


def recorded(folder: Path, num_moe_layers: int, lengths: list[int], repeated: int) -> np.ndarray:
    """A trace of eight experts, two for a token."""
    random = np.random.default_rng(0)
    shape = sum(lengths), num_moe_layers, 8
    experts = np.argsort(random.random(shape), axis=2)[:, :, :2].astype(np.uint8)
    folder.mkdir()
    np.savez(folder / "experts.npz", experts=experts, offsets=np.cumsum([0, *lengths]))
    lines = [json.dumps({"has_repetition": i == repeated}) for i in range(len(lengths))]
    (folder / "sequences.jsonl").write_text("\n".join(lines))
    return experts


def test_requests_that_are_long_enough_and_do_not_repeat_are_cut(modules, tmp_path):
    experts = recorded(tmp_path / "of a model", 5, [9, 20, 30, 14], repeated=1)
    shape = modules("gpu_models").Shape("x", 5, 3, 1.0, None, trace="of a model")
    requests = modules("gpu_routing").recorded_requests(tmp_path, shape, NUM_TOKENS)
    expected = np.stack([experts[29:43, [0, 2, 4]], experts[59:, [0, 2, 4]]])
    assert np.array_equal(requests.numpy(), expected)
    without = modules("gpu_models").Shape("x", 5, 3, 1.0, None)
    assert modules("gpu_routing").recorded_requests(tmp_path, without, NUM_TOKENS) is None


@pytest.mark.parametrize("host_memory", ["40%", "100%"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_request_goes_where_the_recorded_one_went(
    tiny_checkpoint, modules, tmp_path, monkeypatch, cache, host_memory
):
    """Also by a graph, and in steps that are lost."""
    record_graphs(monkeypatch)
    experts = recorded(tmp_path / "of a model", 3, [NUM_TOKENS, NUM_TOKENS], repeated=-1)
    requests = torch.from_numpy(experts).long().view(2, NUM_TOKENS, 3, 2)
    prompt = torch.arange(5, 11)[None]
    with on_device(tiny_checkpoint, "30%", host_memory) as moe:
        for request in requests:
            with modules("gpu_routing").replaying(moe, request, "cpu"), moe.recording() as finish:
                moe.generate(prompt, max_new_tokens=9, do_sample=False, **cache)
            (trace,) = finish()
            found = trace.experts_TLK
            assert np.array_equal(found, request.numpy())
        with moe.recording() as finish:
            moe.generate(prompt, max_new_tokens=9, do_sample=False, **cache)
        assert not np.array_equal(finish()[0].experts_TLK, found)
