"""Is the CUDA engine right on this machine, where does its time go, and how near does it come to
what the machine allows?

    python benchmarks/gpu_check.py carry                        # before, where the traces are
    python benchmarks/gpu_check.py correct --out RESULTS        # with a GPU; 9.5 minutes each
    python benchmarks/gpu_check.py time --out RESULTS
    python benchmarks/gpu_check.py offloaded --out RESULTS
    python benchmarks/gpu_check.py correct --fake --out RESULTS   # tiny, on a fake device

`carry` puts recorded requests, and packages that the machine may lack, into runs/carried, for a
machine that gets this repository and nothing else. It needs torch, triton, transformers, numba and
pytest itself; nothing is installed or fetched. Models are random, in the shapes of published ones.

What decides comes first. No stage begins that would not end in time; `--resume` goes on with
RESULTS. Rows are written as they come to RESULTS/COMMAND.jsonl; each figure names its bound. A
stage that fails, or finds no time, is a row, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / "runs" / "carried"
TRACES = ROOT.parent / "shared" / "data" / "traces"
PACKAGES = str(CARRIED / "packages")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
sys.path.append(PACKAGES)  # what is installed goes first
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), PACKAGES]))

import torch  # noqa: E402
from gpu_plans import MACHINE, PLANS  # noqa: E402
from gpu_stage import FORK, Check  # noqa: E402
from gpu_traces import carry  # noqa: E402


def has_gpu() -> bool:
    """Another process looks: one that has asked CUDA cannot be forked."""
    process = FORK.Process(target=lambda: sys.exit(not torch.cuda.is_available()))
    process.start()
    process.join()
    return process.exitcode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=(*PLANS, "carry"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"))
    parser.add_argument("--resume", action="store_true", help="go on where the last run ended")
    parser.add_argument("--fake", action="store_true", help="tiny, on the CPU: checks the script")
    parser.add_argument("--minutes", type=float, default=9.5, help="stages end within this time")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="stages whose names it is found in"
    )
    parser.add_argument("--carried", type=Path, default=CARRIED)
    parser.add_argument("--traces", type=Path, default=TRACES, help="for `carry`")
    args = parser.parse_args()
    if args.command == "carry":
        carry(args.traces, args.carried)
        return
    if not args.fake and not has_gpu():
        raise SystemExit(
            f"torch {torch.__version__} finds no CUDA device; --fake checks the script without one"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that scratch folders go
    check = Check(
        args.out / f"{args.command}.jsonl", is_fake=args.fake, minutes=args.minutes,
        is_resumed=args.resume,
    )  # fmt: skip
    stages = PLANS[args.command](args.carried, is_fake=args.fake)
    gives_bounds = args.command != "correct"  # to every figure
    check.run(
        [
            stage
            for stage in stages
            if re.search(args.only, stage.name) or (gives_bounds and stage == MACHINE)
        ]
    )
    rows = check.rows()
    is_wrong = [row for row in rows if row["value"] is False]
    is_failed = [row for row in rows if str(row["value"]).startswith("failed")]
    print(json.dumps({"rows": len(rows), "wrong": is_wrong, "failed": is_failed}))
    if is_wrong or is_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
