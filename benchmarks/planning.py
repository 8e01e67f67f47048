"""How long does it take to locate every expert of a DeepSeek-V3-sized checkpoint?

    python benchmarks/planning.py

A checkpoint folder with true headers and no data: 163 shards, 61 layers, 256 experts in each of 58
of them, bf16 as stored per expert (about 45,000 tensors, 1.3 TB as a hole in the file system). What
`moe-infinity inspect` does with it, split into reading the headers, making the model on the meta
device, and planning. Wanted: planning in less than 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import struct
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers

from moe_infinity.checkpoint.file_names import checkpoint_files
from moe_infinity.checkpoint.headers import read_headers
from moe_infinity.checkpoint.plan import contents_of, plan_experts

TARGET_S = 2.0
NUM_SHARDS = 163
PARTS = {"gate_proj": (2048, 7168), "up_proj": (2048, 7168), "down_proj": (7168, 2048)}


def tensors_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as DeepSeek-V3 is published: three tensors per expert."""
    shapes = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            experts = name.removesuffix(".gate_up_proj")
            for expert_idx in range(tensor.shape[0]):
                for part, shape in PARTS.items():
                    shapes[f"{experts}.{expert_idx}.{part}.weight"] = shape
        elif not name.endswith("experts.down_proj"):
            shapes[name] = tuple(tensor.shape)
    return shapes


def write_shards(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Headers, and holes instead of data."""
    names, weight_map = list(shapes), {}
    per_shard = -(-len(names) // NUM_SHARDS)
    for shard in range(NUM_SHARDS):
        file = folder / f"model-{shard + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        header, end = {}, 0
        for name in names[shard * per_shard : (shard + 1) * per_shard]:
            begin, end = end, end + 2 * prod(shapes[name])
            header[name] = {
                "dtype": "BF16",
                "shape": list(shapes[name]),
                "data_offsets": [begin, end],
            }
            weight_map[name] = file.name
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(file, 8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def measure(folder: Path, make_model: Any) -> dict[str, float]:
    """Seconds of each part."""
    times = [time.perf_counter()]
    headers = read_headers(checkpoint_files(folder))
    times.append(time.perf_counter())
    model = make_model()
    times.append(time.perf_counter())
    mapping = transformers.conversion_mapping.get_model_conversion_mapping(model)
    plan = plan_experts(model, contents_of(headers, None, mapping))
    times.append(time.perf_counter())
    assert sum(row.num_experts for row in plan.layers) == 58 * 256
    names = "headers_s", "model_s", "planning_s"
    return {
        name: after - before for name, before, after in zip(names, times, times[1:], strict=False)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    config = transformers.DeepseekV3Config()

    def make_model() -> Any:
        with torch.device("meta"):
            return transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16)

    with tempfile.TemporaryDirectory() as folder:
        shapes = tensors_of(make_model())
        write_shards(Path(folder), shapes)
        found = [measure(Path(folder), make_model) for _ in range(rounds)]
    medians = {name: round(statistics.median(r[name] for r in found), 3) for name in found[0]}
    print(f"{len(shapes):,} tensors, medians of {rounds}: {medians}, {TARGET_S} s wanted")
    row = {
        "benchmark": "planning",
        "tensors": len(shapes),
        **medians,
        "target_s": TARGET_S,
        "rounds": rounds,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
