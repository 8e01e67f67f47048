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

try:
    from numba import njit

    from moe_infinity.kernels import packed_rows, packed_words
    from moe_infinity.kernels.packed_rows import Step
    from moe_infinity.kernels.packed_words import AWQ_ROWS, BLOCK_ROWS
    from moe_infinity.kernels.vectors import LANES, NIBBLES
except ImportError as error:
    raise ImportError(
        "moe_infinity.kernels.packed_cpu needs numba, which is not installed\n"
        "hint: pip install 'moe-infinity[cpu]'"
    ) from error

PIECES = 4  # per thread, so that one that starts late finds less left to do
NIBBLE_UNITS = np.array([*(16.0**-k for k in range(NIBBLES - 1)), 1.0], np.float32)
AWQ_PLACES = [AWQ_ROWS.index(row) for row in range(NIBBLES)]
MIN_SHARED_BYTES = 4 << 20  # a weight of 1.5 MB took longer shared: 0.33 ms instead of 0.29
Call = Callable[[int, int], None]


def int8(x_TC: Tensor, weight_RC: Tensor, scales_R1: Tensor) -> Tensor:
    """compressed-tensors int-quantized, symmetric, one scale per row."""
    columns = weight_RC.shape[1]
    if (num_vectors := _byte_vectors(columns, columns)) is None:
        return _plain(x_TC, weight_RC.to(torch.float32) * scales_R1.to(torch.float32))
    return _rows("int8", num_vectors, x_TC, weight_RC, scales_R1, (1, columns))


def fp8(x_TC: Tensor, weight_RC: Tensor, scales_rc: Tensor, block: tuple[int, int]) -> Tensor:
    """float8_e4m3fn with one scale per block [rows, columns]; see unpack.fp8."""
    if scales_rc.dtype == torch.float8_e8m0fnu:
        scales_rc = scales_rc.view(torch.uint8)
    if scales_rc.dim() != 2:
        scales_rc = scales_rc.reshape(1, 1)
    columns = weight_RC.shape[1]
    if (num_vectors := _byte_vectors(columns, min(block[1], columns))) is None:
        return _plain(x_TC, unpack.fp8(weight_RC, scales_rc, block, torch.float32))
    return _rows("fp8", num_vectors, x_TC, weight_RC, scales_rc, block)


def int4_rows(
    x_TC: Tensor, packed_RW: Tensor, scales_RG: Tensor, zeros_WG: Tensor | None = None
) -> Tensor:
    """compressed-tensors pack-quantized; see unpack.int4_rows. Not rounded to the scale's dtype."""
    if not _fits_words(NIBBLES * packed_RW.shape[1], scales_RG.shape[1]):
        weight_RC = unpack.int4_rows(packed_RW, scales_RG.float(), zeros_WG, torch.float32)
        return _plain(x_TC, weight_RC)
    group = NIBBLES * packed_RW.shape[1] // scales_RG.shape[1]
    return _rows("nibbles", NIBBLES, x_TC, packed_RW, scales_RG, (1, group), zeros_WG)


def mxfp4(x_TC: Tensor, blocks_RGB: Tensor, scales_RG: Tensor) -> Tensor:
    """gpt-oss: x_TC times unpack.mxfp4, which is [C, R] already."""
    if scales_RG.shape[1] < 2:
        return _plain(x_TC, unpack.mxfp4(blocks_RGB, scales_RG, torch.float32).t())
    return _rows("mxfp4", 4, x_TC, blocks_RGB.flatten(1), scales_RG, (1, 32))


def _byte_vectors(num_columns: int, group: int) -> int | None:
    """The most vectors of bytes, up to 8, that fit a row and of which no two groups share one."""
    for num_vectors in (8, 4, 2):
        width = num_vectors * LANES
        if width <= num_columns and (group == num_columns or group % width == 0):
            return num_vectors
    return None


def _fits_words(num_columns: int, num_groups: int) -> bool:
    """A step is in one group, or has 2 or 4 whole ones."""
    group, width = num_columns // num_groups, LANES * NIBBLES
    return num_columns >= width and (num_groups == 1 or group in (32, 64) or group % width == 0)


def _plain(x_TC: Tensor, weight_RC: Tensor) -> Tensor:
    return (x_TC.to(torch.float32) @ weight_RC.t()).to(x_TC.dtype)


# Row formats


def _rows(
    kind: str,
    num_vectors: int,
    x_TC: Tensor,
    weight: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    zeros_WG: Tensor | None = None,
) -> Tensor:
    if scales.dtype not in (torch.bfloat16, torch.uint8):
        scales = scales.to(torch.float32)
    weight, scales = weight.contiguous(), scales.contiguous()
    zeros_WG = None if zeros_WG is None else zeros_WG.contiguous()
    num_rows, num_groups = len(weight), scales.shape[1]
    num_scales = max(1, num_vectors * LANES // block[1]) if num_groups > 1 else 1
    step = Step(kind, num_vectors, num_scales, scales.dtype, zeros_WG is not None, 1)
    x = _arranged(x_TC, step)
    per_scale = num_scales * block[1] // step.num_columns if num_groups > 1 else x.shape[1]
    out_TR = np.empty((len(x), num_rows), np.float32)
    x_at, out_at = x.ctypes.data, out_TR.ctypes.data
    kernels = [
        (t, packed_rows.row_kernel(step._replace(num_tokens=count))) for t, count in _portions(x)
    ]
    fixed = packed_rows.Fixed(
        weight=weight.data_ptr(),
        scales=scales.data_ptr(),
        zeros=0 if zeros_WG is None else zeros_WG.data_ptr(),
        row_bytes=weight.stride(0) * weight.itemsize,
        x_bytes=x.strides[0],
        out_bytes=out_TR.strides[0],
        scales_bytes=scales.stride(0) * scales.itemsize,
        block_rows=block[0] if len(scales) > 1 else num_rows,
        num_steps=x.shape[1],
        inverse=(1 << 32) // per_scale + 1,
        last_scale=num_groups - num_scales,
    )

    def call(first: int, last: int) -> None:
        for t, kernel in kernels:
            kernel(first, last, x_at + t * fixed.x_bytes, out_at + t * fixed.out_bytes, fixed)

    _share(call, num_rows, 1, weight.numel() * weight.itemsize)
    return torch.from_numpy(out_TR).to(x_TC.dtype)


def _portions(x: NDArray[np.float32]) -> list[tuple[int, int]]:
    """The first token and the number of those computed at once; 4 were slower than 2."""
    return [(t, min(2, len(x) - t)) for t in range(0, len(x), 2)]


def _arranged(x_TC: Tensor, step: Step) -> NDArray[np.float32]:
    """[T, steps, vectors, LANES] in float32, as the weights come out of decoding; where the last
    step overlaps the one before, what has been counted is 0.
    """
    num_steps = -(-x_TC.shape[1] // step.num_columns)
    out = np.zeros((len(x_TC), num_steps, step.num_x, LANES), np.float32)
    strides = (1, step.num_vectors) if step.is_nibbles else (LANES, 1)
    zero = 1.0 if step.has_zeros else unpack.ZERO_OF_SYMMETRIC
    _arrange(_floats(x_TC), out, _factors(step), *strides, np.float32(zero))
    return out


def _floats(x_TC: Tensor) -> NDArray[np.float32]:
    return x_TC.to(torch.float32).contiguous().numpy()


@cache
def _factors(step: Step) -> NDArray[np.float32]:
    """What decoding leaves out, by vector."""
    if step.kind == "nibbles":
        return NIBBLE_UNITS
    factor = {"int8": 1.0, "fp8": 2.0**8, "mxfp4": 2.0**14}[step.kind]
    return np.full(step.num_vectors, factor, np.float32)


@njit(nogil=True)
def _arrange(x, out, factors, vector_stride, lane_stride, zero):  # type: ignore[no-untyped-def]
    num_vectors, num_columns = len(factors), x.shape[1]
    width = num_vectors * LANES
    for t in range(len(x)):
        for step in range(out.shape[1]):
            counted = step * width
            start = min(counted, num_columns - width)
            for lane in range(LANES):
                total = np.float32(0)
                for k in range(num_vectors):
                    column = start + k * vector_stride + lane * lane_stride
                    if column >= counted:
                        out[t, step, k, lane] = x[t, column] * factors[k]
                        total += x[t, column]
                if out.shape[2] > num_vectors:
                    out[t, step, num_vectors, lane] = -zero * total


# Word formats


def gptq(x_TC: Tensor, parts: dict[str, Tensor], *, adds_one_to_zeros: bool) -> Tensor:
    """qweight [C/8, R], qzeros [G, R/8], scales [G, R], perhaps g_idx [C]; see unpack.gptq."""
    groups_C, (num_groups, num_rows) = parts.get("g_idx"), parts["scales"].shape
    fits = num_rows >= BLOCK_ROWS["gptq"] and len(parts["qweight"]) % num_groups == 0
    if not fits or (groups_C is not None and not unpack._is_in_order(groups_C, num_groups)):
        parts = parts | {"scales": parts["scales"].float()}
        weight_RC = unpack.gptq(parts, torch.float32, adds_one_to_zeros=adds_one_to_zeros)
        return _plain(x_TC, weight_RC)
    zeros_GW = parts["qzeros"] + 0x11111111 if adds_one_to_zeros else parts["qzeros"]
    return _words("gptq", x_TC, parts, zeros_GW)


def awq(x_TC: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """qweight [C, R/8], qzeros [G, R/8], scales [G, R]; see unpack.awq."""
    num_groups, num_rows = parts["scales"].shape
    if num_rows < BLOCK_ROWS["awq"] or len(parts["qweight"]) % num_groups:
        return _plain(x_TC, unpack.awq(parts | {"scales": parts["scales"].float()}, torch.float32))
    return _words("awq", x_TC, parts, parts["qzeros"])


def _words(kind: str, x_TC: Tensor, parts: dict[str, Tensor], zeros_GW: Tensor) -> Tensor:
    words, zeros_GW = parts["qweight"].contiguous(), zeros_GW.contiguous()
    scales_GR = parts["scales"].to(torch.float32).contiguous()
    num_groups, num_rows = scales_GR.shape
    x = _floats(x_TC)
    sums = x.reshape(len(x), num_groups, -1).sum(axis=2)
    if kind == "gptq":
        x = (x.reshape(len(x), -1, NIBBLES) * NIBBLE_UNITS).reshape(x.shape)
    out_TR = np.empty((len(x), num_rows), np.float32)
    x_at, out_at = x.ctypes.data, out_TR.ctypes.data
    fixed = packed_words.Fixed(
        words=words.data_ptr(),
        scales=scales_GR.data_ptr(),
        zeros=zeros_GW.data_ptr(),
        sums=sums.ctypes.data,
        line_bytes=words.stride(0) * words.itemsize,
        num_rows=num_rows,
        num_groups=num_groups,
        num_lines=len(words) // num_groups,
        x_bytes=x.strides[0],
        out_bytes=out_TR.strides[0],
    )
    kernels = [
        (t, packed_words.word_kernel(kind, count), fixed._replace(sums=sums[t:].ctypes.data))
        for t, count in _portions(x)
    ]

    def call(first: int, last: int) -> None:
        for t, kernel, fixed in kernels:
            kernel(first, last, x_at + t * fixed.x_bytes, out_at + t * fixed.out_bytes, fixed)

    _share(call, num_rows, BLOCK_ROWS[kind], words.numel() * words.itemsize)
    if kind == "awq":
        by_place = out_TR.reshape(len(x), NIBBLES, -1)[:, AWQ_PLACES]
        out_TR = by_place.transpose(0, 2, 1).reshape(len(x), num_rows)
    return torch.from_numpy(out_TR).to(x_TC.dtype)


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
