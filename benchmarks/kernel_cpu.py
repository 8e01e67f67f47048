"""How long do the products of one expert take if its weights are read packed, and how far is that
from reading its bytes?

Experts of Qwen3-30B-A3B's size, so many that they come from memory. Formats in alternation, a few
experts at a time; medians. Beside ours: torch's product with bfloat16 weights and its own packed
ones (its int4 has an order of bytes that no checkpoint has). The ceiling: the bytes of an expert
as fast as the same threads add up the numbers of a large tensor.

    python benchmarks/kernel_cpu.py [--rounds 20] [--threads 1] [--tokens 1] [--whole]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from moe_infinity.kernels import packed_cpu as packed

SHAPES = [(768, 2048), (768, 2048), (2048, 768)]  # [R, C] of gate, up, down
STORED_BYTES = 256 << 20  # of a format's experts: 8 times the last cache of the machine in mind
SUMMED_BYTES = 1 << 30
AT_ONCE = 16  # experts, between two looks at the clock
Product = Callable[[Tensor], Tensor]
Weight = tuple[list[Tensor], Product]  # its parts


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def bf16_mm(rows: int, columns: int) -> Weight:
    weight = torch.randn(rows, columns).bfloat16()
    return [weight], lambda x: torch.mm(x, weight.t())


def int8(rows: int, columns: int) -> Weight:
    weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    scales = torch.rand(rows, 1).bfloat16()
    return [weight, scales], lambda x: packed.int8(x, weight, scales)


def torch_int8(rows: int, columns: int) -> Weight:
    (weight, scales), _ = int8(rows, columns)
    return [weight, scales], lambda x: torch._weight_int8pack_mm(x, weight, scales[:, 0])


def fp8(rows: int, columns: int) -> Weight:
    weight = torch.randn(rows, columns).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(rows // 128, columns // 128)
    return [weight, scales], lambda x: packed.fp8(x, weight, scales, (128, 128))


def int4(rows: int, columns: int, group: int) -> Weight:
    weight, scales = words(rows, columns // 8), torch.rand(rows, columns // group).bfloat16()
    return [weight, scales], lambda x: packed.int4_rows(x, weight, scales)


def torch_int4(rows: int, columns: int) -> Weight:
    nibbles = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
    weight = torch._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    scales = torch.rand(columns // 128, rows, 2).bfloat16()
    return [weight, scales], lambda x: torch._weight_int4pack_mm_for_cpu(x, weight, 128, scales)


def mxfp4(rows: int, columns: int) -> Weight:
    blocks = torch.randint(0, 256, (rows, columns // 32, 16)).byte()
    scales = torch.randint(110, 126, (rows, columns // 32)).byte()
    return [blocks, scales], lambda x: packed.mxfp4(x, blocks, scales)


def word_format(rows: int, columns: int, kind: str) -> Weight:
    shape = (columns // 8, rows) if kind == "gptq" else (columns, rows // 8)
    scales, zeros = torch.rand(columns // 128, rows).half(), words(columns // 128, rows // 8)
    parts = {"qweight": words(*shape), "qzeros": zeros, "scales": scales}
    if kind == "gptq":
        return list(parts.values()), lambda x: packed.gptq(x, parts, adds_one_to_zeros=True)
    return list(parts.values()), lambda x: packed.awq(x, parts)


FORMATS: dict[str, Callable[[int, int], Weight]] = {
    "bf16, torch.mm": bf16_mm,
    "int8": int8,
    "int8, torch": torch_int8,
    "fp8": fp8,
    "int4 group 32": partial(int4, group=32),
    "int4 group 128": partial(int4, group=128),
    "int4 group 128, torch": torch_int4,
    "mxfp4": mxfp4,
    "gptq": partial(word_format, kind="gptq"),
    "awq": partial(word_format, kind="awq"),
}


def timed_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def make_experts(name: str) -> tuple[int, list[list[Product]]]:
    """The bytes of one, and the products of each."""
    experts: list[list[Product]] = []
    num_bytes = 1
    while len(experts) * num_bytes < STORED_BYTES or len(experts) % AT_ONCE:
        weights = [FORMATS[name](*shape) for shape in SHAPES]
        num_bytes = sum(part.numel() * part.itemsize for parts, _ in weights for part in parts)
        experts.append([product for _, product in weights])
    return num_bytes, experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="an expert per thread, not its rows")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    threads = ThreadPoolExecutor(args.threads)
    parts = torch.ones(args.threads, SUMMED_BYTES // 4 // args.threads)
    xs = {columns: torch.randn(args.tokens, columns).bfloat16() for columns in (768, 2048)}
    columns_of = [columns for _, columns in SHAPES]

    def compute(expert: list[Product]) -> None:
        for columns, product in zip(columns_of, expert, strict=True):
            product(xs[columns])

    def run(experts: list[list[Product]]) -> None:
        list((threads.map if args.whole else map)(compute, experts))

    made = {name: make_experts(name) for name in FORMATS}
    times: dict[str, list[float]] = {name: [] for name in ("sum", *FORMATS)}
    first_ms = {name: timed_ms(partial(compute, made[name][1][0])) for name in FORMATS}
    for i in range(args.rounds + 1):
        torch.set_num_threads(1)
        times["sum"].append(timed_ms(lambda: list(threads.map(torch.sum, parts))))
        torch.set_num_threads(1 if args.whole else args.threads)
        for name, (_, experts) in made.items():
            start = i * AT_ONCE % len(experts)
            chosen = experts[start : start + AT_ONCE]
            times[name].append(timed_ms(partial(run, chosen)) / AT_ONCE)
    medians = {name: statistics.median(row[1:]) for name, row in times.items()}  # less the first
    ceiling = SUMMED_BYTES / medians["sum"] / 1e6
    print(f"reading memory: {ceiling:.1f} GB/s")
    rows: dict[str, dict[str, float]] = {}
    for name, (num_bytes, _) in made.items():
        rows[name] = {
            "bytes": num_bytes,
            "ms": round(medians[name], 3),
            "ms_fastest_tenth": round(sorted(times[name])[args.rounds // 10], 3),
            "first_ms": round(first_ms[name]),
            "gbps": round(num_bytes / medians[name] / 1e6, 1),
            "share_of_ceiling": round(num_bytes / medians[name] / 1e6 / ceiling, 2),
            "times_bf16": round(medians["bf16, torch.mm"] / medians[name], 2),
        }
        print(f"{name:22}", "  ".join(f"{key} {value}" for key, value in rows[name].items()))
    row = {"benchmark": "kernel_cpu", "read_gbps": round(ceiling, 1), "formats": rows}
    print(json.dumps(row | vars(args) | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
