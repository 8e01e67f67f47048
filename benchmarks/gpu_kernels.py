"""How long do the kernels of a device that decides alone take, and how far is that from what memory
and link allow?

Layers of Qwen3-30B-A3B's size by default, captured in a CUDA graph as a decode step is, with more
experts than caches hold.

    machinery   resolve and fill when all experts are resident     microseconds a layer
    resident    experts from device memory                         share of its read bandwidth
    layer       all three: what a captured decode step does        share of experts alone
    fill        copies of missed experts                           share of a plain copy's bandwidth
    through     experts from host memory, through the link         share of the same

    python benchmarks/gpu_kernels.py [--kind bf16] [--tokens 1] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moe_infinity.checkpoint.formats import PACKED_BY_US, find_format
from moe_infinity.checkpoint.layout import WeightLayout
from moe_infinity.cuda.device_table import ABSENT, DeviceTable
from moe_infinity.cuda.slot_kernels import MAX_PAIRS, SlotWork, slot_kernels
from moe_infinity.experts import ExpertKey, ExpertLayout, ParamSpec
from moe_infinity.kernels.activation import Activation
from moe_infinity.kernels.cuda.slot_mlp import SlotMlp, slot_mlp

KINDS = ("bf16", "int8", "fp8", "int4", "mxfp4", "gptq", "awq")
GROUP, BLOCK = 32, 128  # columns that share a scale: of nibbles, and of fp8 with as many rows
GROUP_OF_WORDS = 128  # of gptq and awq, as most are published
LAUNCH_CYCLES = 200_000  # 0.1 ms
COPY_BYTES = 1 << 30
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Sizes:
    kind: str = "bf16"
    num_tokens: int = 1
    num_layers: int = 16
    num_experts: int = 16  # of a layer: as many as there are slots for it
    top_k: int = 8
    width: int = 2048
    expert_width: int = 768


def parts_of(kind: str, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of what is stored of a weight, by role."""
    if kind == "bf16":
        return {"values": ((rows, columns), "bfloat16")}
    if kind == "int8":
        return {"values": ((rows, columns), "int8"), "scale": ((rows, 1), "float32")}
    if kind == "fp8":
        grid = rows // BLOCK, columns // BLOCK
        return {"values": ((rows, columns), "float8_e4m3fn"), "scale": (grid, "float32")}
    groups = columns // GROUP
    if kind == "int4":
        return {"values": ((rows, columns // 8), "int32"), "scale": ((rows, groups), "bfloat16")}
    if kind == "mxfp4":
        return {"values": ((rows, groups, 16), "uint8"), "scale": ((rows, groups), "uint8")}
    groups = columns // GROUP_OF_WORDS
    shape = (columns // 8, rows) if kind == "gptq" else (columns, rows // 8)
    zeros, scales = ((groups, rows // 8), "int32"), ((groups, rows), "float16")
    return {"values": (shape, "int32"), "zeros": zeros, "scale": scales}


def layout_of(kind: str, parts: dict[str, ParamSpec]) -> WeightLayout:
    if kind == "bf16":
        return WeightLayout.plain(parts["values"])
    if kind in PACKED_BY_US:
        return PACKED_BY_US[kind].place(parts, is_transposed=False)
    config = {"quant_method": kind, "bits": 4, "group_size": GROUP_OF_WORDS, "desc_act": False}
    (weight_format,) = find_format(config).weights
    return weight_format.place(parts, is_transposed=False)


def describe(sizes: Sizes) -> tuple[SlotMlp, ExpertLayout]:
    shapes = {
        "up": (2 * sizes.expert_width, sizes.width),
        "down": (sizes.width, sizes.expert_width),
    }
    layout = ExpertLayout.of(
        {
            f"{name} {role}": part
            for name, shape in shapes.items()
            for role, part in parts_of(sizes.kind, *shape).items()
        }
    )
    weights = []
    for name in shapes:
        parts = {
            spec.name.removeprefix(f"{name} "): spec
            for spec in layout.params
            if spec.name.startswith(f"{name} ")
        }
        weights.append(layout_of(sizes.kind, parts))
    mlp = slot_mlp(weights[:1], weights[1], activation=Activation("silu"))
    assert mlp is not None, sizes
    return mlp, layout


class Layers:
    """Experts in device memory and, again, in page-locked memory; and one step's routing."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, (self.mlp, layout) = sizes, describe(sizes)
        self.kernels = slot_kernels(CUDA)
        self.expert_bytes = layout.num_bytes
        num_slots = sizes.num_layers * sizes.num_experts
        shape = num_slots, layout.slot_bytes
        self.slots = torch.randint(0, 256, shape, dtype=torch.uint8, device=CUDA)
        self.host = self.slots.cpu().pin_memory()
        self.num_pairs = sizes.num_tokens * sizes.top_k
        self.table = DeviceTable(
            self.slots,
            num_layers=sizes.num_layers,
            num_experts=sizes.num_experts,
            max_pairs=max(self.num_pairs, MAX_PAIRS),
        )
        keys = [
            ExpertKey(layer, e)
            for layer in range(sizes.num_layers)
            for e in range(sizes.num_experts)
        ]
        at, step = self.host.data_ptr(), layout.slot_bytes
        self.table.upload_residency(
            {key: slot for slot, key in enumerate(keys)},
            {key: at + i * step for i, key in enumerate(keys)},
        )
        pairs = torch.rand(sizes.num_layers, sizes.num_tokens, sizes.num_experts).argsort(2)
        self.index_LTK = pairs[:, :, : sizes.top_k].contiguous().to(CUDA)
        cells = torch.arange(num_slots, device=CUDA).view(sizes.num_layers, sizes.num_experts)
        self.offsets_LE = cells * layout.slot_bytes
        self.x = torch.randn(sizes.num_tokens, sizes.width, device=CUDA).bfloat16()
        self.weights = torch.rand(sizes.num_tokens, sizes.top_k, device=CUDA)

    def step(self, *, machinery: bool = True, compute: bool = True) -> None:
        """All layers, all hits; without the machinery from pointers that are known."""
        pointers_LE = self.slots.data_ptr() + self.offsets_LE
        for moe_layer_idx, index_TK in enumerate(self.index_LTK):
            pointers_E = pointers_LE[moe_layer_idx]
            if machinery:
                pointers_E = self.kernels.resolve(self.table, moe_layer_idx, index_TK)
                self.kernels.fill(self.table, self.num_pairs)
            if compute:
                self._compute(index_TK, pointers_E)

    def _compute(self, index_TK: torch.Tensor, pointers_E: torch.Tensor) -> None:
        work = SlotWork(self.kernels, self.mlp, self.x, index_TK, self.weights)
        work.compute(pointers_E)
        work.sum()

    def resolve_missing(self) -> None:
        """Every pair takes a slot. Where experts are is not true any more."""
        self.table.slot_LE.fill_(ABSENT)
        for moe_layer_idx, index_TK in enumerate(self.index_LTK):
            self.kernels.resolve(self.table, moe_layer_idx, index_TK)

    def step_through_the_link(self) -> None:
        pointers_LE = self.host.data_ptr() + self.offsets_LE
        for index_TK, pointers_E in zip(self.index_LTK, pointers_LE, strict=True):
            self._compute(index_TK, pointers_E)

    def fill_all(self, num_missed: int) -> None:
        """So many misses in every layer."""
        copies_2E = self.table.copies_2E
        for index_TK, offsets_E in zip(self.index_LTK, self.offsets_LE, strict=True):
            offsets_P = offsets_E[index_TK.flatten()]
            copies_2E.zero_()
            copies_2E[0, :num_missed] = self.host.data_ptr() + offsets_P[:num_missed]
            copies_2E[1, :num_missed] = self.slots.data_ptr() + offsets_P[:num_missed]
            self.kernels.fill(self.table, self.num_pairs)


def captured_us(step: Callable[[], object], rounds: int) -> float:
    """Median time of a replay of `step`, captured in a CUDA graph."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles, and warms up what capture must not see
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times: list[float] = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LAUNCH_CYCLES)  # or the time to launch the graph would be in between
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def gbps(num_bytes: float, us: float) -> float:
    return num_bytes / us / 1e3


def ceilings(rounds: int) -> dict[str, float]:
    """What plain torch reads from device memory, and copies from page-locked memory, in GB/s."""
    memory = torch.zeros(COPY_BYTES // 4, device=CUDA)
    host = torch.zeros(COPY_BYTES // 4, pin_memory=True)
    read_us = captured_us(memory.sum, rounds)
    link_us = captured_us(lambda: memory.copy_(host, non_blocking=True), rounds)
    return {"read_gbps": gbps(COPY_BYTES, read_us), "link_gbps": gbps(COPY_BYTES, link_us)}


def time_machinery(layers: Layers, rounds: int) -> dict[str, float]:
    """Microseconds a layer of resolve and fill, all hits."""
    us = captured_us(lambda: layers.step(compute=False), rounds)
    return {"machinery_us": us / layers.sizes.num_layers}


def time_resident(layers: Layers, rounds: int, read_gbps: float) -> dict[str, float]:
    """Experts from known pointers, and how much of that speed a whole layer keeps."""
    alone_us = captured_us(lambda: layers.step(machinery=False), rounds)
    whole_us = captured_us(layers.step, rounds)
    found = gbps(layers.sizes.num_layers * layers.num_pairs * layers.expert_bytes, alone_us)
    return {
        "resident_us": alone_us / layers.sizes.num_layers,
        "resident_gbps": found,
        "resident_share": found / read_gbps,
        "layer_us": whole_us / layers.sizes.num_layers,
        "layer_share": alone_us / whole_us,
    }


def time_link(layers: Layers, rounds: int, link_gbps: float) -> dict[str, float]:
    """Copies by fill with one miss and with all pairs missed, and reading without a copy."""
    found_by_name: dict[str, float] = {}
    for name, num_missed in (("fill_one", 1), ("fill_all", layers.num_pairs)):
        us = captured_us(partial(layers.fill_all, num_missed), rounds)
        found = gbps(layers.sizes.num_layers * num_missed * layers.host.shape[1], us)
        found_by_name |= {f"{name}_gbps": found, f"{name}_share": found / link_gbps}
    us = captured_us(layers.step_through_the_link, rounds)
    found = gbps(layers.sizes.num_layers * layers.num_pairs * layers.expert_bytes, us)
    return found_by_name | {"through_gbps": found, "through_share": found / link_gbps}


def time_misses(layers: Layers, rounds: int) -> dict[str, float]:
    """Microseconds of resolve for each miss, which looks through all slots for one to take."""
    us = captured_us(layers.resolve_missing, rounds)
    return {"resolve_miss_us": us / (layers.sizes.num_layers * layers.num_pairs)}


def measure(sizes: Sizes, rounds: int) -> dict[str, float]:
    """Everything, by name."""
    found = ceilings(rounds)
    layers = Layers(sizes)
    found |= time_machinery(layers, rounds)
    found |= time_resident(layers, rounds, found["read_gbps"])
    found |= time_link(layers, rounds, found["link_gbps"])
    return found | time_misses(layers, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="bf16")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    found = measure(Sizes(kind=args.kind, num_tokens=args.tokens), args.rounds)
    for name, value in found.items():
        print(f"{name:18}{value:12.3f}")
    device = torch.cuda.get_device_name()
    conditions = {"benchmark": "gpu_kernels", "device": device, "torch": torch.__version__}
    print(json.dumps(conditions | vars(args) | {k: round(v, 4) for k, v in found.items()}))


if __name__ == "__main__":
    main()
