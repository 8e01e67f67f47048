"""After the kind of request changes, how many requests until hit rates are back?

    python benchmarks/policies/shift.py ../shared/data --plot shift.svg

Some requests of one kind, then as many of another, cut to their first tokens so that there can be
many. Recovered: the mean of a window of requests is within a point of the steady state (the mean of
the last third) for the first time. The requests after the shift are not equally hard, so they are
also replayed after others of their own kind, where nothing shifts ("settled"): the difference is
what the shift costs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import common
import numpy as np

from moe_infinity.predict.tracefile import SequenceTrace, load_trace

POLICIES = ("lru", "moe-infinity-v3", "activation-aware")
SCIENCE = ("math", "physics", "chemistry", "algebra", "computer", "engineering", "statistics")
HUMANITIES = ("history", "law", "jurisprudence", "philosophy", "moral", "politics", "foreign")
# Title: trace, field of its sequences.jsonl, words in it before the shift, and after.
SHIFTS = {
    "task: science to humanities": ("gpt-oss", "category", SCIENCE, HUMANITIES),
    "task: humanities to science": ("gpt-oss", "category", HUMANITIES, SCIENCE),
    "dataset: MMLU to GPQA": ("gpt-oss", "dataset", ("mmlu_test",), ("gpqa",)),
    "dataset: GPQA to MMLU": ("gpt-oss", "dataset", ("gpqa",), ("mmlu_test",)),
    "task: intent to translation": ("deepseek", "task", ("intent",), ("translation",)),
    "task: translation to intent": ("deepseek", "task", ("translation",), ("intent",)),
}


def groups(
    folder: Any, field: str, before: Sequence[str], after: Sequence[str], args: argparse.Namespace
) -> tuple[list[list[SequenceTrace]], int]:
    """Requests before the shift, after it, and others like those after it; equally many of each.
    And experts per layer.
    """
    trace = load_trace(folder / "experts.npz")
    lines = (folder / "sequences.jsonl").read_text("utf-8").splitlines()
    kinds = [json.loads(line)[field] for line in lines]
    order = np.random.default_rng(0).permutation(len(kinds))

    first = [
        trace.sequences[i].first(args.tokens)
        for i in order
        if any(word in kinds[i] for word in before)
    ]
    second = [
        trace.sequences[i].first(args.tokens)
        for i in order
        if any(word in kinds[i] for word in after)
    ]
    num = min(args.requests, len(first), len(second) // 2)
    return [first[:num], second[:num], second[num : 2 * num]], trace.num_experts


def windowed(rates: Sequence[float], width: int) -> list[float]:
    """Means of `width` requests in a row."""
    means = np.convolve(rates, np.full(width, 1 / width), mode="valid")
    return [round(mean, 2) for mean in means.tolist()]


def recovery(rates: Sequence[float], width: int) -> tuple[float, int | None]:
    """The steady state, and requests until a window is within a point of it."""
    steady = float(np.mean(rates[-max(len(rates) // 3, 1) :]))
    means = windowed(rates, width)
    back = [i for i, mean in enumerate(means) if mean >= steady - 1]
    return round(steady, 2), back[0] if back else None


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    there = dict(common.folders(args))
    for title, (name, field, before, after) in SHIFTS.items():
        if name not in there:
            continue
        (first, second, like), num_experts = groups(there[name], field, before, after, args)
        num, width = len(second), min(args.window, len(second))
        print(f"{common.TITLES[name]}, {title}: {num} requests of at most {args.tokens} tokens")
        print(f"{'':18}  before  first {width:<2}  settled  steady  requests until back")
        shifted = common.by_request(
            [*first, *second], POLICIES, args.capacity, num_experts=num_experts
        )
        settled = common.by_request(
            [*like, *second], POLICIES, args.capacity, num_experts=num_experts
        )
        for policy in POLICIES:
            old, new = shifted[policy][:num], shifted[policy][num:]
            control = settled[policy][num:]
            steady, back = recovery(new, width)
            numbers = {
                "before": round(float(np.mean(old[-width:])), 2),
                "first": round(float(np.mean(new[:width])), 2),
                "first_settled": round(float(np.mean(control[:width])), 2),
                "steady": steady,
                "requests_until_back": back,
            }
            print(
                f"{policy:18}{numbers['before']:8.1f}{numbers['first']:10.1f}"
                f"{numbers['first_settled']:9.1f}{steady:8.1f}  {back}"
            )
            cost = np.subtract(control, new)
            numbers |= {
                "cost_all": round(float(cost.mean()), 2),
                "window_shifted": windowed(shifted[policy], width),
                "window_cost": windowed(cost, width),
            }
            rows.append(
                {"trace": name, "shift": title, "requests": num, "policy": policy, **numbers}
            )
    return rows


def plot(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    shifts = list(dict.fromkeys(row["shift"] for row in rows))[::2]
    if not shifts or (panels := common.figure(len(shifts), height=3.6)) is None:
        return
    drawn, all_axes = panels
    for shift, axes in zip(shifts, all_axes, strict=True):
        for row in (row for row in rows if row["shift"] == shift):
            means = row["window_shifted"]
            x = np.arange(len(means)) + args.window / 2 - row["requests"]
            common.line(axes, row["policy"], x, means)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(xlabel="requests since the shift", ylabel=f"decode hit rate at {args.capacity}, %")
        axes.set_title(shift, fontsize=9)
    common.legend(drawn, all_axes[0])
    common.save(drawn, args.plot)


def main() -> None:
    parser = common.parser(__doc__, requests=24, full=None)
    parser.add_argument("--tokens", type=int, default=32, help="of a request (default 32)")
    parser.add_argument("--window", type=int, default=5, help="requests in a mean (default 5)")
    parser.add_argument("--capacity", default="20%")
    args = parser.parse_args()
    rows = rows_of(args)
    if args.plot:
        plot(args, rows)
    common.finish("shift", rows, capacity=args.capacity, tokens=args.tokens, window=args.window)


if __name__ == "__main__":
    main()
