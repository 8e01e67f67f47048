"""Decides which code multiplies the rows of a pass with weights that are stored as they are.

    FEW       rows.py     a weight is decoded anew for every few rows: reading it is what takes time
    PANELS    panels.py   it is decoded once, to float32, a panel at a time
    HALF_PANELS           the same to bfloat16, where the processor multiplies that
    WIDENED   widened.py  it is decoded once, to bfloat16, and torch multiplies matrices (AMX)

GFLOP/s of [rows, 2048] x [2048, 1536], one core:

    rows                             8   16   32   64  128  512
    AVX-512   FEW, bf16             50   67   85   98  104  104
              FEW, q4_k             55   64   69   71   71   71
              PANELS, q4_k          43   63  100  111  125  115

of one core with AVX512-BF16 (Zen 4), q4_k:

    rows                             2    4    8   32  512
              FEW                   76   84   84   84    -
              PANELS                30   50   67   92   98
              HALF_PANELS           37   64   98  162  185

and of two (Zen 5), bf16 weights:

    rows                             1    8   16   38   64  600
              FEW                   47  270  330  400  415  430
              torch, bf16 products  28  210  350  550  650  880
"""

from __future__ import annotations

import math
from enum import Enum
from functools import cache

import torch

from moe_infinity.kernels.cpu.compiler import multiplies_bfloat16

MOST_TOKENS = 64  # of a forward pass; no longer one is computed otherwise than decode steps are
MEAN_ROWS = 12  # of an expert; as far as FEW is faster than PANELS
MEAN_ROWS_HALF = 4  # and than HALF_PANELS
MEAN_ROWS_WIDENED = 32  # of an expert; as far as writing the widened weight takes longer
MOST_TOKENS_UNPACKED = 512  # of a weight that torch unpacks: that takes as long as 600 rows


class RowPath(str, Enum):
    """How our kernels multiply."""

    FEW = "few"
    PANELS = "panels"
    HALF_PANELS = "half panels"
    WIDENED = "widened"


PANEL_PATHS = RowPath.PANELS, RowPath.HALF_PANELS


def row_path(num_tokens: int, dtype: torch.dtype, mean_rows: float = math.inf) -> RowPath:
    """The path of weights that kernels read. This depends on the number of tokens of a pass, not on
    how many of them an expert gets; otherwise a token's bits would depend on where other tokens go.
    An expert gets `mean_rows` on average.
    """
    is_bfloat16 = dtype == torch.bfloat16
    if num_tokens <= MOST_TOKENS:
        return RowPath.FEW
    if is_bfloat16 and mean_rows > MEAN_ROWS_WIDENED and has_products_of_matrices():
        return RowPath.WIDENED
    if is_bfloat16 and multiplies_bfloat16():
        return RowPath.HALF_PANELS if mean_rows > MEAN_ROWS_HALF else RowPath.FEW
    return RowPath.PANELS if mean_rows > MEAN_ROWS else RowPath.FEW


def is_for_torch(
    num_tokens: int,
    dtype: torch.dtype,
    mean_rows: float = math.inf,
    *,
    most_tokens: int = MOST_TOKENS,
) -> bool:
    """True if torch is to multiply in the dtype of the model, for weights that RowPath is not for:
    those that are not packed and, with `most_tokens`, those that only torch unpacks.
    """
    is_long = num_tokens > most_tokens and mean_rows > MEAN_ROWS
    return is_long and dtype == torch.bfloat16 and has_products_of_bfloat16()


@cache
def has_products_of_bfloat16() -> bool:
    """True with AVX512-BF16 or AMX. Without them torch multiplies such numbers forty times more
    slowly.
    """
    knows_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    has_pairs: bool = knows_avx512 and torch.cpu._is_avx512_bf16_supported()
    return has_pairs or has_products_of_matrices()


@cache
def has_products_of_matrices() -> bool:
    """True if torch multiplies matrices of bfloat16 with AMX."""
    knows_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return knows_avx512 and torch.cpu._is_amx_tile_supported()
