"""Weights that are floats of 8 or 4 bits, with scales beside them.

    fp8     float8_e4m3fn, a scale per block, row, tensor or 32 columns
    mxfp4   two values of 4 bits (e2m1) to a byte, an exponent of two per 32 columns
    nvfp4   the same values, a float8_e4m3fn per 16 columns and one float32 for all

Of two values in a byte, the lower bits are the first column. methods.py says which checkpoint has
which. The arithmetic is in kernels/unpack.py.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from moe_infinity.checkpoint.packing import PartFormat, PartShapes, Shape, WeightFormat
from moe_infinity.kernels import unpack
from moe_infinity.layout import GROUP_OF_MXFP4, GROUP_OF_NVFP4, Block, Parts

FLOATS = frozenset({"BF16", "F16", "F32"})
FLOAT8 = frozenset({"F8_E4M3"})
BYTES = frozenset({"U8"})
PAIRS = frozenset({"U8", "I8"})  # of two values
EXPONENTS = frozenset({"U8", "F8_E8M0"})
OF_ACTIVATIONS = (
    "input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale",
    "output_zero_point", "k_scale", "v_scale", "kv_scale", "qscale_act", "input_scale_ub",
)  # fmt: skip

Measured = tuple[Shape, Block | None] | None  # see WeightFormat.measure


def fp8_format(
    scale: str, blocks: list[Block], *, suffix: str = "", name: str = "fp8"
) -> WeightFormat:
    """The format of float8 values whose scales' names end in `scale`, where those of the values end
    in `suffix`. `blocks` are the sizes that the checkpoint says to have.
    """

    def measure(shapes: PartShapes) -> Measured:
        block = find_block(shapes["values"], shapes["scale"], blocks)
        return (shapes["values"], block) if block else None

    parts = PartFormat("values", suffix, FLOAT8), PartFormat("scale", scale, FLOATS | EXPONENTS)
    return WeightFormat(
        name, "fp8", parts, measure, _unpack_fp8, ignored=OF_ACTIVATIONS, weight_suffix=suffix
    )


def _unpack_fp8(parts: Parts, block: Block | None, dtype: torch.dtype) -> Tensor:
    assert block is not None  # `measure` has found it
    values = parts["values"]
    grid = [-(-size // step) for size, step in zip(values.shape, block, strict=True)]
    return unpack.fp8(values, parts["scale"].view(grid), block, dtype)


def find_block(shape: Shape, grid: Shape, configured: list[Block]) -> Block | None:
    """Rows and columns that share a scale, the last of them possibly cut off by the edge: as
    configured, or a row or the whole; if nothing is configured equal parts, as transformers takes
    them. Scales [n] are of n runs of rows: each row, or gate and up. ModelOpt writes scales of
    blocks as [r, 1, c, 1].
    """
    if prod(grid) == 1:
        return shape[0], shape[1]
    if len(grid) == 1 and 0 not in (*grid, *shape) and shape[0] % grid[0] == 0:
        return shape[0] // grid[0], shape[1]
    if len(grid) == 4 and grid[1::2] == (1, 1):
        grid = grid[::2]
    if len(grid) != 2 or 0 in grid or 0 in shape:
        return None
    for block in configured:
        if grid == (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
            return block
    if configured and grid != (shape[0], 1):
        return None
    if shape[0] % grid[0] or shape[1] % grid[1]:
        return None
    return shape[0] // grid[0], shape[1] // grid[1]


# 4 bits


def mxfp4_format(suffix: str, scale: str) -> WeightFormat:
    """The format of pairs [R, C / 2] whose names end in `suffix`, beside exponents [R, C / 32]
    whose names end in `scale`.
    """
    return WeightFormat(
        "mxfp4",
        "mxfp4",
        (PartFormat("values", suffix, PAIRS), PartFormat("scale", scale, EXPONENTS)),
        lambda shapes: _measure_pairs(shapes, GROUP_OF_MXFP4),
        lambda parts, _, dtype: unpack.fp4(parts["values"], parts["scale"], None, dtype),
        ignored=OF_ACTIVATIONS,
        weight_suffix=suffix if suffix == ".weight" else "",
    )


def _measure_pairs(shapes: PartShapes, group: int) -> Measured:
    num_rows, num_bytes = shapes["values"]
    fits = shapes["scale"] == (num_rows, 2 * num_bytes // group) and 2 * num_bytes % group == 0
    return ((num_rows, 2 * num_bytes), (1, group)) if fits and num_bytes else None


def _measure_nvfp4(shapes: PartShapes) -> Measured:
    return _measure_pairs(shapes, GROUP_OF_NVFP4) if prod(shapes["global_scale"]) == 1 else None


# ModelOpt multiplies by the global scale.
NVFP4 = WeightFormat(
    "nvfp4",
    "nvfp4",
    (
        PartFormat("values", "", PAIRS),
        PartFormat("scale", "_scale", FLOAT8),
        PartFormat("global_scale", "_scale_2", frozenset({"F32"})),
    ),
    _measure_nvfp4,
    lambda p, _, dtype: unpack.fp4(p["values"], p["scale"], p["global_scale"], dtype),
    ignored=OF_ACTIVATIONS,
)

# compressed-tensors divides by it.
NVFP4_PACKED = WeightFormat(
    "nvfp4-pack-quantized",
    "nvfp4_divided",
    (
        PartFormat("values", "_packed", PAIRS),
        PartFormat("scale", "_scale", FLOAT8),
        PartFormat("global_scale", "_global_scale", frozenset({"F32"})),
    ),
    _measure_nvfp4,
    lambda p, _, dtype: unpack.fp4(
        p["values"], p["scale"], p["global_scale"], dtype, is_divided=True
    ),
    ignored=("weight_shape", *OF_ACTIVATIONS),
)


def _measure_mxfp4_of_gpt_oss(shapes: PartShapes) -> Measured:
    num_rows, num_groups, num_bytes = shapes["values"]
    fits = shapes["scale"] == (num_rows, num_groups) and num_bytes == 16
    return ((num_rows, 32 * num_groups), (1, 32)) if fits else None


# gpt-oss as published: _blocks [E, R, G, 16] and _scales [E, R, G] give [E, 32 G, R].
MXFP4_OF_GPT_OSS = WeightFormat(
    "mxfp4",
    "mxfp4",
    (PartFormat("values", "_blocks", BYTES), PartFormat("scale", "_scales", BYTES)),
    _measure_mxfp4_of_gpt_oss,
    lambda parts, _, dtype: unpack.mxfp4(parts["values"], parts["scale"], dtype).t(),
    num_dims=3,
    is_transposed=True,
)
