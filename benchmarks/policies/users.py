"""What do several users at once do to hit rates?

    python benchmarks/policies/users.py ../shared/data --plot users.svg

The same requests, in the same order, from 1 to 16 users: each sends its next one when the last is
answered, and all decode in one step. Requests are cut to their first tokens, so that there are
several for each user. An expert that several of them activate is one lookup.
"""

from __future__ import annotations

import argparse
from typing import Any

import common

from moe_infinity.tools.simulator.schedule import interleave

USERS = (1, 2, 4, 8, 16)
POLICIES = ("lru", "request-lfu", "activation-aware", "belady")
CAPACITIES = ("20%", "30%")


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, folder in common.folders(args):
        sequences, num_experts = common.requests_of(name, folder, args.requests)
        sequences = interleave([s.first(args.tokens) for s in sequences], 1)
        conditions = common.describe(name, sequences, len(sequences) // 6)
        heads = [f"{policy} {capacity}" for policy in POLICIES for capacity in CAPACITIES]
        print(f"{'users':6}{'lookups/token':>14}" + "".join(f"{head:>22}" for head in heads))
        for users in USERS:
            cells = common.run(
                interleave(sequences, users),
                POLICIES,
                CAPACITIES,
                num_experts=num_experts,
                warmup=conditions["warmup"],
            )
            rates = {f"{p} {c}": common.percent(cells[p, c]) for p in POLICIES for c in CAPACITIES}
            counters = cells["lru", "20%"].counters.decode
            per_token = round(counters.lookups / counters.tokens, 2)
            numbers = "".join(f"{rates[head]:22.1f}" for head in heads)
            print(f"{users:<6}{per_token:14.1f}{numbers}")
            rows.append(
                conditions
                | {"users": users, "lookups_per_token": per_token, "hit_rate_percent": rates}
            )
    return rows


def plot(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["trace"] for row in rows))
    if not names or (panels := common.figure(len(names), height=3.6)) is None:
        return
    drawn, all_axes = panels
    for name, axes in zip(names, all_axes, strict=True):
        mine = [row for row in rows if row["trace"] == name]
        for policy in POLICIES:
            rates = [row["hit_rate_percent"][f"{policy} 20%"] for row in mine]
            common.line(axes, policy, USERS, rates)
        axes.set(xscale="log", xlabel="users at once", ylabel="decode hit rate at 20 %, %")
        axes.set_xticks(USERS, [str(users) for users in USERS])
        axes.minorticks_off()
        axes.set_title(common.TITLES[name])
    common.legend(drawn, all_axes[0])
    common.save(drawn, args.plot)


def main() -> None:
    parser = common.parser(__doc__, requests=32)
    parser.add_argument("--tokens", type=int, default=64, help="of a request (default 64)")
    args = parser.parse_args()
    rows = rows_of(args)
    if args.plot:
        plot(args, rows)
    common.finish("users", rows)


if __name__ == "__main__":
    main()
