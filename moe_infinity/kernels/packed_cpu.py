"""Products with packed expert weights, read where they lie: for the few rows of a decode step.

    row formats     int8, fp8, int4_rows, mxfp4    packed_rows.py: along a row, 64 bytes at a step
    word formats    gptq, awq                      packed_words.py: along the outputs

Every function gives x_TC times the transpose of the weight [R, C]: [T, R] in the dtype of x, with
products and sums in float32. What the bits mean is told, and computed the plain way, in unpack.py;
shapes that no model has (groups that fit no step, few columns, g_idx in disorder) go that way here,
too. One difference: the two NaN of float8 count as 480 and -480, and scales that are bytes must be
1 to 254.

Decoding is what it costs, so it is three instructions per 16 nibbles: they are masked where they
lie and converted, which leaves them 16 ** k too large, and x is divided by that beforehand; zeros
take from a group the sum of its x. Float8 and mxfp4 become float16 by moving bits.

Legend: T tokens, R rows (outputs), C columns (inputs), G groups of columns, W words of 8 nibbles.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.kernels import unpack
from moe_infinity.kernels.stored import WORDS

try:
    from moe_infinity.kernels import packed_rows
    from moe_infinity.kernels.packed_words import BLOCK_ROWS
    from moe_infinity.kernels.row_steps import arranged, fixed_for, step_for
except ImportError as error:
    raise ImportError(
        "moe_infinity.kernels.packed_cpu needs numba, which is not installed\n"
        "hint: pip install 'moe-infinity[cpu]'"
    ) from error

PIECES = 4  # per thread, so that one that starts late finds less left to do
MIN_SHARED_BYTES = 4 << 20  # a weight of 1.5 MB took longer shared: 0.33 ms instead of 0.29
Call = Callable[[int, int], None]


def int8(x_TC: Tensor, weight_RC: Tensor, scales_R1: Tensor) -> Tensor:
    """compressed-tensors int-quantized, symmetric, one scale per row."""
    out_TR = _product("int8", x_TC, weight_RC, scales_R1, (1, weight_RC.shape[1]))
    if out_TR is None:
        return _plain(x_TC, weight_RC.to(torch.float32) * scales_R1.to(torch.float32))
    return out_TR


def fp8(x_TC: Tensor, weight_RC: Tensor, scales_rc: Tensor, block: tuple[int, int]) -> Tensor:
    """float8_e4m3fn with one scale per block [rows, columns]; see unpack.fp8."""
    if scales_rc.dtype == torch.float8_e8m0fnu:
        scales_rc = scales_rc.view(torch.uint8)
    if scales_rc.dim() != 2:
        scales_rc = scales_rc.reshape(1, 1)
    out_TR = _product("fp8", x_TC, weight_RC, scales_rc, block)
    if out_TR is None:
        return _plain(x_TC, unpack.fp8(weight_RC, scales_rc, block, torch.float32))
    return out_TR


def int4_rows(
    x_TC: Tensor, packed_RW: Tensor, scales_RG: Tensor, zeros_WG: Tensor | None = None
) -> Tensor:
    """compressed-tensors pack-quantized; see unpack.int4_rows. Not rounded to the scale's dtype."""
    group = unpack.NIBBLES * packed_RW.shape[1] // scales_RG.shape[1]
    out_TR = _product("nibbles", x_TC, packed_RW, scales_RG, (1, group), zeros_WG)
    if out_TR is None:
        weight_RC = unpack.int4_rows(packed_RW, scales_RG.float(), zeros_WG, torch.float32)
        return _plain(x_TC, weight_RC)
    return out_TR


def mxfp4(x_TC: Tensor, blocks_RGB: Tensor, scales_RG: Tensor) -> Tensor:
    """gpt-oss: x_TC times unpack.mxfp4, which is [C, R] already."""
    out_TR = _product("mxfp4", x_TC, blocks_RGB.flatten(1), scales_RG, (1, 32))
    if out_TR is None:
        return _plain(x_TC, unpack.mxfp4(blocks_RGB, scales_RG, torch.float32).t())
    return out_TR


def _plain(x_TC: Tensor, weight_RC: Tensor) -> Tensor:
    return (x_TC.to(torch.float32) @ weight_RC.t()).to(x_TC.dtype)


def _product(
    kind: str,
    x_TC: Tensor,
    weight: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    zeros: Tensor | None = None,
) -> Tensor | None:
    """None: the shape fits no step."""
    step = step_for(
        kind, x_TC.shape[1], group=block[1], scale=scales.dtype, has_zeros=zeros is not None
    )
    if step is None:
        return None
    weight, scales = weight.contiguous(), scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    num_rows = scales.shape[1] if kind in WORDS else len(weight)
    x = arranged(_floats(x_TC), step)
    out_TR = np.empty((len(x), num_rows), np.float32)
    x_at, out_at = x.ctypes.data, out_TR.ctypes.data
    kernels = [
        (t, packed_rows.row_kernel(step._replace(num_tokens=count))) for t, count in _portions(x)
    ]
    fixed = fixed_for(step, (num_rows, x_TC.shape[1]), block, len(scales))._replace(
        weight=weight.data_ptr(),
        scales=scales.data_ptr(),
        zeros=0 if zeros is None else zeros.data_ptr(),
        out_bytes=out_TR.strides[0],
    )

    def call(first: int, last: int) -> None:
        for t, kernel in kernels:
            kernel(first, last, x_at + t * fixed.x_bytes, out_at + t * fixed.out_bytes, fixed)

    _share(call, num_rows, BLOCK_ROWS.get(kind, 1), weight.numel() * weight.itemsize)
    return torch.from_numpy(out_TR).to(x_TC.dtype)


def _portions(x: NDArray[np.float32]) -> list[tuple[int, int]]:
    """The first token and the number of those computed at once; 4 were slower than 2."""
    return [(t, min(2, len(x) - t)) for t in range(0, len(x), 2)]


def _floats(x_TC: Tensor) -> NDArray[np.float32]:
    return x_TC.to(torch.float32).contiguous().numpy()


# Word formats


def gptq(x_TC: Tensor, parts: dict[str, Tensor], *, adds_one_to_zeros: bool) -> Tensor:
    """qweight [C/8, R], qzeros [G, R/8], scales [G, R], perhaps g_idx [C]; see unpack.gptq."""
    groups_C, out_TR = parts.get("g_idx"), None
    if groups_C is None or unpack._is_in_order(groups_C, len(parts["scales"])):
        out_TR = _words("gptq" if adds_one_to_zeros else "gptq_v2", x_TC, parts)
    if out_TR is None:
        parts = parts | {"scales": parts["scales"].float()}
        weight_RC = unpack.gptq(parts, torch.float32, adds_one_to_zeros=adds_one_to_zeros)
        return _plain(x_TC, weight_RC)
    return out_TR


def awq(x_TC: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """qweight [C, R/8], qzeros [G, R/8], scales [G, R]; see unpack.awq."""
    out_TR = _words("awq", x_TC, parts)
    if out_TR is None:
        return _plain(x_TC, unpack.awq(parts | {"scales": parts["scales"].float()}, torch.float32))
    return out_TR


def _words(kind: str, x_TC: Tensor, parts: dict[str, Tensor]) -> Tensor | None:
    (num_groups, num_rows), num_columns = parts["scales"].shape, x_TC.shape[1]
    if num_rows < BLOCK_ROWS[kind] or num_columns % num_groups:
        return None
    block = 1, num_columns // num_groups
    return _product(kind, x_TC, parts["qweight"], parts["scales"], block, parts["qzeros"])


# Threads


def _share(call: Call, num_rows: int, multiple: int, num_bytes: int) -> None:
    """Call on all rows, in pieces that whichever thread is free takes next; `multiple` rows stay
    together. Helpers sleep between calls; one that other callers keep busy is not waited for.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or num_bytes < MIN_SHARED_BYTES:
        call(0, num_rows)
        return
    step = -(-num_rows // (PIECES * num_threads * multiple)) * multiple
    pieces = iter([(i, min(i + step, num_rows)) for i in range(0, num_rows, step)])

    def work() -> None:
        for first, last in pieces:  # taking one is atomic
            call(first, last)

    helpers = _helpers(os.getpid(), num_threads - 1)
    futures = [helpers.submit(work) for _ in range(num_threads - 1)]
    work()
    for future in futures:
        if not future.cancel():
            future.result()


@cache
def _helpers(pid: int, num_threads: int) -> ThreadPoolExecutor:
    """By process: threads do not survive a fork."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="packed-cpu")
