"""Compiles the kernels for a GPU that need not be there, as their callers launch them, and prints
what they are like.

    TRITON_INTERPRET=0 python -m tests.gpu.kernels.compile_kernels 80  # capability 8.0
    TRITON_INTERPRET=0 python -m tests.gpu.kernels.compile_kernels 80 around_experts
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moe_infinity.experts import ParamSpec
from moe_infinity.gpu.device_table import DeviceTable
from moe_infinity.gpu.kernels import kernels_for
from moe_infinity.gpu.kernels.descriptions import (
    FORMS,
    WEIGHTS,
    CachedLayer,
    ExpertChoice,
    Heads,
)
from moe_infinity.gpu.kernels.packed_matrix import PackedMatrix, any_matrix
from moe_infinity.kernels.reference import FUNCTIONS, Activation
from moe_infinity.kernels.triton.slot_mlp import Matrix, SlotMlp
from moe_infinity.kernels.unpack import blocks_layout, row_bytes
from tests.gpu.kernels.compiled import AbsentGpu
from tests.gpu.kernels.usual_experts import KINDS, mlp_of
from tests.kernels.triton.slot_experts import slot_moe

LABEL, INSTRUCTION = r"^(\.L_x_\d+):", r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)(.*)"


KERNELS = kernels_for(torch.device("cuda"))
PLAIN_KINDS = ("bf16", "transposed", "limited")  # compiled for tiles of both sizes
# Heads of queries and of the cache, columns of a key and of a value.
ATTENTION: tuple[tuple[str, tuple[int, int], int, int], ...] = (
    ("qwen3", (32, 4), 128, 128),
    ("gpt-oss", (64, 8), 64, 64),
    ("deepseek", (16, 16), 192, 128),
    ("gemma", (8, 4), 256, 256),
    ("latent", (16, 1), 576, 512),
    ("phi", (32, 8), 96, 96),
)


class Compiler:
    """Stands for launching."""

    def __init__(self) -> None:
        self.told: dict[str, dict[str, Any]] = {}  # of the code of one thread, by kernel and model
        self.name = ""

    def launcher(self, kernel: Any, grid: Any) -> Callable[..., None]:
        def compile_only(*args: Any, **options: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            asm = compiled.asm
            found = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", asm["ptx"])
            widths = Counter(str(int(count or 1) * int(bits)) for count, bits in found)
            told = {"loads": widths, "fuses": options.get("enable_fp_fusion")}
            told["multiplies_matrices"] = "mma" in asm["ptx"]
            told["loads_ahead"] = "cp.async" in asm["ptx"]
            copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^,]*, [^,]*, (\w+)", asm["ptx"])
            told["copied_bytes"] = sorted({int(size, 0) for size in copies})
            told["shared_bytes"] = compiled.metadata.shared
            told["spills"] = bool(re.search(r"\.local\b", asm["ptx"]))
            name = kernel.fn.__name__.strip("_")
            if "TILE" in options:
                name += f" {options['TILE']}"
            told["threads"] = 32 * compiled.metadata.num_warps
            if (mlp := options.get("MLP")) is not None:
                num_matrices = 1 + (name.startswith("up") and mlp.up is not None)
                tile = options["ROWS"] * options["COLUMNS"] * num_matrices
                told["instructions"] = longest_loop(asm["cubin"]) / (tile / told["threads"])
            else:
                loops, _ = instructions(asm["cubin"])
                products = [len(loop) for loop in loops if "HMMA" in loop]
                told["instructions"] = min(products, default=longest_loop(asm["cubin"]))
                told["has_loop"] = any(len(loop) > 1 for loop in loops)
            self.told[f"{name} {self.name}".strip()] = told

        return compile_only


def longest_loop(cubin: bytes) -> int:
    """Its instructions; all where there is none."""
    loops, num_instructions = instructions(cubin)
    longest = max(map(len, loops), default=0)
    return longest if longest > 1 else num_instructions


def instructions(cubin: bytes) -> tuple[list[list[str]], int]:
    """Those of each loop, and how many there are in all."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names, labels, loops = list[str](), dict[str, int](), list[list[str]]()
    for line in code.splitlines():
        if label := re.match(LABEL, line):
            labels[label[1]] = len(names)
        elif one := re.match(INSTRUCTION, line):
            names.append(one[1])
            target = re.search(r"\.L_x_\d+", one[2])
            if one[1] == "BRA" and target and (first := labels.get(target[0])) is not None:
                loops.append(names[first:])
    return loops, len(names) - names.count("NOP")


def with_weight(matrix: Matrix, **changed: Any) -> Matrix:
    return replace(matrix, weight=replace(matrix.weight, **changed))


def in_blocks(matrix: Matrix, name: str) -> Matrix:
    """The same in one of GGML's formats."""
    rows, columns = matrix.weight.shape
    values = ParamSpec("values", (rows, row_bytes(name, columns)), "uint8", 0)
    found = any_matrix(blocks_layout(name, (rows, columns), values))
    assert isinstance(found, PackedMatrix)
    return replace(found, num_rows=matrix.num_rows, first_row=matrix.first_row)


def compute(mlp: SlotMlp, num_tokens: int = 1, top_k: int = 8) -> None:
    x_TD = torch.zeros(num_tokens, mlp.down.num_rows).bfloat16()
    index_TK = torch.zeros(num_tokens, top_k, dtype=torch.int64)
    pointers_E = torch.zeros(128, dtype=torch.int64)
    slot_moe(KERNELS.pairs, mlp, x_TD, index_TK, torch.zeros(num_tokens, top_k), pointers_E)


def resolve(num_pairs: int) -> None:
    """An odd number of 16 bytes."""
    slots = torch.zeros(2, 16 * 1001, dtype=torch.uint8)
    table = DeviceTable(slots, num_layers=2, num_experts=4, max_pairs=128)
    index_TK = torch.zeros(1, num_pairs, dtype=torch.int64)
    KERNELS.resolve(table, 1, index_TK)
    KERNELS.fill(table, num_pairs)


def attend_to(heads: tuple[int, int], width: int, value_width: int) -> None:
    """Heads of queries and of the cache."""
    num_heads, num_groups = heads
    query = torch.zeros(2, num_heads, width).bfloat16()
    key = torch.zeros(2, num_groups, width).bfloat16()
    value = torch.zeros(2, num_groups, value_width).bfloat16()
    cached = torch.zeros(len(CachedLayer._fields), dtype=torch.int64)
    KERNELS.attend(query, key, value, cached, None, scale=0.1, window=None, softcap=None)


def attend_to_latents() -> None:
    """As DeepSeek-V3 has them, of 16 heads."""
    query, rotated = torch.zeros(2, 16, 512).bfloat16(), torch.zeros(2, 16, 64).bfloat16()
    latent, key = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 64).bfloat16()
    cached = torch.zeros(len(CachedLayer._fields), dtype=torch.int64)
    KERNELS.attend_latent(query, rotated, latent, key, cached, scale=0.1)


def turn(heads: Heads) -> None:
    width = heads.num_heads * heads.query_width
    columns = torch.zeros(2, width + heads.num_groups * heads.key_width).bfloat16()
    norm = torch.zeros(heads.normed_key or heads.query_width).bfloat16()
    angle = torch.zeros(2, heads.rotated // 2)
    query_norm = None if heads.normed_key else norm
    KERNELS.make_heads(columns, columns[:, width:], query_norm, norm, angle, angle, heads)


def route(choice: ExpertChoice, num_experts: int) -> None:
    logits = torch.zeros(2, num_experts).bfloat16()
    correction = torch.zeros(num_experts) if choice.scores == "sigmoid" else None
    KERNELS.choose(logits, correction, choice)


def of_experts(compiler: Compiler) -> None:
    known = {kind: mlp_of(kind) for kind in KINDS}
    more = {name: replace(known["bf16"], activation=Activation(name)) for name in FUNCTIONS}
    limited = Activation("silu", alpha=1.702, shift=1.0, limit=7.0)
    more["limited"] = replace(known["bf16"], activation=limited)
    more["no gate"] = replace(known["bf16"], up=None, activation=Activation("relu2", False))
    bf16 = known["bf16"]
    assert bf16.up is not None
    turned = (with_weight(m, is_transposed=True) for m in (bf16.gate, bf16.up, bf16.down))
    gate, up, down = turned
    more["transposed"] = replace(bf16, gate=gate, up=up, down=down, weighs_input=True)
    gptq = known["gptq"]
    columns = gptq.gate.num_columns
    any_order = with_weight(gptq.gate, groups=ParamSpec("", (columns,), "int32", 0))
    more["gptq any"] = replace(gptq, gate=any_order, up=any_order)
    bias = ParamSpec("", (known["mxfp4"].gate.weight.shape[0],), "bfloat16", 0)
    more["bias"] = replace(known["mxfp4"], gate=replace(known["mxfp4"].gate, bias=bias))
    int4 = known["int4"].gate
    assert isinstance(int4, PackedMatrix)
    rows, num_groups = int4.weight.shape[0], int4.num_scale_columns
    zeros = ParamSpec("", (-(-rows // 8), num_groups), "int32", 0)
    more["zeros"] = replace(known["int4"], gate=with_weight(int4, zeros=zeros))
    for name in ("q8_0", "q4_k", "q6_k", "mxfp4"):
        gate, down = (in_blocks(matrix, name) for matrix in (bf16.gate, bf16.down))
        more[f"ggml {name}"] = replace(bf16, gate=gate, up=gate, down=down)
    scale = known["fp8"].gate.weight.scale
    assert scale is not None
    exponents = with_weight(known["fp8"].gate, scale=replace(scale, dtype="uint8"))
    more["e8m0"] = replace(known["fp8"], gate=exponents)
    for compiler.name, mlp in (known | more).items():
        for num_tokens in (1, 2048) if compiler.name in PLAIN_KINDS else (1,):
            compute(mlp, num_tokens)


def around_experts(compiler: Compiler) -> None:
    for num_pairs in (8, 64, 128):
        resolve(num_pairs)
    for form in FORMS:
        x, weight = torch.zeros(2, 2048).bfloat16(), torch.zeros(2048).bfloat16()
        KERNELS.rms_norm(x, weight, 1e-6, form)
        compiler.name = "of a sum"
        KERNELS.add_rms_norm(x, (x, x), weight, 1e-6, form)
        compiler.name = ""
    KERNELS.gated(torch.zeros(2, 2816).bfloat16(), Activation())
    for compiler.name, heads, width, value_width in ATTENTION:
        attend_to(heads, width, value_width)
    compiler.name = "deepseek-v3"
    attend_to_latents()
    usual = Heads(32, 4, 128, 128, 128, 0, 0, "halves", "rounded twice", 1e-6, 1e-6)
    latent = Heads(
        16, 1, 192, 576, 64, 128, 512, "neighbours", "rounded twice", 1e-6, 1e-6, normed_key=512
    )
    for compiler.name, shape in (("qwen3", usual), ("deepseek-v2", latent)):
        turn(shape)
    of_groups = ExpertChoice(8, "sigmoid", WEIGHTS[1], num_groups=8, kept_groups=4)
    for compiler.name, choice in (("qwen3", ExpertChoice(8)), ("deepseek-v3", of_groups)):
        route(choice, 256)


def main() -> None:
    compiler = Compiler()
    driver.set_active(AbsentGpu(int(sys.argv[1])))
    JITFunction.__getitem__ = lambda kernel, grid: compiler.launcher(kernel, grid)
    for part in (around_experts, of_experts):
        if sys.argv[2:] in ([], [part.__name__]):
            part(compiler)
    sys.stdout.write(json.dumps(compiler.told))


if __name__ == "__main__":
    main()
