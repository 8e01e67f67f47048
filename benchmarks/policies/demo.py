"""Do the policies rank the same on the demo model, with prompts and real token ids?

    python benchmarks/policies/demo.py ../shared/data --model models/demo --plot demo.svg

Generates greedily from prompts of all files in turn (cut to their first tokens), with everything in
memory, and replays the recorded routing: hit rates of both phases. The later the prompt, the more
is known.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import common
import torch

from moe_infinity import MoE
from moe_infinity.experts import Phase
from moe_infinity.predict.tracefile import SequenceTrace
from moe_infinity.tools.tracing import read_prompts

POLICIES = (
    "lru",
    "per-layer-lru",
    "lfu",
    "request-lfu",
    "moe-infinity-v3",
    "activation-aware",
    "belady",
)
CAPACITIES = ("10%", "15%", "25%")


def mixed_prompts(folder: Path, num: int) -> list[str]:
    """The first prompt of every file, then the second of every file, and so on."""
    files = [read_prompts(file) for file in sorted(folder.glob("*.jsonl"))]
    return list(chain.from_iterable(zip(*files, strict=False)))[:num]


def record(args: argparse.Namespace, prompts: Sequence[str]) -> tuple[list[SequenceTrace], int]:
    """The routing of all prompts and answers, and experts per layer."""
    with MoE(args.model, host_memory="100%") as moe:
        with moe.recording() as finish:
            for prompt in prompts:
                inputs = moe.tokenizer(prompt, return_tensors="pt")
                ids = inputs["input_ids"][:, : args.prompt_tokens]
                moe.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=args.new_tokens,
                    do_sample=False,
                )
            sequences = finish()
        return sequences, moe.engine.recorder.num_experts


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = mixed_prompts(args.data / "prompts", args.requests)
    if not prompts or not args.model.is_dir():
        print(f"skipped: no prompts in {args.data / 'prompts'}, or no model {args.model}")
        return []
    sequences, num_experts = record(args, prompts)
    conditions = common.describe("demo", sequences, len(sequences) // 6)
    cells = common.run(
        sequences, POLICIES, CAPACITIES, num_experts=num_experts, warmup=conditions["warmup"]
    )
    rows = []
    print(f"{'':18}" + "".join(f"{p.value + ' ' + c:>14}" for p in Phase for c in CAPACITIES))
    for policy in POLICIES:
        rates = {}
        for phase in Phase:
            of = {c: cells[policy, c].counters.of(phase).hit_rate or 0 for c in CAPACITIES}
            rates[phase.value] = {capacity: round(100 * rate, 2) for capacity, rate in of.items()}
        values = chain.from_iterable(of.values() for of in rates.values())
        print(f"{policy:18}" + "".join(f"{value:14.1f}" for value in values))
        rows.append(conditions | {"policy": policy, "hit_rate_percent": rates})
    return rows


def plot(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if not rows or (panels := common.figure(len(Phase), height=3.6)) is None:
        return
    drawn, all_axes = panels
    shares = [float(capacity.rstrip("%")) for capacity in CAPACITIES]
    for phase, axes in zip(Phase, all_axes, strict=True):
        for row in rows:
            rates = row["hit_rate_percent"][phase.value]
            common.line(axes, row["policy"], shares, list(rates.values()))
        axes.set(xlabel="slots, % of all experts", ylabel=f"{phase.value} hit rate, %")
        axes.set_title(common.TITLES["demo"])
    common.legend(drawn, all_axes[0])
    common.save(drawn, args.plot)


def main() -> None:
    parser = common.parser(__doc__, requests=60, full=None)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--prompt-tokens", type=int, default=200, help="default 200")
    parser.add_argument("--new-tokens", type=int, default=32, help="default 32")
    args = parser.parse_args()
    rows = rows_of(args)
    if args.plot:
        plot(args, rows)
    common.finish("demo", rows)


if __name__ == "__main__":
    main()
