"""What does our own bookkeeping cost per MoE layer?

One decode step of one token, every expert resident. A: the layer with its arithmetic (gathering
rows, expert MLPs, weighting, sum) replaced by calls that return at once; what is left is reading
and sorting the routing, recording the EAM, the policy, lookup, hold, release. B: the layer as it
is, in alternation, so that A starts from caches that arithmetic has just used.

    python benchmarks/machinery.py [--top-k 8] [--experts 128] [--layers 48] [--policy lru]

The target is for a policy that does not predict; what predicting adds: benchmarks/policies/cost.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from moe_infinity import MoE
from moe_infinity.engine.compute import LayerComputer
from moe_infinity.experts import Phase, Step

TARGET_US = 50.0
ROUNDS = 60


def write_tiny_model(folder: Path, *, layers: int, experts: int, top_k: int) -> None:
    """Qwen3-MoE with many tiny experts: a real model's bookkeeping, little arithmetic."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=16,
    )
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class NoWork:
    """Touches no tensor."""

    def compute(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None: ...
    def sum(self) -> Any: ...


def measure(moe: MoE, *, layers: int, experts: int, top_k: int) -> dict[str, list[float]]:
    """Microseconds per layer of every round, without and with arithmetic."""
    engine = moe.engine
    begin = LayerComputer.begin
    variants: dict[str, Any] = {"own": lambda *_: NoWork(), "layer": begin}
    for layer in range(layers):  # bring everything in
        engine.begin_step(Step(Phase.DECODE, 1, experts, begins_B=np.zeros(1, dtype=bool)))
        x_TD = torch.randn(experts, 32, dtype=torch.bfloat16)
        index_TK = torch.arange(experts)[:, None]
        engine.layer(layer, x_TD, index_TK, torch.ones(experts, 1))
    x_TD, weights_TK = torch.randn(1, 32, dtype=torch.bfloat16), torch.rand(1, top_k)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        routing = [torch.randperm(experts)[None, :top_k] for _ in range(layers)]
        for name, variant in variants.items():
            with mock.patch.object(LayerComputer, "begin", variant):
                engine.begin_step(Step(Phase.DECODE, 1, 1, begins_B=np.zeros(1, dtype=bool)))
                started = time.perf_counter()
                for layer in range(layers):
                    engine.layer(layer, x_TD, routing[layer], weights_TK)
                times[name].append((time.perf_counter() - started) / layers * 1e6)
    assert moe.report().decode.misses == layers * experts, "every measured lookup must be a hit"
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--policy", default="lru")
    shape = vars(parser.parse_args())
    policy = shape.pop("policy")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), **shape)
        with MoE(folder, host_memory="100%", policy=policy, preload="off") as moe, torch.no_grad():
            times = measure(moe, **shape)
    own, layer = sorted(times["own"]), sorted(times["layer"])
    row = {
        "benchmark": "machinery",
        "own_us_per_layer": round(statistics.median(own), 1),
        "own_us_fastest_tenth": round(own[len(own) // 10], 1),
        "target_us": TARGET_US,
        "layer_us": round(statistics.median(layer), 1),
        **shape,
        "policy": policy,
        "batch": 1,
        "threads": 1,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(f"own time {row['own_us_per_layer']} us per MoE layer, at most {TARGET_US} us wanted")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
