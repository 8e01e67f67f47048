"""Does a prefill quota help decoding?

The same prompts, one after the other on one cache, greedy, with the rule of decision 0002 and with
it turned off (every load counts as decode). Tokens are the same; hit rates are not.

    python benchmarks/prefill_quota.py models/demo ../shared/data/prompts/gsm8k.jsonl [--limit 24]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from moe_infinity import MoE
from moe_infinity.experts import Phase
from moe_infinity.tools.tracing import read_prompts

MAX_PROMPT_TOKENS = 200


def turn_off(moe: MoE) -> None:
    """Treat prefill like decode in the residency table."""
    table: Any = moe.engine.tiers[0].table
    next_wave, holding = table.next_wave, table.holding
    table.next_wave = lambda keys, phase: next_wave(keys, Phase.DECODE)
    table.holding = lambda keys, phase: holding(keys, Phase.DECODE)


def hit_rates(
    args: argparse.Namespace, prompts: list[str], share: str, policy: str, *, is_on: bool
) -> dict[str, Any]:
    asked_only = {"preload": "off", "stream_layers": False}  # nothing is read ahead
    with MoE(args.model, host_memory=share, policy=policy, **asked_only) as moe:
        if not is_on:
            turn_off(moe)
        for prompt in prompts:
            inputs = moe.tokenizer(prompt, return_tensors="pt")
            ids = inputs["input_ids"][:, :MAX_PROMPT_TOKENS]
            moe.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32)
        report = moe.report()
    return {
        "decode": round(report.decode.hit_rate or 0.0, 4),
        "prefill": round(report.prefill.hit_rate or 0.0, 4),
        "read_mib": round(report.bytes_read / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--limit", type=int, default=24)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts)[: args.limit]
    rows = []
    for policy in ("lru", "lfu"):
        for share in ("10%", "25%", "50%"):
            on = hit_rates(args, prompts, share, policy, is_on=True)
            off = hit_rates(args, prompts, share, policy, is_on=False)
            rows.append({"policy": policy, "host_memory": share, "quota": on, "off": off})
            print(
                f"{policy} {share:>4}  decode {on['decode']:.1%} with, {off['decode']:.1%} without;"
                f"  prefill {on['prefill']:.1%}, {off['prefill']:.1%};"
                f"  read {on['read_mib']} MiB, {off['read_mib']} MiB"
            )
    print(json.dumps({"benchmark": "prefill_quota", "prompts": len(prompts), "rows": rows}))


if __name__ == "__main__":
    main()
