"""What the kernels around the experts cost, read off the code that they are compiled to: on any
machine with triton, without a GPU.

    TRITON_INTERPRET=0 python benchmarks/kernel_costs.py

Of the loop of a program, or of all of it if it has none: instructions of all its threads, bytes of
weights, cache or rows that these read and write, and bytes whose loads are under way. A GPU keeps
up with its memory while a byte takes less than processors * clock * 128 lanes / bytes per second:
6.4 instructions on an H200, 9.7 on an A100, 19 on an RTX 3090, 41 on an RTX 4090.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CAPABILITIES = (80, 90)
BF16 = 2
FLOAT32 = 4
CHUNKS = {"qwen3": 64, "gpt-oss": 64, "deepseek": 64, "gemma": 32, "phi": 64}  # tokens
COLUMNS = {"qwen3": 256, "gpt-oss": 128, "deepseek": 320, "gemma": 512, "phi": 192}


class Cost(NamedTuple):
    moved: int  # bytes
    under_way: int  # loads that are begun before any is waited for
    turns: int = 1  # of the loop, should the compiler have unrolled it


def costs() -> dict[str, Cost]:
    """Of one turn of a program's loop, or of all of it."""
    found: dict[str, Cost] = {}
    for name, columns in COLUMNS.items():
        chunk = CHUNKS[name] * columns * BF16
        found[f"attend 16 {name}"] = Cost(chunk, chunk)
    latents = 32 * (512 + 64) * BF16
    found["attend_latent 16 deepseek-v3"] = Cost(latents, latents)
    sums = 64 * 64 * FLOAT32  # splits, columns
    found["combine qwen3"] = Cost(sums, sums)
    expanded = sums + 32 * 64 * BF16
    found["expand deepseek-v3"] = Cost(expanded, expanded)
    row = 2048 * BF16
    found["rms_norm"] = Cost(3 * row, 2 * row)
    found["rms_norm of a sum"] = Cost(6 * row, 4 * row)
    found["gated"] = Cost(512 * 3 * BF16, 512 * 2 * BF16)
    found["make_heads qwen3"] = Cost(128 * (3 * BF16 + FLOAT32), 128 * (2 * BF16 + FLOAT32))
    latent = 576 * 2 * BF16 + 512 * BF16
    found["make_heads deepseek-v2"] = Cost(latent, latent // 2)
    found["router_logits qwen3"] = Cost(2 * row, 2 * row)
    tile = 2 * 32 * 64 * BF16
    found["router_tile 32 qwen3"] = Cost(tile, 2 * tile, 2048 // 64)
    logits = 256 * FLOAT32
    found["choose qwen3"] = found["choose deepseek-v3"] = Cost(logits, logits)
    return found


def main() -> None:
    print("| kernel | for | threads | instructions a byte | bytes under way | shared memory |")
    print("|---" * 6 + "|")
    for capability in CAPABILITIES:
        module = "tests.gpu.kernels.compile_kernels"
        done = subprocess.run(
            [sys.executable, "-m", module, str(capability), "around_experts"],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "TRITON_INTERPRET": "0"},
            stdout=subprocess.PIPE,
            check=True,
        )
        told = json.loads(done.stdout)
        for name, cost in costs().items():
            kernel = told[name]
            moved = cost.moved * (1 if kernel["has_loop"] else cost.turns)
            a_byte = kernel["instructions"] * kernel["threads"] / moved
            place = f"| {name} | {capability / 10} | {kernel['threads']} | {a_byte:.1f} "
            print(f"{place}| {cost.under_way:,} | {kernel['shared_bytes']:,} |")


if __name__ == "__main__":
    main()
