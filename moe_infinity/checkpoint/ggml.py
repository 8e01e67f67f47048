"""Weights in GGML's block formats, as GGUF files have them.

A weight [R, C] is one run of bytes: its rows one after the other, each a sequence of blocks that
have their scales inside. Names are those of gguf.GGMLQuantizationType in lower case.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_infinity.checkpoint.layout import Block, Parts, WeightLayout
from moe_infinity.experts import ParamSpec

# Weights of a block, bytes of a block.
BLOCKS = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176),
    "q6_k": (256, 210), "iq4_nl": (32, 18), "iq4_xs": (256, 136), "mxfp4": (32, 17),
    "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66), "iq2_xs": (256, 74),
    "iq2_s": (256, 82), "iq3_xxs": (256, 98), "iq3_s": (256, 110), "tq1_0": (256, 54),
    "tq2_0": (256, 66), "nvfp4": (64, 36),
}  # fmt: skip


def blocks_layout(name: str, shape_RC: tuple[int, int], values: ParamSpec) -> WeightLayout:
    """The layout of a weight [R, C] whose bytes are `values`, uint8 [R, bytes of a row]."""
    kind = "ggml_mxfp4" if name == "mxfp4" else name  # "mxfp4" has its scales apart
    return WeightLayout(kind, shape_RC, values, unpack=partial(_unpack, name))


def row_bytes(name: str, num_columns: int) -> int:
    """Of a row of so many columns, a multiple of the block's weights."""
    weights, num_bytes = BLOCKS[name]
    return num_columns // weights * num_bytes


def _unpack(name: str, parts: Parts, block: Block | None, dtype: torch.dtype) -> Tensor:
    """By gguf's definition. transformers has the same bits from torch for some types, and twice to
    ten times as fast (private name used: `dequantize`).
    """
    from gguf import GGMLQuantizationType, quants
    from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

    values = parts["values"]
    kind = GGMLQuantizationType[name.upper()]
    if kind in GGML_BLOCK:
        found: Tensor = dequantize(values, kind).view(*values.shape[:-1], -1)
    else:
        found = torch.from_numpy(quants.dequantize(values.cpu().numpy(), kind))
    return found.to(values.device, dtype)
