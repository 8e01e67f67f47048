"""Policies in the engine: hit rate, bytes read and time per token of a real model on real prompts.

    python benchmarks/policies/engine.py models/demo ../shared/data/prompts [--link-ms 4]

With --link-ms every expert takes at least so long to read, one at a time, demand loads or
prefetches: the demo model's small experts behind a slow link. Without it they come from the page
cache in about 0.1 ms, and there is little to win.

All policies are loaded side by side and take turns prompt by prompt, so that what else the machine
does meets them alike. The cache is not emptied between prompts. Fails if a token differs from the
first policy's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moe_infinity import MoE
from moe_infinity.experts import ExpertKey
from moe_infinity.tools.tracing import read_prompts

SETTINGS: dict[str, dict[str, Any]] = {
    "lru": {"policy": "lru"},
    "lfu": {"policy": "lfu"},
    "activation-aware": {"policy": "activation-aware"},
    "activation-aware, prefetch": {"policy": "activation-aware", "prefetch": True},
    "the same, early router": {"prefetch": True, "early_router": True},
}
LONGEST_PROMPT = 600  # characters; the demo model was trained on short texts


def slow_down(moe: MoE, seconds: float) -> None:
    """Let every read take so long, one after the other, as on one link."""
    mover, link = moe.engine.tiers[0].mover, threading.Lock()
    read = mover._read

    def slow_read(key: ExpertKey, slot_id: int) -> None:
        with link:
            time.sleep(seconds)
            read(key, slot_id)

    mover._read = slow_read


@dataclass
class Run:
    """One setting while it takes its turns."""

    moe: MoE
    tpots_s: list[float] = field(default_factory=list)

    def generate(self, prompt: str, max_new_tokens: int) -> list[int]:
        stream = self.moe.stream(prompt, max_new_tokens=max_new_tokens, do_sample=False)
        for _ in stream:
            pass
        if stream.tpot_s is not None:
            self.tpots_s.append(stream.tpot_s)
        return stream.token_ids


def mixed_prompts(folder: Path, limit: int) -> list[str]:
    """The same number from each file, taking turns."""
    files = [
        [p for p in read_prompts(file) if len(p) <= LONGEST_PROMPT]
        for file in sorted(folder.rglob("*.jsonl"))
    ]
    turns = [prompts[i] for i in range(limit) for prompts in files if i < len(prompts)]
    return turns[:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path, help="a folder with .jsonl files")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--host-memory", default="15%")
    parser.add_argument("--link-ms", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if not args.prompts.is_dir():
        sys.exit(f"{args.prompts}: no such folder, nothing to measure")
    torch.set_num_threads(args.threads)
    prompts = mixed_prompts(args.prompts, args.limit)
    started = time.perf_counter()
    with ExitStack() as stack:
        runs = {
            name: Run(
                stack.enter_context(
                    MoE(
                        args.model,
                        host_memory=args.host_memory,
                        preload="off",
                        stream_layers=False,
                        **options,
                    )
                )
            )
            for name, options in SETTINGS.items()
        }
        for run in runs.values() if args.link_ms else ():
            slow_down(run.moe, args.link_ms / 1e3)
        for prompt in prompts:
            outputs = [run.generate(prompt, args.max_new_tokens) for run in runs.values()]
            if any(output != outputs[0] for output in outputs):
                sys.exit(f"tokens differ for {prompt!r}")
        rows = {name: row_of(run) for name, run in runs.items()}
    print(
        f"{'':28} {'decode hits':>11} {'prefill':>8} {'MiB read':>9} {'ms/token':>9} {'stall':>7}"
    )
    for name, row in rows.items():
        print(
            f"{name:28} {row['decode_hit_rate']:>11.1%} {row['prefill_hit_rate']:>8.1%} "
            f"{row['mib_read']:>9.0f} {row['tpot_ms']:>9.2f} {row['stall_s']:>5.2f} s"
        )
    minutes = (time.perf_counter() - started) / 60
    print(f"{len(prompts)} prompts, tokens identical for all, {minutes:.1f} minutes")
    print(
        json.dumps(
            {"benchmark": "policies/engine", "num_prompts": len(prompts), **vars(args)}
            | {"prompts": str(args.prompts), "rows": rows}
        )
    )


def row_of(run: Run) -> dict[str, Any]:
    report = run.moe.report()
    return {
        "decode_hit_rate": report.decode.hit_rate,
        "prefill_hit_rate": report.prefill.hit_rate,
        "mib_read": report.bytes_read / 2**20,
        "tpot_ms": median(run.tpots_s) * 1e3,
        "stall_s": report.stall_s,
        "prefetch": report.prefetches.as_dict(),
    }


if __name__ == "__main__":
    main()
