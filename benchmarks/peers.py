"""How fast do llama.cpp and accelerate decode the same weights and text under the same limit?

    python tools/convert_to_gguf.py runs/big runs/big.gguf          # needs gguf
    python benchmarks/peers.py runs/big --gguf runs/big.gguf --limit 4GiB --host-memory 2.6GiB

llama.cpp (llama-cpp-python) maps its file. transformers with accelerate keeps as many weights as
--host-memory allows in memory, and the rest in a folder on disk: --accelerate FOLDER, as large as
the model, made by a first run without a limit.

The models read real text token by token. Each cell runs in its own process under the limit, with
the files dropped from the page cache. Cells alternate, and the medians are printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decode import NUM_PROMPT, TEXT, decode, median_of
from limits import drop_from_page_cache, run_limited


def token_ids(model: str, num_tokens: int) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = (
        Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode(TEXT.read_text("utf-8")).ids
    )
    return ids[:num_tokens]


def timed(ids: list[int], num_prompt: int, feed: Callable[[list[int]], object]) -> dict[str, Any]:
    """The times of feeding a prompt at once, then the other tokens one by one."""
    started = time.perf_counter()
    feed(ids[:num_prompt])
    times = [time.perf_counter()]
    for token_id in ids[num_prompt:]:
        feed([token_id])
        times.append(time.perf_counter())
    token_s = [after - before for before, after in zip(times, times[1:], strict=False)]
    return {
        "ttft_s": times[0] - started,
        "tok_per_s": len(token_s) / sum(token_s),
        "tpot_ms": 1e3 * statistics.median(token_s),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def llama_cpp(
    model: str, num_tokens: int, num_prompt: int, gguf: str, threads: int
) -> dict[str, Any]:
    from llama_cpp import Llama

    llama = Llama(gguf, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    return timed(token_ids(model, num_prompt + num_tokens), num_prompt, llama.eval)


def accelerate(
    model: str, num_tokens: int, num_prompt: int, folder: str, memory: str
) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    loaded = AutoModelForCausalLM.from_pretrained(
        model,
        dtype="auto",
        device_map="auto",
        max_memory={"cpu": memory},
        offload_folder=folder,
    )
    cache = DynamicCache(config=loaded.config)

    def feed(ids: list[int]) -> object:
        return loaded(torch.tensor([ids]), past_key_values=cache, use_cache=True)

    with torch.inference_mode():
        return timed(token_ids(model, num_prompt + num_tokens), num_prompt, feed)


RUNNERS: dict[str, Callable[..., dict[str, Any]]] = {
    "moe-infinity": decode,
    "llama.cpp": llama_cpp,
    "accelerate": accelerate,
}


def cells_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    common = {
        "model": str(args.model),
        "num_tokens": args.tokens,
        "num_prompt": args.prompt,
    }
    cells = []
    for implementation in ("auto", "fast"):
        for prefetch in (False, True):
            options = {
                "host_memory": args.host_memory,
                "experts_implementation": implementation,
                "prefetch": prefetch,
            }
            cells.append({"runner": "moe-infinity", **common, "options": options})
    if args.gguf:
        cells.append({"runner": "llama.cpp", **common, "gguf": str(args.gguf), "threads": 2})
    if args.accelerate:
        more = {"folder": str(args.accelerate), "memory": args.host_memory}
        cells.append({"runner": "accelerate", **common, **more})
    return [cell for cell in cells if not args.only or cell["runner"] in args.only.split(",")]


def main() -> None:
    from moe_infinity.sizes import parse_size

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--accelerate", type=Path, help="its folder for what is on disk")
    parser.add_argument("--limit", help="of memory, page cache included, e.g. 2GiB")
    parser.add_argument("--host-memory", default="900MiB")
    parser.add_argument("--only", default="", help="runners, comma-separated")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=NUM_PROMPT, help="tokens; 600 warm up")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    limit_bytes = parse_size(args.limit, whole_bytes=0) if args.limit else None
    cells = cells_of(args)
    results: list[list[dict[str, Any]]] = [[] for _ in cells]
    for _ in range(args.rounds):
        for cell, found in zip(cells, results, strict=True):
            for path in filter(None, (args.model, args.gguf, args.accelerate)):
                drop_from_page_cache(path)
            found.append(run_limited(__file__, cell, limit_bytes))
    for cell, found in zip(cells, results, strict=True):
        shown = {k: v for k, v in cell.items() if k in ("runner", "options")}
        result = median_of(found)
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
        print(json.dumps(shown | rounded))


def run_cell() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cell", type=json.loads, required=True)
    cell = parser.parse_args().cell
    print(json.dumps(RUNNERS[cell.pop("runner")](**cell)))


if __name__ == "__main__":
    run_cell() if "--cell" in sys.argv else main()
