"""What is each factor of the predictor worth, for hits and for prediction?

    python benchmarks/policies/ablation.py ../shared/data --plot ablation.svg

Every factor left out alone, and every factor alone (with the base rate, which is always there):
decode hit rate without prefetch, and recall@2K of what is predicted for the next token, at step
start and one layer ahead. The DeepSeek-V2-Lite trace has no token ids: the two token factors do
nothing there and are skipped.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
from recall import STAGES, measure

from moe_infinity.predict.tables import FACTORS

CAPACITIES = ("10%", "20%", "30%")


def variants(name: str) -> dict[str, list[str]]:
    """Factors to leave out, by what to call it."""
    absent = {"router"}  # a trace has no router to ask
    if name == "deepseek":
        absent |= {"token", "next_token"}  # nor this one token ids
    there = [f for f in FACTORS if f not in absent]
    without = {f"without {factor}": [factor] for factor in there}
    alone = {f"only {factor}": [f for f in FACTORS if f != factor] for factor in there}
    return {"all factors": []} | without | alone | {"base only": list(FACTORS)}


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, folder in common.folders(args):
        sequences, num_experts = common.requests_of(name, folder, args.requests)
        conditions = common.describe(name, sequences, len(sequences) // 6)
        warmup = conditions["warmup"]
        recalls = "".join(f"{stage:>15}" for stage in STAGES)
        print(f"{'':20}" + "".join(f"{c:>7}" for c in CAPACITIES) + recalls)
        for label, without in variants(name).items():
            cells = common.run(
                sequences,
                ["activation-aware"],
                CAPACITIES,
                num_experts=num_experts,
                warmup=warmup,
                without=without,
            )
            rates = {c: common.percent(cells["activation-aware", c]) for c in CAPACITIES}
            recall = measure(sequences, num_experts=num_experts, warmup=warmup, without=without)
            found = {stage: round(recall.of(i, 1), 4) for i, stage in enumerate(STAGES)}
            numbers = "".join(f"{rate:7.2f}" for rate in rates.values())
            print(f"{label:20}{numbers}" + "".join(f"{share:15.3f}" for share in found.values()))
            rows.append(
                conditions | {"factors": label, "hit_rate_percent": rates, "recall_at_2k": found}
            )
    return rows


def plot(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["trace"] for row in rows))
    if not names or (panels := common.figure(len(names), height=3.8)) is None:
        return
    drawn, all_axes = panels
    for name, axes in zip(names, all_axes, strict=True):
        mine = [row for row in rows if row["trace"] == name][::-1]
        rates = [row["hit_rate_percent"]["20%"] for row in mine]
        bars = axes.barh([row["factors"] for row in mine], rates, color=common.COLOURS["lru"])
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        axes.set(xlabel="decode hit rate at 20 %, %", xlim=(0, max(rates) * 1.15))
        axes.set_title(common.TITLES[name])
    common.save(drawn, args.plot)


def main() -> None:
    args = common.parser(__doc__, requests=4).parse_args()
    rows = rows_of(args)
    if args.plot:
        plot(args, rows)
    common.finish("ablation", rows)


if __name__ == "__main__":
    main()
