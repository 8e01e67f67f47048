"""How long does a token wait for experts, with and without prefetch?

    python benchmarks/policies/prefetch.py ../shared/data --plot prefetch.svg

On a modelled link that carries one expert at a time: a token that finds nothing on the device takes
10 times, or twice, as long to load as to compute. Stall per token as a multiple of the token's
compute time. Belady is the best without prefetch; the clairvoyant prefetches what it knows will be
used. No policy takes less time than the floor: the larger of computing, and of loading what even
Belady misses; its stall is what lies above the compute time.
"""

from __future__ import annotations

import argparse
from typing import Any

import common

from moe_infinity.tools.simulator.replay import Hardware

LINKS = (10, 2)  # all-miss time / compute time
CAPACITIES = ("10%", "20%", "30%")
WITHOUT = ("lru", "per-layer-lru", "request-lfu", "moe-infinity-v3", "activation-aware", "belady")
WITH = ("moe-infinity-v3", "activation-aware", "clairvoyant")


def stalls_of(args: argparse.Namespace, name: str, folder: Any, link: int) -> list[dict[str, Any]]:
    """One link: a row for each policy, without and with prefetch, and one for the floor."""
    sequences, num_experts = common.requests_of(name, folder, args.requests)
    num_layers, top_k = sequences[0].experts_TLK.shape[1:]
    warmup = len(sequences) // 6
    hardware = Hardware(bytes_per_s=top_k / link, expert_bytes=1, layer_s=1.0)
    rows, floors = [], {}
    for is_on, policies in ((False, WITHOUT), (True, WITH)):
        cells = common.run(
            sequences,
            policies,
            CAPACITIES,
            num_experts=num_experts,
            warmup=warmup,
            prefetch=is_on,
            hardware=hardware,
        )
        for policy in policies:
            stalls, precisions, coverages = {}, {}, {}
            for capacity in CAPACITIES:
                cell = cells[policy, capacity]
                counters = cell.counters.decode
                stalls[capacity] = round(counters.stall_s / counters.tokens / num_layers, 3)
                if is_on:
                    prefetches = cell.table.prefetches
                    precisions[capacity] = round(prefetches.precision or 0, 3)
                    coverages[capacity] = round(prefetches.coverage(counters.misses) or 0, 3)
                if policy == "belady":
                    floors[capacity] = round(max(0.0, stalls[capacity] - 1), 3)
            rows.append({"policy": policy, "prefetch": is_on, "stall": stalls})
            if is_on:
                rows[-1] |= {"precision": precisions, "coverage": coverages}
    return [*rows, {"policy": "floor", "prefetch": True, "stall": floors}]


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, folder in common.folders(args):
        sequences, _ = common.requests_of(name, folder, args.requests)
        conditions = common.describe(name, sequences, len(sequences) // 6)
        for link in LINKS:
            print(f"all-miss time {link} x compute time: stall / compute time")
            heads = [*CAPACITIES, *(f"prec {c}" for c in CAPACITIES)]
            heads += [f"cov {c}" for c in CAPACITIES]
            print(f"{'':29}" + "".join(f"{head:>9}" for head in heads))
            for row in stalls_of(args, name, folder, link):
                values = [*row["stall"].values()]
                for part in ("precision", "coverage"):
                    values += row.get(part, {}).values()
                label = row["policy"] + " + prefetch" * (
                    row["prefetch"] and row["policy"] in WITH[:2]
                )
                print(f"{label:29}" + "".join(f"{value:9.3f}" for value in values))
                rows.append(conditions | {"link": link} | row)
    return rows


def plot(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    panels_of = list(dict.fromkeys((row["trace"], row["link"]) for row in rows))
    if not panels_of or (panels := common.figure(len(panels_of), height=3.6)) is None:
        return
    drawn, all_axes = panels
    shares = [float(capacity.rstrip("%")) for capacity in CAPACITIES]
    for (name, link), axes in zip(panels_of, all_axes, strict=True):
        for row in rows:
            if (row["trace"], row["link"]) != (name, link):
                continue
            stalls = list(row["stall"].values())
            if row["policy"] == "floor":
                axes.plot(shares, stalls, ":", color="black", label="floor")
            elif row["prefetch"] and row["policy"] in WITHOUT:
                label = f"{row['policy']} + prefetch"
                common.line(axes, row["policy"], shares, stalls, label=label, fillstyle="none")
                axes.lines[-1].set_linestyle("-.")
            else:
                common.line(axes, row["policy"], shares, stalls)
        axes.set(xlabel="slots, % of all experts", ylabel="stall / compute time of a token")
        axes.set(ylim=(0, None), title=f"{common.TITLES[name]}, link {link}x")
    common.legend(drawn, all_axes[0])
    common.save(drawn, args.plot)


def main() -> None:
    args = common.parser(__doc__, requests=2).parse_args()
    rows = rows_of(args)
    if args.plot:
        plot(args, rows)
    common.finish("prefetch", rows)


if __name__ == "__main__":
    main()
