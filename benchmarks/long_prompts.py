"""What long prompts cost where experts are absent, and how long others wait meanwhile.

    python benchmarks/long_prompts.py runs/big --limit 4GiB --prompts 600,4000
    python benchmarks/long_prompts.py runs/big --limit 4GiB --prompts 8000 --users 3
    python benchmarks/long_prompts.py runs/big --limit 4GiB --prompts 4000 --chunk 512  # as before
    python benchmarks/long_prompts.py runs/big --limit 4GiB --prompts 4000 --system run
    python benchmarks/long_prompts.py big.gguf --limit 4GiB --prompts 4000 --system llama.cpp \\
        --python PEERS/bin/python                                          # or llama.cpp-one-batch

The engine runs in a memory control group of its own, without HTTP. A prompt's bytes are those of
experts that were read until its first token, beside those of all experts that were absent when it
came. With --users, so many others have an answer under way; the longest time between two of their
tokens is the gap, and the first token of one more, short prompt is waited for as well.

With --system another program reads the prompts, each in a process of its own with cold files: `run`
is `generate()`, llama.cpp has its default of 512 tokens in a pass or the whole prompt in one. Bytes
are then all that came from the disk during the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from limits import drop_from_page_cache, memory_cgroup, result_of, start
from soak import first_of, watch


class Asked:
    """A request, and when its outputs came."""

    def __init__(self, engine: Any, ids: list[int], num_answer: int) -> None:
        from moe_infinity.server.sampling import Sampling
        from moe_infinity.server.sequences import Request

        self.came: list[float] = []
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        request = Request(prompt_ids=ids, max_new_tokens=num_answer, sampling=sampling)
        self.running = engine.running(request, self._note)
        engine.submit([self.running])

    def _note(self, output: Any) -> None:
        if output.error is not None and not self.running.is_cancelled:
            raise output.error
        self.came.append(time.perf_counter())


def measure(
    model: str, prompts: list[int], users: int, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each prompt; runs in the control group."""
    import torch

    from moe_infinity import MoE
    from moe_infinity.server.config import ServeConfig
    from moe_infinity.server.engine import Engine

    with MoE(model, preload="wait") as moe:
        moe.preload()
        engine = Engine(moe, ServeConfig(prefix_cache="off", deadline=7200, **settings))
        vocab_size = moe.model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)

        def ask(num_prompt: int, num_answer: int) -> Asked:
            ids = torch.randint(vocab_size, (num_prompt,), generator=generator).tolist()
            return Asked(engine, ids, num_answer)

        rows = []
        for num_prompt in prompts:
            others = [ask(20, 100_000) for _ in range(users)]
            while not all(other.came for other in others):
                engine.step()
            before = moe.report()
            num_before = engine.counts.generated_tokens
            engine._decoding.longest_gap_s = 0.0  # while the others began
            host, disk = before.tiers[-2:]
            began = time.perf_counter()
            long = ask(num_prompt, 1)
            late = ask(20, 1) if users else long
            while not long.came:
                engine.step()
            after = moe.report()
            row = {
                "prompt": num_prompt,
                "seconds": long.came[0] - began,
                "read_bytes": after.prefill.bytes_read - before.prefill.bytes_read,
                "absent_bytes": disk.capacity_bytes * (1 - host.experts / disk.capacity),
                "slots": after.tiers[-2].capacity,
            }
            if users:
                row["gap_s"] = engine.state()["longest_gap_s"]
                row["beside_s"] = late.came[0] - began
                row["tokens_meanwhile"] = engine.counts.generated_tokens - num_before
            engine.cancel([other.running for other in others])
            engine.step()
            rows.append(row)
    return rows


def generate(model: str, num_prompt: int) -> dict[str, Any]:
    """The first token by `generate()`; runs in the control group."""
    import torch
    from peers_cell import bytes_from_disk

    from moe_infinity import MoE

    began = time.perf_counter()
    with MoE(model) as moe:
        load_s = time.perf_counter() - began
        vocab_size = moe.model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (1, num_prompt), generator=generator)
        before, began = bytes_from_disk(), time.perf_counter()
        moe.generate(ids, max_new_tokens=1, do_sample=False)
        seconds = time.perf_counter() - began
    return {"load_s": load_s, "s": seconds, "read_bytes": bytes_from_disk() - before}


def measure_system(args: argparse.Namespace, num_prompt: int) -> dict[str, Any]:
    """A row of another system than the server."""
    from moe_infinity.sizes import parse_size

    file, cell = __file__, {"model": str(args.model), "num_prompt": num_prompt}
    if args.system != "run":
        file = str(Path(__file__).with_name("peers_cell.py"))
        is_llama = args.system.startswith("llama.cpp")
        options = {"gguf": str(args.model), "threads": os.cpu_count()}
        if is_llama:
            options |= {"context": num_prompt + 64, "repack": False}  # no second copy of weights
            if args.system.endswith("one-batch"):
                options["micro_batch"] = num_prompt
        else:
            options["expert_bytes"] = parse_size(args.limit, whole_bytes=0) // 2
        generator = random.Random(0)
        cell = {
            "runner": "llama.cpp" if is_llama else args.system,
            "options": options,
            "prompts": [[1, num_prompt, 0]],
            "ids": [generator.randrange(6000) for _ in range(num_prompt)],
        }
    drop_from_page_cache(args.model)
    with memory_cgroup(parse_size(args.limit, whole_bytes=0)) as group:
        process = start(file, cell, group, args.python)
        peaks = watch(process, group)
        result = result_of(process, args.timeout)
        highest = first_of(group, "memory.peak", "memory.max_usage_in_bytes")
    return {
        "system": args.system, "prompt": num_prompt, **result,
        "peak_bytes": highest, "held_bytes": peaks["held"],
    }  # fmt: skip


def main() -> None:
    from moe_infinity.sizes import parse_size

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--system",
        default="serve",
        choices=["serve", "run", "llama.cpp", "llama.cpp-one-batch", "fastllm"],
    )
    parser.add_argument("--python", default=sys.executable, help="that has the other system")
    parser.add_argument("--limit", default="4GiB", help="of memory, page cache included")
    parser.add_argument("--prompts", default="600,4000", help="tokens, separated by commas")
    parser.add_argument("--users", type=int, default=0, help="whose answers are under way")
    parser.add_argument("--chunk", type=int, help="as --prefill-chunk of the server")
    parser.add_argument("--gap", type=float, default=5.0, help="as --max-gap of the server")
    parser.add_argument("--timeout", type=float, help="seconds that a process may take")
    args = parser.parse_args()
    if args.system != "serve":
        for num_prompt in map(int, args.prompts.split(",")):
            print(json.dumps(measure_system(args, num_prompt)), flush=True)
        return
    cell = {
        "model": str(args.model),
        "prompts": list(map(int, args.prompts.split(","))),
        "users": args.users,
        "settings": {"prefill_chunk": args.chunk, "max_gap": args.gap},
    }
    drop_from_page_cache(args.model)
    with memory_cgroup(parse_size(args.limit, whole_bytes=0)) as group:
        process = start(__file__, cell, group)
        peaks = watch(process, group)
        result = result_of(process, args.timeout)
        highest = first_of(group, "memory.peak", "memory.max_usage_in_bytes")
    print(json.dumps({**cell, **result, "peak_bytes": highest, "held_bytes": peaks["held"]}))


def run_cell() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cell", type=json.loads, required=True)
    cell = parser.parse_args().cell
    print(json.dumps(generate(**cell) if "num_prompt" in cell else {"rows": measure(**cell)}))


if __name__ == "__main__":
    run_cell() if "--cell" in sys.argv else main()
