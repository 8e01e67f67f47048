"""Which router of requests does most for the caches of several replicas?

    python -m benchmarks.replicas ../shared/data/traces/gpt-oss-20b_decode --replicas 1,2,4,8

Requests of recorded traces arrive over time at replicas that have the whole model each, on a
modelled clock. The answer was that it makes little difference (docs/experiments.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.replicas.cluster import ClusterExperiment, run_cluster, table_of
from benchmarks.replicas.routers import ROUTERS
from moe_infinity.cache.policies import ACTIVATION_AWARE
from moe_infinity.errors import MoEInfinityError
from moe_infinity.system.machine import num_cores


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__)
    made.add_argument("traces", nargs="+", type=Path, help=".npz, or folders with an experts.npz")
    made.add_argument("--replicas", default="1,2,4", help="numbers of replicas (1,2,4)")
    made.add_argument("--router", default="round-robin,least-loaded,hash,eam", help=str([*ROUTERS]))
    made.add_argument("--policy", default=ACTIVATION_AWARE)
    made.add_argument("--capacity", default="10%,20%,30%", help="'10%%' of all experts, or slots")
    made.add_argument("--bandwidth", default="1.2GB/s", help="of the link that loads experts")
    made.add_argument("--expert-bytes", default="13MB")
    made.add_argument("--compute-us", type=float, default=1000.0, help="of a layer")
    made.add_argument("--arrivals", type=Path, help="a CSV with a column arrival_s; else random")
    made.add_argument("--rate", type=float, default=1.0, help="requests a minute, of each replica")
    made.add_argument(
        "--users", type=int, default=1, help="requests that a replica decodes at once"
    )
    made.add_argument("--draw", type=int, help="this many requests, drawn at random")
    made.add_argument("--tokens", type=int, help="cut each request to its first tokens")
    made.add_argument("--warmup", type=int, default=0, help="requests that are not counted")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--jobs", type=int, default=num_cores(), help="processes")
    made.add_argument("--json", action="store_true", help="one object instead of a table")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each trace, policy, capacity, number of replicas and router."""
    args = parser().parse_args(arguments)
    if args.rate <= 0:
        sys.exit("error: --rate is not above 0")
    try:
        experiment = ClusterExperiment.from_text(
            routers=args.router,
            replicas=args.replicas,
            policies=args.policy,
            capacities=args.capacity,
            bandwidth=args.bandwidth,
            expert_bytes=args.expert_bytes,
            layer_us=args.compute_us,
            num_places=args.users,
            rate=args.rate / 60,
            arrivals=args.arrivals,
            num_requests=args.draw,
            num_tokens=args.tokens,
            warmup=args.warmup,
            seed=args.seed,
        )
        files = [path / "experts.npz" if path.is_dir() else path for path in args.traces]
        rows = run_cluster(files, experiment, jobs=args.jobs)
    except MoEInfinityError as error:
        sys.exit(f"error: {error}")
    print(json.dumps({"rows": rows}) if args.json else table_of(rows))


if __name__ == "__main__":
    main()
