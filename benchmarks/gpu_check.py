"""Does the CUDA engine give the right tokens on this machine, and how near does it come to what the
machine allows?

    python benchmarks/gpu_check.py --out RESULTS          # with a GPU; under 9 minutes
    python benchmarks/gpu_check.py --fake --out RESULTS   # the same logic, tiny, on a fake device

Needs torch, transformers and numpy; nothing is installed or fetched. Models are random, in the
shapes of published ones with fewer layers (`shapes`), gpt-oss in MXFP4; budgets are the shares of
all experts that 8, 12 and 24 GB are of the whole model. Every row names its ceiling. First what
decides for every shape, the most important one first; then the rest of it for some. Rows are
written as they come to RESULTS/gpu_check.json; a stage that fails, or finds no time, is a row, too;
`--resume` that file to go on.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT.parent / "shared" / "data" / "traces"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from gpu_fast import (  # noqa: E402
    fast_capped,
    fast_correctness,
    fast_machinery,
    fast_packed,
    fast_resident,
)
from gpu_models import (  # noqa: E402
    Shape,
    deepseek_v2_lite,
    gpt_oss,
    mixtral,
    qwen3,
    scratch_folder,
    write_checkpoint,
)
from gpu_rows import (  # noqa: E402
    ablation,
    accelerate_offload,
    capped,
    correctness,
    link,
    machine,
    prefill,
    resident,
)
from gpu_stage import ENDED, Check, has_gpu  # noqa: E402


def shapes(*, is_fake: bool) -> list[Shape]:
    """With so many layers none is written as more than 10 GB, which lie beside HOST's slots."""
    tiny = partial(partial, is_tiny=True) if is_fake else lambda make: make
    gpt_oss_120b = partial(gpt_oss, num_experts=128)
    made = [
        Shape("qwen3-30b-a3b", 48, 8, 58.0, tiny(qwen3)),
        Shape("deepseek-v2-lite", 26, 8, 28.8, tiny(deepseek_v2_lite), "deepseek-v2-lite_esft"),
        Shape("gpt-oss-20b", 24, 12, 10.2, tiny(gpt_oss), "gpt-oss-20b_decode"),
        Shape("mixtral-8x7b", 32, 3, 90.2, tiny(mixtral)),
        Shape("gpt-oss-120b", 36, 4, 61.0, tiny(gpt_oss_120b)),
    ]
    return [replace(shape, layers=3) for shape in made] if is_fake else made


def run_checks(check: Check) -> None:
    check.stage("machine", 5, partial(machine, check))
    check.stage("link", 5, partial(link, check))
    check.stage("kernels", 20, partial(fast_machinery, check))
    check_tokens(check, fast_correctness)
    made = shapes(is_fake=check.is_fake)
    for shape in made:
        measure(check, shape, {fast_resident: 30, fast_capped: 40})
    check.stage("kernels of packed weights", 40, partial(fast_packed, check))
    check_tokens(check, correctness)
    slower = {resident: 45, capped: 60, prefill: 40, ablation: 80, accelerate_offload: 60}
    for shape in made[:3]:
        measure(check, shape, slower)


def run_whole(check: Check, name: str) -> None:
    """What decode takes without leaving out layers."""
    found = [shape for shape in shapes(is_fake=check.is_fake) if shape.name == name]
    if not found:
        raise SystemExit(f"there is no shape {name!r}")
    shape = replace(found[0], layers=found[0].full_layers)
    check.stage("link", 5, partial(link, check))
    slower = shape.layers / found[0].layers
    stages = {fast_resident: 30, fast_capped: 40, accelerate_offload: 60}
    measure(check, shape, {run: slower * needs_s for run, needs_s in stages.items()})


def check_tokens(check: Check, run: Callable[..., None]) -> None:
    for make in (qwen3, deepseek_v2_lite, gpt_oss):
        check.stage(f"{run.__name__}, {make.__name__}", 30, partial(of_tiny, check, run, make))


def of_tiny(check: Check, run: Callable[..., None], make: Callable[..., Any]) -> None:
    with scratch_folder(1 << 20) as scratch:
        write_checkpoint(scratch / "tiny", make(3, is_tiny=True))
        run(check, scratch / "tiny")


def measure(check: Check, shape: Shape, stages: dict[Callable[..., None], float]) -> None:
    """Stages, and the seconds that each may take on a GPU, with the shape's checkpoint."""
    scale = 0.1 if check.is_fake else 1.0
    if all(check.is_done(f"{shape.name}: {run.__name__}") for run in stages):
        return
    with scratch_folder(shape.folder_bytes) as scratch:
        folder = scratch / shape.name
        writing = partial(write_checkpoint, folder, shape.config)
        check.stage(f"{shape.name}: write", 2e-9 * shape.folder_bytes * scale, writing)
        for run, needs_s in stages.items():
            name = f"{shape.name}: {run.__name__}"
            if not folder.is_dir() and not check.is_done(name):
                check.leave_out(name, "no checkpoint was written")
                continue
            check.stage(name, needs_s * scale, partial(run, check, folder, shape))


def table_of(rows: list[dict[str, Any]]) -> str:
    """What was measured, beside its ceiling; stages and texts left out."""
    lines = [f"{'':42}{'':18}{'measured':>10} {'':7}{'ceiling':>10}{'share':>8}{'hits':>8}"]
    for row in rows:
        if not isinstance(row["value"], float) or row["name"] == ENDED:
            continue
        ceiling, share, hits = (row.get(key) for key in ("ceiling", "of_ceiling", "hit_rate"))
        lines.append(
            f"{row['name'][:41]:42}{row.get('shape', ''):18}{row['value']:>10.4g} {row['unit']:7}"
            f"{'' if ceiling is None else format(ceiling, '.4g'):>10}"
            f"{'' if share is None else format(share, '.0%'):>8}"
            f"{'' if hits is None else format(hits, '.0%'):>8}"
        )
    same = [row["value"] for row in rows if row["name"] == "same tokens"]
    lines.append(f"same tokens as with all experts resident: {same.count(True)} of {len(same)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"))
    parser.add_argument("--fake", action="store_true", help="tiny, on the CPU: checks the script")
    parser.add_argument("--traces", type=Path, help="folders of recorded requests")
    parser.add_argument("--whole", metavar="SHAPE", help="instead: this one with all its layers")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="go on where this run ended")
    parser.add_argument("--minutes", type=float, default=8.5, help="stages begin within this time")
    args = parser.parse_args()
    if not args.fake and not has_gpu():
        raise SystemExit(
            f"torch {torch.__version__} finds no CUDA device; --fake checks the script without one"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that scratch folders go
    traces = TRACES if args.traces is None else args.traces
    for name in [shape.trace for shape in shapes(is_fake=args.fake) if shape.trace]:
        if not (traces / name / "experts.npz").is_file():
            if args.traces is not None:
                raise SystemExit(f"{traces} has no {name}/experts.npz")
            print(f"no {name} in {traces}: routing is random")
    check = Check(
        args.out, traces, is_fake=args.fake, minutes=args.minutes, whole=args.whole,
        resumed=args.resume,
    )  # fmt: skip
    run_checks(check) if args.whole is None else run_whole(check, args.whole)
    print(table_of(check.rows))
    is_wrong = [row for row in check.rows if row["value"] is False]
    is_failed = [row for row in check.rows if str(row["value"]).startswith("failed")]
    print(json.dumps({"rows": len(check.rows), "wrong": is_wrong, "failed": is_failed}))
    if is_wrong or is_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
