"""Does a model larger than its budget stay within it, and read no byte it does not need?

    python tools/make_random_checkpoint.py runs/big --gib 6.2 --tokenizer models/demo
    python benchmarks/memory_limit.py runs/big --host-memory 1GiB

Peak resident memory is compared with dense bytes + budget + 0.8 GiB (interpreter, torch,
transformers, activations); bytes read before the first token with headers + dense weights + the
experts prefill activated. The ceiling of decoding is the bytes each token missed over the bandwidth
of reading the same files, cold or from the page cache as the run itself found them.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch

from moe_infinity import MoE
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.sizes import parse_size

MARGIN_BYTES = int(0.8 * 2**30)
PROMPT = "The old house stood at the edge of the moor, and nobody in the village could remember"


def characters_read() -> int:
    """Bytes this process asked the kernel to read, page cache included (Linux)."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise SystemExit("needs /proc/self/io")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_bandwidth(folder: Path, num_bytes: int = 512 << 20) -> float:
    """Bytes per second of plain sequential reads of the first shard, as the machine is now."""
    file = sorted(folder.glob("*.safetensors"))[0]
    started, done = time.perf_counter(), 0
    with file.open("rb", buffering=0) as stream:
        while done < num_bytes and (chunk := stream.read(4 << 20)):
            done += len(chunk)
    return done / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    args = parser.parse_args()
    summary = inspect_checkpoint(str(args.model))
    budget = parse_size(args.host_memory, whole_bytes=summary.expert_bytes)
    files_before = sorted(args.model.iterdir())

    before_load = characters_read()
    asked_only = {"preload": "off", "stream_layers": False}  # nothing is read ahead
    with MoE(args.model, host_memory=args.host_memory, policy=args.policy, **asked_only) as moe:
        inputs = moe.tokenizer(PROMPT, return_tensors="pt")
        after_load = characters_read()
        moe.generate(**inputs, max_new_tokens=1, do_sample=False)
        first_token = characters_read()
        prefill_bytes = moe.report().prefill.bytes_read
        stream = moe.stream(inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
        for _ in stream:
            pass
        decode = moe.report().decode
    peak = peak_bytes()
    bandwidth = read_bandwidth(args.model)
    miss_bytes_per_token = decode.bytes_read / max(decode.steps, 1)
    limit = summary.dense_bytes + budget + MARGIN_BYTES
    result = {
        "benchmark": "memory_limit",
        "model_gib": round((summary.expert_bytes + summary.dense_bytes) / 2**30, 2),
        "host_memory_gib": round(budget / 2**30, 2),
        "dense_gib": round(summary.dense_bytes / 2**30, 3),
        "peak_rss_gib": round(peak / 2**30, 3),
        "limit_gib": round(limit / 2**30, 3),
        "within_limit": peak <= limit,
        "startup_bytes": after_load - before_load,
        "header_and_dense_bytes": summary.header_bytes + summary.dense_bytes,
        "bytes_before_first_token": first_token - before_load,
        "header_dense_and_prefill_bytes": summary.header_bytes
        + summary.dense_bytes
        + prefill_bytes,
        "other_bytes": first_token
        - before_load
        - summary.header_bytes
        - summary.dense_bytes
        - prefill_bytes,  # config, tokenizer, code of lazily imported modules
        "second_copy_on_disk": sorted(args.model.iterdir()) != files_before,
        "policy": args.policy,
        "decode_hit_rate": round(decode.hit_rate or 0.0, 3),
        "tpot_s": round(stream.tpot_s or 0.0, 4),
        "miss_bytes_per_token": int(miss_bytes_per_token),
        "read_gb_per_s": round(bandwidth / 1e9, 2),
        "ceiling_tpot_s": round(miss_bytes_per_token / bandwidth, 4),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
