"""Decides which code multiplies many rows with weights that are stored as they are: our kernels in
float32, or torch in the dtype of the weights.

GFLOP/s of [rows, 2048] x [2048, 1536], two cores, bf16 weights:

    rows                           1    8   16   38   64  600
    Zen 5, ours                   47  270  330  400  415  430
           torch, bf16 products   28  210  350  550  650  880
"""

from __future__ import annotations

import math
from functools import cache

import torch

MOST_TOKENS = 64  # of a forward pass; no longer one goes to torch
MOST_TOKENS_PACKED = 512  # for a packed weight: to unpack it takes as long as 600 rows of ours
MEAN_ROWS = 12  # of an expert; as far as ours are faster


def is_for_torch(
    num_tokens: int,
    dtype: torch.dtype,
    mean_rows: float = math.inf,
    *,
    is_packed: bool = False,
) -> bool:
    """True if torch is to multiply. This depends on the number of tokens of a pass, not on how many
    of them an expert gets; otherwise a token's bits would depend on where other tokens go. An
    expert gets `mean_rows` on average.
    """
    most = MOST_TOKENS_PACKED if is_packed else MOST_TOKENS
    is_long = num_tokens > most and mean_rows > MEAN_ROWS
    return is_long and dtype == torch.bfloat16 and has_products_of_bfloat16()


@cache
def has_products_of_bfloat16() -> bool:
    """True with AVX512-BF16 or AMX. Without them torch multiplies such numbers forty times more
    slowly.
    """
    knows_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return knows_avx512 and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
