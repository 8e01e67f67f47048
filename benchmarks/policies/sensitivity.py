"""Does a hyper-parameter matter? Each one halved and doubled, the others as they are.

    python benchmarks/policies/sensitivity.py ../shared/data --plot sensitivity.svg

On the development requests of gpt-oss (and some of DeepSeek-V2-Lite): decode hit rate at 20 %
without prefetch. For the planner's MIN_CHANCE: stall per token with prefetch, on a link where an
all-miss token takes twice its compute time.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import numpy as np

from moe_infinity.cache import activation_aware
from moe_infinity.predict import planner, predictor, sequence_predictor, tables
from moe_infinity.tools.simulator.replay import Hardware

PARAMETERS = (
    (tables, "LEARNING_RATE"),
    (sequence_predictor, "REQUEST_RATE"),
    (tables, "BASE_RATE"),
    (sequence_predictor, "MATCH_EVERY"),
    (sequence_predictor, "NUM_NEAREST"),
    (tables, "EAMC_CAPACITY"),
    (predictor, "FORGET_EVERY"),
    (tables, "LEAST_BASE"),
    (sequence_predictor, "LEAST_CHANCE"),
    (tables, "PRIOR"),
    (tables, "FULL"),
    (tables, "TOKEN_FULL"),
    (activation_aware, "LEAST_CHANCE"),
)
LARGEST = {"TOKEN_FULL": 254}  # its counts are bytes


def changes(module: Any, name: str, value: float) -> list[tuple[Any, str, Any]]:
    """What to set, with what the module derived from it."""
    derived = {"KEPT": np.float32(1 - value), "ADDED": np.float32(value)}
    if name != "REQUEST_RATE":
        derived = {}
    return [(module, name, value), *((module, other, of) for other, of in derived.items())]


def changed(module: Any, name: str, factor: float) -> float | None:
    """None where that value is not allowed."""
    before = getattr(module, name)
    value = type(before)(before * factor)
    return value if value <= LARGEST.get(name, value) else None


def hit_rate(name: str, folder: Any, args: argparse.Namespace) -> float:
    sequences, num_experts = common.requests_of(name, folder, args.requests, part="development")
    cells = common.run(
        sequences,
        ["activation-aware"],
        ["20%"],
        num_experts=num_experts,
        warmup=len(sequences) // 6,
    )
    return common.percent(cells["activation-aware", "20%"])


def stall(name: str, folder: Any, args: argparse.Namespace) -> float:
    """Of a token, as a multiple of its compute time."""
    sequences, num_experts = common.requests_of(
        name, folder, args.prefetch_requests, part="development"
    )
    num_layers, top_k = sequences[0].experts_TLK.shape[1:]
    cells = common.run(
        sequences,
        ["activation-aware"],
        ["20%"],
        num_experts=num_experts,
        warmup=len(sequences) // 6,
        prefetch=True,
        hardware=Hardware(bytes_per_s=top_k / 2, expert_bytes=1, layer_s=1.0),
    )
    counters = cells["activation-aware", "20%"].counters.decode
    return round(counters.stall_s / counters.tokens / num_layers, 4)


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, folder in common.folders(args):
        questions = [
            ("hit rate at 20 %, %", hit_rate, PARAMETERS, args.requests),
            (
                "stall / compute time at 20 %, 2x link",
                stall,
                ((planner, "MIN_CHANCE"),),
                args.prefetch_requests,
            ),
        ]
        for what, measure, parameters, num in questions:
            before = measure(name, folder, args)
            print(f"{common.TITLES[name]}, {num} requests, {what}: {before:.2f} as it is")
            for module, parameter in parameters:
                row = {"trace": name, "requests": num, "what": what, "as_it_is": before}
                row["parameter"] = f"{module.__name__.split('.')[-1]}.{parameter}"
                row["value"] = round(float(getattr(module, parameter)), 6)
                for label, factor in (("halved", 0.5), ("doubled", 2.0)):
                    value = changed(module, parameter, factor)
                    row[label] = None
                    if value is not None:
                        with common.constants(changes(module, parameter, value)):
                            row[label] = measure(name, folder, args)
                shown = "".join(
                    f"{'-':>10}" if row[label] is None else f"{row[label] - before:+10.2f}"
                    for label in ("halved", "doubled")
                )
                print(f"  {row['parameter']:30}{row['value']:>10}  halved, doubled{shown}")
                rows.append(row)
    return rows


def plot(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["trace"] for row in rows))
    if not names or (panels := common.figure(len(names), height=3.8)) is None:
        return
    drawn, all_axes = panels
    for name, axes in zip(names, all_axes, strict=True):
        mine = [r for r in rows if r["trace"] == name and r["what"].startswith("hit")][::-1]
        for offset, (label, policy) in enumerate(
            (("halved", "lru"), ("doubled", "moe-infinity-v3"))
        ):
            places = [i + 0.2 - 0.4 * offset for i in range(len(mine))]
            moved = [0 if r[label] is None else r[label] - r["as_it_is"] for r in mine]
            axes.barh(places, moved, 0.38, color=common.COLOURS[policy], label=label)
        axes.set_yticks(range(len(mine)), [row["parameter"] for row in mine], fontsize=8)
        axes.set(xlabel="change of the hit rate at 20 %, points")
        axes.set_title(common.TITLES[name])
    common.legend(drawn, all_axes[0])
    common.save(drawn, args.plot)


def main() -> None:
    parser = common.parser(__doc__, requests=4)
    parser.add_argument("--prefetch-requests", type=int, default=1, help="for MIN_CHANCE")
    args = parser.parse_args()
    rows = rows_of(args)
    if args.plot:
        plot(args, rows)
    common.finish("sensitivity", rows)


if __name__ == "__main__":
    main()
