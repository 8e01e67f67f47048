"""A recorded run through the simulator has the hits, misses and evictions the engine had, exactly:
what the laboratory finds out is true of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.cache.policies import POLICIES
from moe_infinity.experts import Phase
from moe_infinity.predict.tracefile import load_trace, save_trace
from moe_infinity.tools.simulator.replay import Hardware, Setup, replay
from moe_infinity.tools.simulator.schedule import steps_of
from tests.on_demand import ON_DEMAND

pytestmark = [pytest.mark.timeout(60), pytest.mark.arithmetic]
NUM_LAYERS = 3
HARDWARE = Hardware(bytes_per_s=1e9, expert_bytes=1000, layer_s=1e-3)
Prompts = list[list[int]]

# Several prompts in a layer, a prompt of one token among them.
SINGLY: list[Prompts] = [[[5, 6, 9, 100, 31]], [[7]], [[8, 20, 3]], [[5, 6, 9, 100, 31]]]
BATCH: list[Prompts] = [[[5, 6, 9, 100], [31, 7, 8, 20], [3, 4, 50, 60]]]


def generate(moe: MoE, batches: Sequence[Prompts]) -> None:
    """Always as many tokens: a lane that had ended would run on uncounted."""
    for prompts in batches:
        ids = torch.tensor(prompts)
        settings: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
        moe.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)


@pytest.mark.grid
@pytest.mark.parametrize("batches", [SINGLY, BATCH, SINGLY + BATCH + SINGLY[:2]], ids=[
    "one after the other", "a batch", "both"
])  # fmt: skip
@pytest.mark.sample(3)
@pytest.mark.parametrize("host_memory", ["13%", "40%"])
@pytest.mark.parametrize("policy", POLICIES)
def test_replaying_a_runs_own_trace_gives_its_hits_misses_and_evictions(
    tiny_checkpoint, tmp_path: Path, policy, host_memory, batches
):
    with MoE(
        tiny_checkpoint, host_memory=host_memory, policy=policy, prefetch=False, **ON_DEMAND
    ) as moe:
        with moe.recording() as finish:
            generate(moe, batches)
            sequences = finish()
        report, num_experts = moe.report(), moe.engine.recorder.num_experts
    path = tmp_path / "trace.npz"
    save_trace(path, sequences, num_experts=num_experts)
    trace = load_trace(path)
    num_slots = report.tiers[0].capacity
    setup = Setup(policy=policy, num_slots=num_slots, prefetch=False, hardware=HARDWARE)
    [cell] = replay(
        steps_of(trace.sequences), [setup], num_layers=NUM_LAYERS, num_experts=trace.num_experts
    )
    for phase, engine in ((Phase.PREFILL, report.prefill), (Phase.DECODE, report.decode)):
        replayed = cell.counters.of(phase)
        for field in ("hits", "late_hits", "misses", "steps", "tokens"):
            assert getattr(replayed, field) == getattr(engine, field), (phase, field)
        assert engine.misses > 0
    assert cell.table.evictions == report.evictions > 0
