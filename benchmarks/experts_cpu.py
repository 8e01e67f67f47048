"""How long do the experts of one layer take on CPU if one call computes them all, and how far is
that from reading their bytes?

Layers of 8 experts of Qwen3-30B-A3B's size and one token, in turn, of slots that fill more memory
than any cache. In alternation: the bytes as fast as the same threads add them up as numbers, which
is the ceiling; ours; and the runtime's loop with bfloat16 weights, expert by expert.

    python benchmarks/experts_cpu.py [--rounds 15] [--threads 2] [--huge-pages] [--tokens 1] \
        [--formats bf16,q8_0,q4_k]
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_infinity.experts import ExpertLayout, ParamSpec
from moe_infinity.formats.methods import PACKED_BY_US
from moe_infinity.kernels.cpu.experts import fused_experts
from moe_infinity.kernels.reference import Activation, PlainMlp
from moe_infinity.kernels.unpack import BLOCKS, blocks_layout, row_bytes
from moe_infinity.layout import WeightLayout

WIDTH, EXPERT_WIDTH, NUM_EXPERTS = 2048, 768, 8  # D, F, and experts of a call
SHAPES = {"gate_up_proj": (2 * EXPERT_WIDTH, WIDTH), "down_proj": (WIDTH, EXPERT_WIDTH)}
STORED_BYTES, CALLS = 5 << 28, 8  # of a format's slots, and between two looks at the clock


def parts_of(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    """What is stored of a weight, by role."""
    kind, _, group = name.partition(" group ")
    if kind in BLOCKS:  # no byte makes a float16 of 1 or more
        shape = rows, row_bytes(kind, columns)
        blocks = torch.randint(0, 0x3C, shape, dtype=torch.uint8)
        if kind == "mxfp4":
            blocks[:, :: BLOCKS[kind][1]] = 120  # exponents
        return {"values": blocks}
    values = torch.randn(rows, columns)
    if kind == "bf16":
        return {"values": values.mul_(0.02).bfloat16()}
    if kind == "int4":
        scales = torch.rand(rows, columns // int(group)).mul_(0.01).bfloat16()
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32)
        return {"values": words, "scale": scales}
    if kind == "int8":
        weight = values.mul_(30).clamp_(-127, 127).to(torch.int8)
        return {"values": weight, "scale": torch.rand(rows, 1).mul_(1e-3).bfloat16()}
    scale = torch.rand(rows // 128, columns // 128).mul_(0.02)
    return {"values": values.to(torch.float8_e4m3fn), "scale": scale}


def layout_of(kind: str, shape: tuple[int, int], parts: dict[str, ParamSpec]) -> WeightLayout:
    if kind in BLOCKS:
        return blocks_layout(kind, shape, parts["values"])
    if kind == "bf16":
        return WeightLayout.plain(parts["values"])
    return PACKED_BY_US[kind].layout_of(parts, is_transposed=False)


class Slots:
    """One expert, over and over, in slots that fill STORED_BYTES; and who computes them."""

    def __init__(self, name: str, *, is_huge: bool) -> None:
        tensors = {(w, role): t for w in SHAPES for role, t in parts_of(name, *SHAPES[w]).items()}
        self.layout = ExpertLayout.of(
            {f"{w} {role}": (tuple(t.shape), str(t.dtype)[6:]) for (w, role), t in tensors.items()}
        )
        memory = mmap.mmap(-1, STORED_BYTES)
        if is_huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        one = torch.zeros(self.layout.slot_bytes, dtype=torch.uint8)
        stored: dict[str, dict[str, ParamSpec]] = {weight: {} for weight in SHAPES}
        for spec, ((weight, role), t) in zip(self.layout.params, tensors.items(), strict=True):
            one[spec.offset :][: spec.num_bytes] = t.view(torch.uint8).flatten()
            stored[weight][role] = spec
        num_slots = STORED_BYTES // len(one) // NUM_EXPERTS * NUM_EXPERTS
        self.slots = self.buffer[: num_slots * len(one)].view(num_slots, len(one))
        self.slots[:] = one
        up, down = (layout_of(name.split()[0], SHAPES[w], parts) for w, parts in stored.items())
        self.fused = fused_experts([up], [down], Activation("silu"))
        self.next = 0

    def layer(self) -> Tensor:
        start, self.next = self.next, (self.next + NUM_EXPERTS) % len(self.slots)
        return self.slots[start : start + NUM_EXPERTS]

    def compute(self, x_PD: Tensor, starts: list[int]) -> Tensor:
        return self.fused(x_PD, starts, [slot.data_ptr() for slot in self.layer()])

    def compute_by_torch(self, x_PD: Tensor, starts: list[int]) -> None:
        for i, slot in enumerate(self.layer()):
            weights = {}
            for spec in self.layout.params:
                flat = slot[spec.offset :][: spec.num_bytes].view(torch.bfloat16)
                weights[spec.name.split()[0]] = flat.view(spec.shape)
            PlainMlp(QWEN)(weights, x_PD[starts[i] : starts[i + 1]])


def gated(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return silu(gate) * up


QWEN = SimpleNamespace(has_gate=True, is_transposed=False, has_bias=False, _apply_gate=gated)
FORMATS = ("bf16", "int8", "int4 group 32", "int4 group 128", "fp8")


def timed_ms(call: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) * 1e3 / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1, help="rows of each expert")
    parser.add_argument("--huge-pages", action="store_true")
    parser.add_argument("--formats", default=",".join(FORMATS), help="these, or names of GGML's")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    x_PD = torch.randn(NUM_EXPERTS * args.tokens, WIDTH).bfloat16()
    starts = list(range(0, len(x_PD) + 1, args.tokens))
    plain = Slots("bf16", is_huge=args.huge_pages)
    rows: dict[str, dict[str, float]] = {}
    for name in args.formats.split(","):
        slots = plain if name == "bf16" else Slots(name, is_huge=args.huge_pages)
        calls: dict[str, Callable[[], object]] = {
            "read": slots.buffer.view(torch.float32).sum,
            "ours": lambda slots=slots: slots.compute(x_PD, starts),
            "torch": lambda: plain.compute_by_torch(x_PD, starts),
        }
        times: dict[str, list[float]] = {key: [] for key in calls}
        for _ in range(args.rounds + 1):
            for key, call in calls.items():
                times[key].append(timed_ms(call, 1 if key == "read" else CALLS))
        ms = {key: statistics.median(found[1:]) for key, found in times.items()}
        ceiling = STORED_BYTES / ms["read"] / 1e6
        gbps = NUM_EXPERTS * slots.layout.num_bytes / ms["ours"] / 1e6
        rows[name] = {
            "bytes": slots.layout.num_bytes,
            "ms": round(ms["ours"], 3),
            "ms_fastest_tenth": round(sorted(times["ours"])[args.rounds // 10], 3),
            "gbps": round(gbps, 1),
            "read_gbps": round(ceiling, 1),
            "share_of_ceiling": round(gbps / ceiling, 2),
            "times_torch_bf16": round(ms["torch"] / ms["ours"], 2),
        }
        print(f"{name:15}", "  ".join(f"{key} {value}" for key, value in rows[name].items()))
    told = {"benchmark": "experts_cpu", "formats": rows, "torch": torch.__version__}
    print(json.dumps(told | vars(args)))


if __name__ == "__main__":
    main()
