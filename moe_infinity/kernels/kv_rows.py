"""Keys and values in 8 bits a number: what one head has of one token is a row with a scale.

    row     d codes of a byte each, and their scale, a float32
    int8    code x scale, the largest magnitude of a row being 127 x scale
    fp8     the same with float8_e4m3fn, and 448

A row depends on its own numbers alone: not on its neighbours, nor on when it is packed. This is the
reference of kernels/cpu/put_row.py, which gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_infinity.kernels.unpack import fp8_bits_as_half

LARGEST = {"int8": 127.0, "fp8": 448.0}  # code, by kv_dtype
SCALE_BYTES = 4
LEAST_SCALE = torch.finfo(torch.float32).tiny  # of a row of zeros, whose codes are zeros


def packed_rows(x: Tensor, kv_dtype: str) -> Tensor:
    """[..., d] -> uint8 [..., d + SCALE_BYTES]. What is not finite makes its whole row NaN."""
    numbers = x.to(torch.float32)
    scale = numbers.abs().amax(-1, keepdim=True).div_(LARGEST[kv_dtype]).clamp_(min=LEAST_SCALE)
    units = numbers / scale
    codes = units.round_().to(torch.int8) if kv_dtype == "int8" else units.to(torch.float8_e4m3fn)
    return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def unpacked_rows(rows: Tensor, kv_dtype: str, dtype: torch.dtype) -> Tensor:
    """The numbers of `packed_rows`, [..., d], multiplied in float32 and rounded once."""
    width = rows.shape[-1] - SCALE_BYTES
    codes = rows[..., :width]
    scale = rows[..., width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    if kv_dtype == "int8":
        numbers = codes.view(torch.int8).to(torch.float32).mul_(scale)
    else:
        numbers = fp8_bits_as_half(codes).to(torch.float32).mul_(scale * 2.0**8)
    return numbers.to(dtype)
