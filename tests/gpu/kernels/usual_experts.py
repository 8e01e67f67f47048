"""Experts as published checkpoints store them, in the sizes of Qwen3-30B-A3B."""

from __future__ import annotations

from moe_infinity.experts import ExpertLayout, ParamSpec
from moe_infinity.formats.float_formats import NVFP4
from moe_infinity.formats.methods import PACKED_BY_US, find_format
from moe_infinity.gpu.kernels.packed_matrix import any_matrix
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.triton.slot_mlp import SlotMlp, slot_mlp
from moe_infinity.layout import WeightLayout

KINDS = ("bf16", "int8", "fp8", "int4", "mxfp4", "nvfp4", "gptq", "awq")
WIDTH, EXPERT_WIDTH = 2048, 768
GROUP, BLOCK = 32, 128  # columns that share a scale: of nibbles, and of fp8 with as many rows
GROUP_OF_WORDS = 128  # of gptq and awq, as most are published


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
    if kind == "nvfp4":
        return {
            "values": ((rows, columns // 2), "uint8"),
            "scale": ((rows, columns // 16), "float8_e4m3fn"),
            "global_scale": ((), "float32"),
        }
    groups = columns // GROUP_OF_WORDS
    shape = (columns // 8, rows) if kind == "gptq" else (columns, rows // 8)
    zeros, scales = ((groups, rows // 8), "int32"), ((groups, rows), "float16")
    return {"values": (shape, "int32"), "zeros": zeros, "scale": scales}


def layout_of(kind: str, parts: dict[str, ParamSpec]) -> WeightLayout:
    if kind == "bf16":
        return WeightLayout.plain(parts["values"])
    if kind in PACKED_BY_US:
        return PACKED_BY_US[kind].layout_of(parts, is_transposed=False)
    if kind == "nvfp4":
        return NVFP4.layout_of(parts, is_transposed=False)
    config = {"quant_method": kind, "bits": 4, "group_size": GROUP_OF_WORDS, "desc_act": False}
    (weight_format,) = find_format(config).weights
    return weight_format.layout_of(parts, is_transposed=False)


def mlp_of(kind: str) -> SlotMlp:
    """How kernels read an expert."""
    shapes = {"up": (2 * EXPERT_WIDTH, WIDTH), "down": (WIDTH, EXPERT_WIDTH)}
    layout = ExpertLayout.of(
        {
            f"{name} {role}": part
            for name, shape in shapes.items()
            for role, part in parts_of(kind, *shape).items()
        }
    )
    up, down = (
        layout_of(
            kind,
            {
                spec.name.removeprefix(f"{name} "): spec
                for spec in layout.params
                if spec.name.startswith(f"{name} ")
            },
        )
        for name in shapes
    )
    mlp = slot_mlp([up], down, activation=Activation("silu"), matrix_of=any_matrix)
    assert mlp is not None, kind
    return mlp
