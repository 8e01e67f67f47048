"""Does a model run as `moe-infinity plan` says, under three memory limits?

    python tools/make_random_checkpoint.py runs/big --layers 7 --experts 128 --hidden 2048 \\
        --heads 32 --head-dim 128 --tokenizer models/demo                            # 8.8 GB
    python benchmarks/plan_check.py runs/big --limits 2GiB,4GiB,6GiB

Of each round and limit first a plan is made, then the model runs; each in a process and a memory
cgroup of its own, files cold. A run loads the model, then gets prompts with decode steps after
each. The first is the cold one; of the others the prompt's median time and the token's mean time
count. Texts differ much: with 110 slots of 896, two of 48 tokens had hit rates of 0.18 and 0.30. So
there are several, and hit rates come from a trace of those that lie between them in the same
source. Medians over rounds, ratios of one round's pair. Needs the right to make cgroups, and a
machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

from limits import drop_from_page_cache, result_of, run_limited, start
from peers import token_ids
from peers_cell import Ours, Prompt, run_prompt

from moe_infinity.sizes import parse_size

FILE = str(Path(__file__))
TEXTS = 6  # of a run, the cold one first
TRACED = 2  # after each of them, of the trace
ROWS = ("tokens_per_s", "first_token_cold_s", "first_token_warm_s", "hit_rate", "slots")
WITHIN = 0.25  # of the measured value


def plan_cell(model: str, prompt: int, trace: str) -> dict[str, Any]:
    """What the command prints with --json, and the same numbers as `run_cell` has."""
    from moe_infinity.tools.planning.fit import sizes_of
    from moe_infinity.tools.planning.planner import PlannedRun, make_plan, measured_machine
    from moe_infinity.tools.planning.speed import Constants

    sizes = sizes_of(model)
    machine = measured_machine(sizes, measures_disk=True)
    planned = PlannedRun(prompt=prompt, trace=Path(trace))
    made = make_plan(sizes, machine, planned, Constants())
    speed = made.outlook.speed
    return {
        "tokens_per_s": speed.tokens_per_s,
        "first_token_cold_s": speed.first_token_cold.seconds,
        "first_token_warm_s": speed.first_token_warm.seconds,
        "hit_rate": made.outlook.hits[0].decode,
        "slots": made.outlook.fit.host.num_slots,
        "plan": made.as_dict(),
    }


def run_cell(model: str, prompt: int, decode: int, ids: list[int]) -> dict[str, Any]:
    """The same numbers, measured."""
    importlib.import_module(Ours.package)  # before the time of loading begins
    started = time.perf_counter()
    runner = Ours(model, {})
    load_s = time.perf_counter() - started
    rest = iter(ids)
    cold = run_prompt(runner, Prompt(1, prompt, decode), rest)
    before = replace(runner.report().decode)
    warm = [run_prompt(runner, Prompt(1, prompt, decode), rest) for _ in range(TEXTS - 1)]
    report = runner.report()
    lookups = report.decode.lookups - before.lookups
    found = {
        "tokens_per_s": 1 / mean(1 / text["decode"]["tok_per_s"] for text in warm),
        "first_token_cold_s": load_s + cold["s"],
        "first_token_warm_s": median(text["s"] for text in warm),
        "hit_rate": (report.decode.hits - before.hits) / lookups,
        "slots": report.as_dict()["tiers"]["host"]["capacity"],
        "load_s": load_s,
        "stall_s_per_token": (report.decode.stall_s - before.stall_s) / (len(warm) * decode),
        "texts": [cold, *warm],
        "experts": report.experts,
    }
    runner.close()
    return found


def trace_cell(model: str, prompt: int, decode: int, ids: list[int], output: str) -> dict[str, Any]:
    """Routing of text that no run gets."""
    from moe_infinity import MoE
    from moe_infinity.architectures.attention_inputs import cache_parameter
    from moe_infinity.predict.tracefile import save_trace

    with MoE(model) as moe:
        import torch
        from transformers import DynamicCache

        rest = iter(ids)
        with moe.recording() as finish:
            for _ in range(TRACED * TEXTS):
                cache = DynamicCache(config=moe.model.config)
                text = list(islice(rest, prompt + decode))
                for at, count in [(0, prompt), *((prompt + i, 1) for i in range(decode))]:
                    with torch.no_grad():
                        moe.model(
                            torch.tensor([text[at : at + count]]),
                            **{cache_parameter(moe.model.forward): cache},
                            use_cache=True,
                            logits_to_keep=1,
                        )
            sequences = finish()
        save_trace(Path(output), sequences, num_experts=moe.engine.recorder.num_experts)
    return {"sequences": len(sequences)}


CELLS = {"plan": plan_cell, "run": run_cell, "trace": trace_cell}


def pairs(args: argparse.Namespace, trace: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plan and run of every round and limit."""
    ids = token_ids(args.model)
    common = {"model": str(args.model), "prompt": args.prompt}
    length = args.prompt + args.decode
    group = (1 + TRACED) * length  # a text of the run, and those of the trace after it
    if TEXTS * group > len(ids):
        raise SystemExit(f"{TEXTS * group} tokens are needed, the source has {len(ids)}")
    groups = [ids[at * group : (at + 1) * group] for at in range(TEXTS)]
    of_run = [token for ids_T in groups for token in ids_T[:length]]
    of_trace = [token for ids_T in groups for token in ids_T[length:]]
    traced = {"ids": of_trace, "output": trace}
    cell = {"kind": "trace", **common, "decode": args.decode, **traced}
    first = result_of(start(FILE, cell, None))  # compiles kernels, too
    if "failed" in first:
        raise SystemExit(f"no trace: {first['failed']}")
    run = {"kind": "run", **common, "decode": args.decode, "ids": of_run}
    for number in range(args.rounds):
        for limit in args.limits.split(","):
            pair = {}
            for cell in ({"kind": "plan", **common, "trace": trace}, run):
                drop_from_page_cache(args.model)
                limit_bytes = parse_size(limit, whole_bytes=0)
                pair[str(cell["kind"])] = run_limited(FILE, cell, limit_bytes)
            print(f"round {number + 1}, {limit}: {shown(pair)}", flush=True)
            yield limit, pair


def shown(pair: dict[str, Any]) -> str:
    if failed := [f"{kind} {found['failed']}" for kind, found in pair.items() if "failed" in found]:
        return ", ".join(failed)
    plan, run = pair["plan"], pair["run"]
    return ", ".join(f"{row} {plan[row]:.4g} / {run[row]:.4g}" for row in ROWS)


def rows_of(found: list[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for limit in dict.fromkeys(limit for limit, _ in found):
        whole = [p for at, p in found if at == limit and not any("failed" in c for c in p.values())]
        for row in ROWS if whole else ():
            ratios = [pair["plan"][row] / pair["run"][row] for pair in whole if pair["run"][row]]
            yield {
                "limit": limit,
                "row": row,
                "planned": median(pair["plan"][row] for pair in whole),
                "measured": median(pair["run"][row] for pair in whole),
                "ratio": median(ratios) if ratios else None,
                "ratios": ratios,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limits", default="2GiB,4GiB,6GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--decode", type=int, default=48, help="tokens after each prompt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(pairs(args, f"{folder}/trace.npz"))
    rows = list(rows_of(found))
    print(f"{'limit':8}{'':20}{'planned':>10}{'measured':>10}{'ratio':>8}")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(
            f"{row['limit']:8}{row['row']:20}{row['planned']:>10.4g}{row['measured']:>10.4g}"
            f"{ratio:>8}"
        )
    speeds = [row["ratio"] for row in rows if row["row"] in ROWS[:3]]
    within = bool(speeds) and all(abs(ratio - 1) <= WITHIN for ratio in speeds)
    pairs_found = [{"limit": limit, **pair} for limit, pair in found]
    result = {"benchmark": "plan_check", "within": within, "rows": rows, "pairs": pairs_found}
    print(json.dumps(result))


if __name__ == "__main__":
    if "--cell" in sys.argv:
        asked = json.loads(sys.argv[sys.argv.index("--cell") + 1])
        print(json.dumps(CELLS[asked.pop("kind")](**asked)))
    else:
        main()
