"""What does our own bookkeeping cost per MoE layer?

One decode step of one token, every expert resident. The layer as a whole (A) and its arithmetic
alone on the same rows (B: gather, expert MLPs, weighting, sum) run in alternation; A - B is the
machinery: reading the routing, sorting it, recording the EAM, the policy, lookup, hold, release.

    python benchmarks/machinery.py [--top-k 8] [--experts 128] [--layers 48]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from moe_infinity import MoE
from moe_infinity.experts import ExpertKey, Phase
from moe_infinity.kernels.dispatch import RoutedRows
from moe_infinity.kernels.reference import expert_mlp
from moe_infinity.trace.recorder import Step

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


def measure(moe: MoE, *, layers: int, experts: int, top_k: int) -> tuple[float, float]:
    """Median microseconds per layer of (A) the layer, (B) its arithmetic."""
    runtime = moe._runtime
    modules = [m for m in moe.model.modules() if hasattr(m, "is_concatenated")]
    x_TD = torch.randn(1, 32, dtype=torch.bfloat16)
    weights_TK = torch.rand(1, top_k)
    for row in range(layers):  # bring everything in
        index_TK = torch.arange(experts)[:, None].expand(experts, 1)
        runtime.begin_step(Step(Phase.DECODE, 1, experts, begins_request=False))
        x = x_TD.expand(experts, -1)
        runtime.moe_layer(row, modules[row], x, index_TK, torch.ones(experts, 1))
    whole, arithmetic = [], []
    for _ in range(ROUNDS):
        routing = [torch.randperm(experts)[None, :top_k] for _ in range(layers)]
        runtime.begin_step(Step(Phase.DECODE, 1, 1, begins_request=False))
        started = time.perf_counter()
        for row in range(layers):
            runtime.moe_layer(row, modules[row], x_TD, routing[row], weights_TK)
        whole.append((time.perf_counter() - started) / layers * 1e6)

        prepared = [RoutedRows(index_TK.numpy(), is_eager=False) for index_TK in routing]
        slots = [
            {
                expert: runtime._views[row][runtime.table.slot_of(ExpertKey(row, expert))]
                for expert in routing[row][0].tolist()
            }
            for row in range(layers)
        ]
        started = time.perf_counter()
        with torch.no_grad():
            for row, rows in enumerate(prepared):
                rows.gather(x_TD)
                for expert, weights in slots[row].items():
                    out_RD = expert_mlp(modules[row], weights, rows.inputs_of(expert))
                    rows.add(expert, out_RD, weights_TK)
                rows.sum(x_TD.dtype)
        arithmetic.append((time.perf_counter() - started) / layers * 1e6)
    return statistics.median(whole), statistics.median(arithmetic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    shape = vars(parser.parse_args())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), **shape)
        with MoE(folder, host_memory="100%") as moe:
            whole_us, arithmetic_us = measure(moe, **shape)
            hit_rate = moe.report().decode.hit_rate
    row = {
        "benchmark": "machinery",
        "us_per_layer": round(whole_us - arithmetic_us, 1),
        "target_us": TARGET_US,
        "layer_us": round(whole_us, 1),
        "arithmetic_us": round(arithmetic_us, 1),
        **shape,
        "batch": 1,
        "threads": 1,
        "lookup_hit_rate_with_warm_up": round(hit_rate or 0.0, 3),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(f"own time {row['us_per_layer']} us per MoE layer, at most {TARGET_US} us wanted")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
