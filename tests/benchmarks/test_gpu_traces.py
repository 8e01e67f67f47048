"""Recorded requests: what is carried of them, and where the tokens of a model go."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.fast_device import CACHES, on_device
from tests.gpu.recorded_graph import record_graphs

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NUM_TOKENS = 6 + 8


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(name)


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


def test_requests_that_are_long_enough_and_do_not_repeat_are_carried(
    modules, tmp_path, monkeypatch, capsys
):
    gpu_traces = modules("gpu_traces")
    experts = recorded(tmp_path / "of a model", 5, [9, 20, 30, 14], repeated=1)
    monkeypatch.setattr(gpu_traces, "TRACES", {"x": "of a model"})
    monkeypatch.setattr(gpu_traces, "MOST_TOKENS", NUM_TOKENS)
    carried = tmp_path / "carried"
    gpu_traces.carry(tmp_path, carried)
    assert capsys.readouterr().out == f"{carried}\n"
    shape = modules("gpu_models").Shape("x", None, 3, 5, 1.0)
    expected = np.stack([experts[29:43, [0, 2, 4]], experts[59:, [0, 2, 4]]])
    assert np.array_equal(gpu_traces.requests_of(carried, shape).numpy(), expected)
    other = modules("gpu_models").Shape("y", None, 3, 5, 1.0)
    assert gpu_traces.requests_of(carried, other) is None
    folders = [file.name.partition("-")[0] for file in (carried / "packages").iterdir()]
    assert sorted(folders) == sorted(2 * gpu_traces.PACKAGES)  # code, and which version it is


def test_what_is_too_large_to_be_carried_is_refused(modules, tmp_path, monkeypatch):
    gpu_traces = modules("gpu_traces")
    monkeypatch.setattr(gpu_traces, "TRACES", {})
    monkeypatch.setattr(gpu_traces, "MOST_CARRIED", 1 << 20)
    with pytest.raises(SystemExit, match="MiB, more than can be carried"):
        gpu_traces.carry(tmp_path, tmp_path / "carried")


def test_a_missing_trace_is_named(modules, tmp_path):
    with pytest.raises(SystemExit, match="has no deepseek-v2-lite_esft"):
        modules("gpu_traces").carry(tmp_path, tmp_path / "carried")


@pytest.mark.parametrize("cache", CACHES)
def test_a_request_goes_where_the_recorded_one_went(
    tiny_checkpoint, modules, tmp_path, monkeypatch, cache
):
    """Also by a graph that was captured in another request."""
    graphs = record_graphs(monkeypatch)
    experts = recorded(tmp_path / "of a model", 3, [NUM_TOKENS, NUM_TOKENS], repeated=-1)
    requests = torch.from_numpy(experts).long().view(2, NUM_TOKENS, 3, 2)
    prompt = torch.arange(5, 11)[None]
    with on_device(tiny_checkpoint, "30%") as moe:
        replay = modules("gpu_traces").Replay(moe, requests)
        for number, request in enumerate(requests):
            replay.begin(number)
            with moe.recording() as finish:
                moe.generate(prompt, max_new_tokens=9, do_sample=False, **cache)
            (trace,) = finish()
            assert np.array_equal(trace.experts_TLK, request.numpy())
    assert len(graphs) == (0 if cache else 1)


def test_without_recorded_requests_the_router_decides(tiny_checkpoint, modules):
    prompt = torch.arange(5, 11)[None]
    found = []
    for is_replayed in (False, True):
        with on_device(tiny_checkpoint, "30%") as moe:
            if is_replayed:
                replay = modules("gpu_traces").Replay(moe, None)
                replay.begin(1)
            with moe.recording() as finish:
                moe.generate(prompt, max_new_tokens=9, do_sample=False)
            found.append(finish()[0].experts_TLK)
    without, replayed = found
    assert np.array_equal(without, replayed)
