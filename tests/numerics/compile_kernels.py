"""Compiles the kernels for a GPU that need not be there, and prints what their loads are like.

TRITON_INTERPRET=0 python -m tests.numerics.compile_kernels 80     # compute capability 8.0
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu_kernels import KINDS, Sizes, describe
from moe_infinity.kernels import triton_experts, triton_resolve
from moe_infinity.kernels.slot_mlp import ACTIVATIONS, Part, SlotMlp

POINTERS = {
    "index_P": "*i64", "slot_LE": "*i32", "host_LE": "*i64", "address_S": "*i64", "free_S": "*i32",
    "num_free": "*i64", "head": "*i32", "uses_LE": "*i32", "routing_LP": "*i32", "log_N3": "*i32",
    "pointers_P": "*i64", "sources_P": "*i64", "x_TD": "*bf16", "hidden_PF": "*fp32",
    "weights_P": "*fp32", "out_TD": "*bf16",
}  # fmt: skip
NUMBERS = {"moe_row": "i32", "num_pairs": "i32", "num_loads": "i32"}


def loads_of(kernel: Any, capability: int, num_warps: int, **constants: object) -> dict[str, int]:
    """How many loads from global memory there are in the code of one thread, by width in bits."""
    names = list(kernel.arg_names)
    signature = {name: (POINTERS | NUMBERS).get(name, "constexpr") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS},
    )
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": num_warps}
    ptx = triton.compile(source, target=target, options=options).asm["ptx"]
    found = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    return Counter(str(int(count or 1) * int(bits)) for count, bits in found)


def loads_of_up(mlp: SlotMlp, capability: int) -> dict[str, int]:
    rows, chunks = triton_experts.tile_of(mlp.gate, triton_experts.UP_LOADS)
    return loads_of(
        triton_experts._up, capability, triton_experts.UP_WARPS,
        GATE=mlp.gate, UP=mlp.up, ACTIVATION=mlp.activation, ALPHA=mlp.alpha, LIMIT=mlp.limit,
        TOP_K=8, ROWS=rows, CHUNKS=chunks,
    )  # fmt: skip


def loads_of_down(mlp: SlotMlp, capability: int) -> dict[str, int]:
    rows, chunks = triton_experts.tile_of(mlp.down, triton_experts.DOWN_LOADS)
    return loads_of(
        triton_experts._down, capability, triton_experts.DOWN_WARPS,
        DOWN=mlp.down, TOP_K=8, ROWS=rows, CHUNKS=chunks,
    )  # fmt: skip


def main() -> None:
    capability, told = int(sys.argv[1]), {}
    for block, warps in ((16, 1), (64, 4)):
        told[f"resolve {block}"] = loads_of(
            triton_resolve._resolve, capability, warps,
            NUM_EXPERTS=128, MAX_PAIRS=block, MAX_MISSES=384, BLOCK=block,
        )  # fmt: skip
    told["fill"] = loads_of(triton_resolve._fill, capability, 4, BLOCK=1024, NUM_PROGRAMS=64)
    known = {kind: describe(Sizes(kind=kind))[0] for kind in KINDS}
    for kind, mlp in known.items():
        told[f"up {kind}"] = loads_of_up(mlp, capability)
        told[f"down {kind}"] = loads_of_down(mlp, capability)
    bias, zeros, exponents = Part(0, "bfloat16"), Part(0, "int32"), Part(0, "uint8")
    more = {act: replace(known["bf16"], activation=act) for act in ACTIVATIONS}
    more["bias"] = replace(known["mxfp4"], gate=replace(known["mxfp4"].gate, bias=bias))
    more["zeros"] = replace(known["int4"], gate=replace(known["int4"].gate, zeros=zeros))
    more["e8m0"] = replace(known["fp8"], gate=replace(known["fp8"].gate, scale=exponents))
    for name, mlp in more.items():
        told[f"up with {name}"] = loads_of_up(mlp, capability)
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
