"""benchmarks/gpu_kernels.py and gpu_tiles.py, which time kernels of a GPU, run once by their twins:
on a machine with a GPU there is no time for mistakes.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both, without a GPU: each step runs once and takes a microsecond."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu_kernels, gpu_tiles = map(importlib.import_module, ("gpu_kernels", "gpu_tiles"))
    zeros = torch.zeros

    def timed(step: Any, rounds: int) -> float:
        step()
        return 1.0

    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    monkeypatch.setattr(gpu_kernels, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(gpu_kernels, "COPY_BYTES", 4096)
    for module in (gpu_kernels, gpu_tiles):
        monkeypatch.setattr(module, "captured_us", timed)
    return gpu_kernels, gpu_tiles


def tiny(gpu_kernels: Any, kind: str, **options: int) -> Any:
    sizes = {"num_layers": 2, "num_experts": 4, "top_k": 2, "width": 256, "expert_width": 128}
    return gpu_kernels.Sizes(kind=kind, **sizes | options)


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8", "int4", "mxfp4", "gptq", "awq"])
def test_every_kind_is_timed(modules, kind):
    gpu_kernels, _ = modules
    assert kind in gpu_kernels.KINDS
    found = gpu_kernels.measure(tiny(gpu_kernels, kind, num_tokens=2), 1)
    assert {"machinery_us", "resident_share", "layer_share", "fill_one_gbps"} <= found.keys()
    assert {"fill_all_share", "through_gbps", "resolve_miss_us"} <= found.keys()
    assert all(math.isfinite(value) and value > 0 for value in found.values())


def test_what_is_filled_is_what_was_missed(modules):
    gpu_kernels, _ = modules
    layers = gpu_kernels.Layers(tiny(gpu_kernels, "bf16"))
    layers.slots.zero_()
    layers.fill_all(1)
    filled = layers.slots.bool().any(1).nonzero().flatten().tolist()
    assert filled == [4 * row + int(index[0, 0]) for row, index in enumerate(layers.index_LTK)]
    assert torch.equal(layers.slots[filled], layers.host[filled])


@pytest.mark.parametrize("kind", ["bf16", "int4", "awq"])
def test_every_other_tile_is_tried_once(modules, monkeypatch, kind):
    """What fails is a row."""
    gpu_kernels, gpu_tiles = modules
    tried = []

    def timed(step: Any, rounds: int) -> float:
        tried.append(gpu_tiles.tiles_of(layers))
        if len(tried) > 3:
            raise RuntimeError("out of resources")
        return 1.0

    sizes = tiny(gpu_kernels, kind, width=2048, expert_width=768, num_experts=2)
    layers = gpu_kernels.Layers(sizes)
    monkeypatch.setattr(gpu_tiles, "captured_us", timed)
    usual, *rows = gpu_tiles.rows_of(sizes, 1, 10.0)
    assert len(tried) == len(set(tried)) == 1 + len(rows) > 4
    assert usual == {"kind": kind, "tokens": 1, "us": 0.5, "share": usual["share"]}
    assert [row.get("times") for row in rows[:3]] == [1.0, 1.0, None]
    assert all(row["failed"] == "RuntimeError: out of resources" for row in rows[2:])
