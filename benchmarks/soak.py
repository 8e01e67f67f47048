"""Do long prompts and answers stay under a memory limit, page cache included, without swapping?

    python tools/make_random_checkpoint.py runs/big --layers 7 --experts 128 --hidden 2048 \\
        --heads 32 --head-dim 128 --tokenizer models/demo                            # 8.6 GB
    python benchmarks/soak.py runs/big --limit 2GiB --host-memory 900MiB
    python benchmarks/soak.py runs/big --limit 4GiB --prompts 32,2000,8000 --tokens 32 --seconds 600
    python benchmarks/soak.py runs/big --memory 4GiB --prompts 600 --sequences 8

Prompts of random ids are read in turn, until the time is over, and answered with so many tokens.
The model runs in its own memory control group; its files are dropped from the page cache first. The
group is sampled five times a second: all memory charged to it, anonymous memory, page cache, swap.
The kernel drops page cache to keep a group below its limit, so the peak of all charged memory may
be the limit itself. `held` is the memory that cannot be dropped; `limit_met` is how often the group
reached its limit. Without --host-memory the budget is the automatic one. With --memory the group
has no limit, and `held` should stay below that number.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from limits import drop_from_page_cache, memory_cgroup, result_of, start

SAMPLE_S = 0.2
PRINT_S = 10.0


def generate(
    model: str,
    prompts: Sequence[int],
    num_tokens: int,
    num_sequences: int,
    seconds: float,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Answer prompts; runs in the control group."""
    import torch

    from moe_infinity import MoE

    answers = []
    ends = time.monotonic() + seconds
    with MoE(model, **options) as moe:
        vocab_size = moe.model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        for num_prompt in cycle(prompts):
            shape = (num_sequences, num_prompt)
            ids = torch.randint(vocab_size, shape, generator=generator)
            began = time.monotonic()
            out = moe.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
            )
            answers.append((num_prompt, out.shape[1] - num_prompt, time.monotonic() - began))
            if len(answers) >= len(prompts) and time.monotonic() >= ends:
                break
        report = moe.report()
    return {
        "tokens": min(num_answered for _, num_answered, _ in answers),
        "answers": len(answers),
        "answer_s": {num: max(s for n, _, s in answers if n == num) for num in prompts},
        "slots": report.tiers[0].capacity,
        "host_bytes": report.tiers[0].capacity_bytes,
        "hit_rate": report.decode.hit_rate,
        "read_bytes": report.prefill.bytes_read + report.decode.bytes_read,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def numbers_in(file: Path) -> dict[str, int]:
    """The numbers of a file by their names: its lines are "name number", or one is a number.

    Empty if there is no such file.
    """
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return {words[0] if len(words) == 2 else "": int(words[-1]) for words in lines}


def first_of(group: Path, *names: str) -> int | None:
    """The number in the first of these files that exists: names differ between versions."""
    return next((numbers_in(group / name)[""] for name in names if (group / name).exists()), None)


def sample(group: Path) -> dict[str, int]:
    """Bytes charged to the group now, by kind."""
    stat = numbers_in(group / "memory.stat")
    stat |= {name[6:]: count for name, count in stat.items() if name.startswith("total_")}
    charged = first_of(group, "memory.current", "memory.usage_in_bytes") or 0
    swapped = first_of(group, "memory.swap.current")
    return {
        "charged": charged,
        "held": charged - stat["inactive_file"] - stat["active_file"],
        "anonymous": stat.get("anon", stat.get("rss", 0)),
        "page_cache": stat.get("file", stat.get("cache", 0)),
        "swap": stat.get("swap", 0) if swapped is None else swapped,
    }


def events(group: Path) -> dict[str, int]:
    """How often the group reached its limit, and how many processes were killed for it."""
    found = numbers_in(group / "memory.events") or numbers_in(group / "memory.oom_control")
    met = found.get("max", first_of(group, "memory.failcnt"))
    return {"limit_met": met or 0, "oom_kills": found.get("oom_kill", 0)}


def watch(process: Any, group: Path) -> dict[str, int]:
    """The peaks of all samples until the process ends. Prints a sample every 10 s."""
    peaks: dict[str, int] = {}
    started = last_line = time.monotonic()
    while process.poll() is None:
        now = sample(group)
        peaks = {name: max(count, peaks.get(name, 0)) for name, count in now.items()}
        if time.monotonic() - last_line > PRINT_S:
            last_line = time.monotonic()
            print(f"{last_line - started:6.0f} s", *(f"{n} {c >> 20} MiB" for n, c in now.items()))
        time.sleep(SAMPLE_S)
    return peaks


def main() -> None:
    from moe_infinity.sizes import parse_size

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", default="2GiB", help="of memory, page cache included")
    parser.add_argument("--memory", help="the option, in place of a limit")
    parser.add_argument("--host-memory", help="default: the automatic budget")
    parser.add_argument("--prefetch", action="store_true")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--prompts", default="20", help="tokens, separated by commas")
    parser.add_argument("--sequences", type=int, default=1, help="of a batch")
    parser.add_argument("--seconds", type=float, default=0.0, help="each prompt at least once")
    args = parser.parse_args()
    limit_bytes = parse_size(args.memory or args.limit, whole_bytes=0)
    options = {"host_memory": args.host_memory, "prefetch": args.prefetch, "memory": args.memory}
    cell = {
        "model": str(args.model),
        "prompts": list(map(int, args.prompts.split(","))),
        "num_tokens": args.tokens,
        "num_sequences": args.sequences,
        "seconds": args.seconds,
        "options": options,
    }
    drop_from_page_cache(args.model)
    with memory_cgroup(2 * limit_bytes if args.memory else limit_bytes) as group:
        process = start(__file__, cell, group)
        peaks = watch(process, group)
        result = result_of(process)
        highest = first_of(group, "memory.peak", "memory.max_usage_in_bytes")
        happened = events(group)
    peaks["charged"] = max(peaks["charged"], highest or 0)
    good = (
        result.get("tokens") == args.tokens
        and peaks["held"] < limit_bytes
        and not (peaks["swap"] or happened["oom_kills"])
    )
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
    print(
        json.dumps(
            {
                "benchmark": "soak",
                "model": args.model.name,
                "limit_bytes": limit_bytes,
                **options,
                **{f"peak_{name}_bytes": count for name, count in peaks.items()},
                **happened,
                **rounded,
                "stayed_under": good,
            }
        )
    )
    sys.exit(not good)


def run_cell() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cell", type=json.loads, required=True)
    print(json.dumps(generate(**parser.parse_args().cell)))


if __name__ == "__main__":
    run_cell() if "--cell" in sys.argv else main()
