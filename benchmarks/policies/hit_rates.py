"""How often is an activated expert on the device, by policy and capacity?

    python benchmarks/policies/hit_rates.py ../shared/data --plot hit_rates.svg

Decode, batch 1, one pool for all layers, cold start, no prefetch. `--requests 120` replays the 120
report requests of gpt-oss and all of DeepSeek-V2-Lite; `--part development` those the
hyper-parameters were chosen on.
"""

from __future__ import annotations

import argparse
from typing import Any

import common

POLICIES = (
    "lru",
    "neighbor",
    "per-layer-lru",
    "lfu",
    "counts",
    "request-lfu",
    "moe-infinity-v3",
    "activation-aware",
    "belady",
)


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    policies, capacities = args.policies.split(","), args.capacities.split(",")
    for name, folder in common.folders(args):
        sequences, num_experts = common.requests_of(name, folder, args.requests, part=args.part)
        warmup = min(args.warmup, len(sequences) // 4)
        conditions = common.describe(name, sequences, warmup)
        print(f"{'':18}" + "".join(f"{capacity:>8}" for capacity in capacities))
        cells = common.run(sequences, policies, capacities, num_experts=num_experts, warmup=warmup)
        for policy in policies:
            rates = {c: common.percent(cells[policy, c]) for c in capacities}
            print(f"{policy:18}" + "".join(f"{rate:8.1f}" for rate in rates.values()))
            rows.append(conditions | {"policy": policy, "hit_rate_percent": rates})
    return rows


def plot(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["trace"] for row in rows))
    if not names or (panels := common.figure(len(names), height=3.6)) is None:
        return
    drawn, all_axes = panels
    for name, axes in zip(names, all_axes, strict=True):
        for row in (row for row in rows if row["trace"] == name):
            rates = row["hit_rate_percent"]
            shares = [float(capacity.rstrip("%")) for capacity in rates]
            common.line(axes, row["policy"], shares, list(rates.values()))
        axes.set(xlabel="slots, % of all experts", ylabel="decode hit rate, %", ylim=(0, 100))
        axes.set_title(common.TITLES[name])
    common.legend(drawn, all_axes[0])
    common.save(drawn, args.plot)


def main() -> None:
    parser = common.parser(__doc__, requests=8)
    parser.add_argument("--policies", default=",".join(POLICIES), help="default: all")
    parser.add_argument("--capacities", default="5%,10%,20%,30%,50%", help="default: %(default)s")
    parser.add_argument("--warmup", type=int, default=20, help="at most a quarter of the requests")
    parser.add_argument("--part", choices=("report", "development"), default="report")
    args = parser.parse_args()
    rows = rows_of(args)
    if args.plot:
        plot(args, rows)
    common.finish("hit_rates", rows, part=args.part)


if __name__ == "__main__":
    main()
