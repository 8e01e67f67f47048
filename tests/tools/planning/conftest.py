"""A model whose sums can be done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_infinity.memory.needs import KvBytes
from moe_infinity.tools.planning.fit import ModelSizes
from moe_infinity.tools.planning.machine import PlanMachine
from tests.gguf_files import build
from tools.convert_to_gguf import convert

MB = 10**6

SIZES = ModelSizes(
    model="some/model",
    architecture="SomeForCausalLM",
    folder=Path(),
    num_layers=10,
    num_experts=100,
    top_k=5,
    packing=None,
    slot_bytes=10 * MB,
    stored_bytes=10 * MB,
    expert_params=5 * MB,
    dense_bytes=1000 * MB,
    row_bytes=0,
    table_params=0,
    step_dense_bytes=900 * MB,
    dense_params=400 * MB,
    head_params=50 * MB,
    kv=KvBytes(per_token=1000, per_window_token=500, window=128),
    pass_bytes=10**7,
)
MACHINE = PlanMachine(
    cores=2,
    ram=5e9 + 2**29,
    disk=1e9,
    memory=10e9,
    new_memory=2e9,
    products=100e9,
    link=20e9,
    gpu_memory=400e9,
)


@pytest.fixture
def sizes() -> ModelSizes:
    """10 GB of experts: 1,000 of 10 MB, of which a token uses 50."""
    return SIZES


@pytest.fixture
def machine() -> PlanMachine:
    """5 GB beside Python and torch, round rates."""
    return MACHINE


@pytest.fixture
def large_machine() -> PlanMachine:
    return replace(MACHINE, ram=30e9)


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("gguf")
    convert(build("qwen3_moe", folder / "model"), folder / "model.gguf", "bf16")
    return folder / "model.gguf"
