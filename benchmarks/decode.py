"""How fast does a model decode that does not fit, and what is the ceiling?

    python tools/make_random_checkpoint.py runs/big --layers 7 --experts 128 --hidden 2048 \\
        --heads 32 --head-dim 128 --tokenizer models/demo                            # 8.6 GB
    python benchmarks/decode.py runs/big --limit 2GiB --host-memory 900MiB

The model reads real text token by token, so every cell decodes the same tokens (teacher-forced).
Each cell runs in its own process, under the memory limit if there is one, with the files dropped
from the page cache. Cells alternate over the rounds.

The bound beside the tokens per second is that of a decoder that waits only for the bytes it reads:
the disk's bandwidth over the bytes read per token. The bandwidth is measured in the same run, with
random reads of the size of one expert.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

from copy_bandwidth import disk_bandwidth
from limits import drop_from_page_cache, run_limited

TEXT = Path(__file__).resolve().parents[1] / "notes" / "log.md"
NUM_PROMPT = 32  # a longer one warms up: 600 tokens activate every expert of a layer


def decode(
    model: str, num_tokens: int, options: dict[str, Any], num_prompt: int = NUM_PROMPT
) -> dict[str, Any]:
    """Decode one cell; runs in its own process."""
    import torch
    from transformers import DynamicCache

    from moe_infinity import MoE
    from moe_infinity.architectures.attention_inputs import cache_parameter

    with MoE(model, preload="off", stream_layers=False, **options) as moe, torch.no_grad():
        ids = moe.tokenizer(TEXT.read_text("utf-8"), return_tensors="pt").input_ids
        ids = ids[:, : num_prompt + num_tokens]
        cached = {cache_parameter(moe.model.forward): DynamicCache(config=moe.model.config)}
        started = time.perf_counter()
        moe.model(ids[:, :num_prompt], **cached, use_cache=True)
        times = [time.perf_counter()]
        for at in range(num_prompt, ids.shape[1]):
            moe.model(ids[:, at : at + 1], **cached, use_cache=True)
            times.append(time.perf_counter())
        report = moe.report()
    token_s = [after - before for before, after in zip(times, times[1:], strict=False)]
    steps = report.decode
    ahead = report.prefetches
    return {
        "ttft_s": times[0] - started,
        "tok_per_s": len(token_s) / sum(token_s),
        "tpot_ms": 1e3 * statistics.median(token_s),
        "tpot_p95_ms": 1e3 * statistics.quantiles(token_s, n=20)[-1],
        "hit_rate": steps.hit_rate,
        "slots": report.tiers[0].capacity,
        "read_mb_per_token": steps.bytes_read / len(token_s) / 1e6,
        "wasted_share": ahead.wasted / max(1, steps.misses + ahead.begun),  # of loads
        "stall_share": steps.stall_s / sum(token_s),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def median_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    good = [result for result in results if "failed" not in result]
    if not good:
        return results[0]
    return {key: statistics.median(result[key] for result in good) for key in good[0]}


def main() -> None:
    from moe_infinity.cli.inspection import inspect_checkpoint
    from moe_infinity.sizes import parse_size

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--limit", help="of memory, page cache included, e.g. 2GiB")
    parser.add_argument("--host-memory", default="25%", help="comma-separated")
    parser.add_argument("--policy", default="activation-aware", help="comma-separated")
    parser.add_argument("--prefetch", default="off", help="off, on or off,on")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON of OffloadConfig")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=NUM_PROMPT, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    limit_bytes = parse_size(args.limit, whole_bytes=0) if args.limit else None
    more = {name: json.loads(value) for name, _, value in (o.partition("=") for o in args.option)}
    grid = product(
        args.models,
        args.host_memory.split(","),
        args.policy.split(","),
        [choice == "on" for choice in args.prefetch.split(",")],
    )
    cells = [
        {
            "model": str(model),
            "num_tokens": args.tokens,
            "num_prompt": args.prompt,
            "options": {"host_memory": memory, "policy": policy, "prefetch": prefetch} | more,
        }
        for model, memory, policy, prefetch in grid
    ]
    results: list[list[dict[str, Any]]] = [[] for _ in cells]
    disk: dict[str, list[float]] = {str(model): [] for model in args.models}
    for _ in range(args.rounds):
        for model in args.models:
            drop_from_page_cache(model)
            disk[str(model)].append(
                disk_bandwidth(model, inspect_checkpoint(str(model)).bytes_per_expert)
            )
        for cell, found in zip(cells, results, strict=True):
            drop_from_page_cache(Path(cell["model"]))
            found.append(run_limited(__file__, cell, limit_bytes))
    for cell, found in zip(cells, results, strict=True):
        bandwidth = statistics.median(disk[cell["model"]])
        result = median_of(found) | {"disk_gb_per_s": bandwidth / 1e9}
        if "failed" not in result:
            read = result["read_mb_per_token"] * 1e6
            result["bound_tok_per_s"] = bandwidth / read if read else None
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
        print(json.dumps({"model": Path(cell["model"]).name, **cell["options"], **rounded}))


def run_cell() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cell", type=json.loads, required=True)
    print(json.dumps(decode(**parser.parse_args().cell)))


if __name__ == "__main__":
    import sys

    run_cell() if "--cell" in sys.argv else main()
