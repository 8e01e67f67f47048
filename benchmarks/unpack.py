"""How long does it take to unpack one expert, and how far is that from copying its bytes?

Per format: an expert as large as those of Qwen3-30B-A3B (hidden 2048, width 768) or, for mxfp4,
gpt-oss-20b (hidden 2880, width 2880), random bits, unpacked to bfloat16. A: our functions. B: the
chain of operations of the library that defines the format, transformers' own where it has one.
The ceiling: bytes stored read and bytes unpacked written as fast as this machine copies memory.
A and B in alternation; medians, and the fastest tenth of A.

    python benchmarks/unpack.py [--rounds 20] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_infinity.checkpoint.headers import Extent, StoredTensor
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.formats.methods import find_format

Parts = dict[str, Tensor]
QWEN3 = [(768, 2048), (768, 2048), (2048, 768)]  # [R, C] of gate, up, down
GPT_OSS = [(5760, 2880), (2880, 2880)]  # of gate and up together, down
COPIED_BYTES = 256 << 20
NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
STORED = {
    torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32",
}  # fmt: skip


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def fp8_parts(rows: int, columns: int) -> Parts:
    weight = torch.randn(rows, columns).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return {"w.weight": weight, "w.weight_scale_inv": torch.rand(-(-rows // 128), columns // 128)}


def int4_parts(rows: int, columns: int) -> Parts:
    scales = torch.rand(rows, columns // 32).bfloat16()
    return {"w.weight_packed": words(rows, columns // 8), "w.weight_scale": scales}


def gptq_parts(rows: int, columns: int) -> Parts:
    return {
        "w.qweight": words(columns // 8, rows),
        "w.qzeros": words(columns // 128, rows // 8),
        "w.scales": torch.rand(columns // 128, rows).half(),
        "w.g_idx": (torch.arange(columns) // 128).to(torch.int32),
    }


def awq_parts(rows: int, columns: int) -> Parts:
    parts = gptq_parts(rows, columns) | {"w.qweight": words(columns, rows // 8)}
    del parts["w.g_idx"]
    return parts


def mxfp4_parts(rows: int, columns: int) -> Parts:
    blocks = torch.randint(0, 256, (1, rows, columns // 32, 16)).to(torch.uint8)
    return {"w_blocks": blocks, "w_scales": torch.randint(110, 126, blocks.shape[:3]).byte()}


# B: [R, C] by the chain of operations the libraries use


def fp8_chain(parts: Parts) -> Tensor:
    weight, scales = parts["values"], parts["scale"]
    return Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=torch.bfloat16)


def int4_chain(parts: Parts) -> Tensor:
    """As compressed-tensors does it."""
    packed, scales = parts["values"].view(torch.uint8), parts["scale"]
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).view(torch.int8)
    values = nibbles.view(len(packed), -1, 32) - 8
    return (values.to(scales.dtype) * scales[..., None]).flatten(1)


def gptq_chain(parts: Parts) -> Tensor:
    """As GPTQModel's torch kernel does it, then the transpose a linear layer's weight is."""
    zeros = (parts["zeros"] + 0x11111111)[:, :, None] >> NIBBLES & 15
    nibbles = parts["values"][:, None, :] >> NIBBLES[:, None] & 15
    zeros, nibbles, groups = zeros.flatten(1), nibbles.flatten(0, 1), parts["groups"].long()
    weight = parts["scale"][groups] * (nibbles - zeros[groups])
    return weight.to(torch.bfloat16).t().contiguous()


def awq_chain(parts: Parts) -> Tensor:
    """As AutoAWQ does it, then the transpose."""

    def unpacked(packed: Tensor) -> Tensor:
        nibbles = (packed[:, :, None] >> NIBBLES).to(torch.int8) & 15
        return nibbles[:, :, AWQ_ORDER].flatten(1)

    group = len(parts["values"]) // len(parts["scale"])
    zeros = unpacked(parts["zeros"]).repeat_interleave(group, dim=0)
    scales = parts["scale"].repeat_interleave(group, dim=0)
    weight = (unpacked(parts["values"]) - zeros) * scales
    return weight.to(torch.bfloat16).t().contiguous()


def mxfp4_chain(parts: Parts) -> Tensor:
    return convert_moe_packed_tensors(parts["values"], parts["scale"], dtype=torch.bfloat16)


INT4 = {"type": "int", "num_bits": 4, "strategy": "group"}
CASES: dict[str, tuple[dict[str, Any], list[tuple[int, int]], Any, Callable[[Parts], Tensor]]] = {
    "fp8": ({"weight_block_size": [128, 128]}, QWEN3, fp8_parts, fp8_chain),
    "compressed-tensors": (
        {"format": "pack-quantized", "config_groups": {"0": {"weights": INT4}}},
        QWEN3,
        int4_parts,
        int4_chain,
    ),
    "gptq": ({"bits": 4}, QWEN3, gptq_parts, gptq_chain),
    "awq": ({"bits": 4}, QWEN3, awq_parts, awq_chain),
    "mxfp4": ({}, GPT_OSS, mxfp4_parts, mxfp4_chain),
}


def make_expert(method: str) -> list[tuple[PackedTensor, Parts]]:
    """The weights of one expert, and the values of their parts by role."""
    config, shapes, make_parts, _ = CASES[method]
    quantization, expert = find_format({"quant_method": method, **config}), []
    for rows, columns in shapes:
        tensors = make_parts(rows, columns)
        headers = {
            name: StoredTensor(
                name, STORED[t.dtype], tuple(t.shape), Extent(Path(), 0, t.numel() * t.itemsize)
            )
            for name, t in tensors.items()
        }
        (packed,) = quantization.group(headers).values()
        assert isinstance(packed, PackedTensor)
        expert.append((packed, {role: tensors[part.name] for role, part in packed.parts}))
    return expert


def timed_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def copy_gbps(rounds: int) -> float:
    """Bytes read and written per second by a copy larger than the caches."""
    source = torch.randint(0, 256, (COPIED_BYTES,), dtype=torch.uint8)
    target = torch.empty_like(source)
    times = [timed_ms(lambda: target.copy_(source)) for _ in range(rounds)]
    return 2 * COPIED_BYTES / statistics.median(times) / 1e6


def measure(method: str, rounds: int) -> dict[str, Any]:
    expert, chain = make_expert(method), CASES[method][3]

    def ours() -> list[Tensor]:
        return [packed.unpack(parts, torch.bfloat16) for packed, parts in expert]

    def theirs() -> list[Tensor]:
        return [chain(parts) for _, parts in expert]

    for found, expected in zip(ours(), theirs(), strict=True):  # warms up, too
        assert torch.equal(found, expected), method
    pairs = [(timed_ms(ours), timed_ms(theirs)) for _ in range(rounds)]
    ours_ms, theirs_ms = (sorted(times) for times in zip(*pairs, strict=True))
    stored_bytes = sum(packed.num_bytes for packed, _ in expert)
    unpacked_bytes = sum(weight.numel() * weight.itemsize for weight in ours())
    return {
        "stored_bytes": stored_bytes,
        "unpacked_bytes": unpacked_bytes,
        "ms": round(statistics.median(ours_ms), 2),
        "ms_fastest_tenth": round(ours_ms[len(ours_ms) // 10], 2),
        "chain_ms": round(statistics.median(theirs_ms), 2),
        "gbps": round((stored_bytes + unpacked_bytes) / statistics.median(ours_ms) / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ceiling = copy_gbps(args.rounds)
    print(f"copying memory: {ceiling:.1f} GB/s read and written")
    formats = {}
    for method in CASES:
        formats[method] = row = measure(method, args.rounds)
        row["ceiling_ms"] = round((row["stored_bytes"] + row["unpacked_bytes"]) / ceiling / 1e6, 2)
        print(
            f"{method:18}  {row['stored_bytes'] / 2**20:6.2f} -> "
            f"{row['unpacked_bytes'] / 2**20:6.2f} MiB  {row['ms']:7.2f} ms  "
            f"chain {row['chain_ms']:7.2f} ms  ceiling {row['ceiling_ms']:5.2f} ms  "
            f"{row['gbps']:5.2f} GB/s"
        )
    row = {
        "benchmark": "unpack",
        "copy_gbps": round(ceiling, 1),
        "formats": formats,
        "dtype": "bfloat16",
        "rounds": args.rounds,
        "threads": args.threads,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
