"""Attention of many queries, for prompts: a block of keys after another, so that no score is kept
longer than its block.

    threads take rows: a few queries of all heads of a group, which share its keys
        for each block of keys that one of them sees                    prompt_rows.py
            scores    rows x keys           onto registers, in float32
            softmax   as far as it is known: what came before is scaled down
            sums      of values, weighted   onto the output, in float32

A query sees a band of neighbouring keys: that is what causal masks, windows and padding leave. The
bits of a row depend on its query, the keys that it sees, and where in a block of KEYS these lie.

Numbers are float32 or, where the processor multiplies bfloat16 and all are bfloat16, that: sums are
float32 then, too, and the weights of values are rounded, as torch's kernel rounds them. Two cores
of Zen 4 compute 512 queries behind 7,488 tokens, 32 heads of 128 in 4 groups, in 0.19 s, torch in
0.44; in float32 in 0.33 and 0.49.

Legend: B sequences, H heads, G heads of keys and values, P heads of a group, T queries, N tokens of
the cache, d width of a head, dv of a value.
"""

from __future__ import annotations

from array import array
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.kernels import host_float32
from moe_infinity.kernels.cpu import team
from moe_infinity.kernels.cpu.compiler import multiplies_bfloat16
from moe_infinity.kernels.cpu.prompt_rows import PACKED, ROWS, STATE, PromptJob, rows_function
from moe_infinity.kernels.cpu.team import num_threads
from moe_infinity.kernels.cpu.vectors import LANES
from moe_infinity.system.machine import yield_address

DTYPES = torch.float32, torch.bfloat16, torch.float16
PACKED_NUMBERS = 4 << 20  # copied at once: of queries, keys and values


def bounds_of(mask: Tensor | None, num_queries: int, num_keys: int) -> Tensor | None:
    """The keys that queries see by a mask [B, 1, T or 1, N], as `attend_prompt` takes them. It is
    bool, or added: 0 or the lowest number. Without one all are seen. None: not of a mask that shows
    a query keys apart from each other, or that has more heads.
    """
    if mask is None:
        return torch.tensor([0, num_keys], dtype=torch.long, device="cpu").expand(1, num_queries, 2)
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] != num_keys:
        return None
    seen = _seen(mask[:, 0])
    if seen is None:
        return None
    num_bands = np.count_nonzero(seen[:, :, 1:] > seen[:, :, :-1], axis=2) + seen[:, :, 0]
    if (num_bands > 1).any():
        return None
    first = seen.argmax(axis=2)
    last = first + np.count_nonzero(seen, axis=2)
    bounds = torch.from_numpy(np.stack([first, last], axis=2).astype(np.int64))
    return bounds.expand(-1, num_queries, -1)


def _seen(mask: Tensor) -> NDArray[np.bool_] | None:
    """Where a mask shows something. None: it adds other numbers than 0 and the lowest one."""
    if mask.dtype == torch.bool:
        return mask.numpy()
    if mask.dtype not in DTYPES:
        return None
    kind = torch.int32 if mask.itemsize == 4 else torch.int16  # compared as fast in any dtype
    bits = mask.contiguous().view(kind).numpy()
    lowest = torch.tensor(torch.finfo(mask.dtype).min, dtype=mask.dtype, device="cpu").view(kind)
    seen: NDArray[np.bool_] = bits == 0
    num_known = np.count_nonzero(seen) + np.count_nonzero(bits == lowest.item())
    return seen if num_known == bits.size else None


def causal_bounds(num_queries: int) -> Tensor:
    """The keys that queries see of as many keys if none is behind a query."""
    last = torch.arange(1, num_queries + 1, device="cpu")
    return torch.stack([torch.zeros_like(last), last], dim=1)[None]


def attend_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor | None:
    """Attend: [B, H, T, d], [B, G, N, d], [B, G, N, dv] -> [B, T, H, dv]. Query t of a sequence
    sees the keys from bounds[b, t, 0] to bounds[b, t, 1]; int64 [B or 1, T, 2]. Sinks are numbers
    in the softmax that have no value. None: not for these shapes, dtypes or devices.
    """
    num_seqs, num_heads, num_queries, width = query.shape
    num_groups, num_keys, value_width = value.shape[1:]
    alike = query.dtype == key.dtype == value.dtype and query.device.type == "cpu"
    alike &= key.shape == (num_seqs, num_groups, num_keys, width)
    if not alike or query.dtype not in DTYPES:
        return None
    if num_heads % num_groups or width % 2 or value_width % LANES or not num_keys:
        return None
    out = query.new_empty(num_seqs, num_queries, num_heads, value_width)
    bounds = bounds.expand(num_seqs, -1, -1)
    sinks = None if sinks_H is None else sinks_H.detach().to(torch.float32)
    per_group = num_heads // num_groups
    of_group = num_keys * (width + value_width) + num_queries * per_group * width
    at_once = max(1, PACKED_NUMBERS // of_group)
    for seq, first in product(range(num_seqs), range(0, num_groups, at_once)):
        groups = slice(first, first + at_once)
        heads = slice(first * per_group, (first + at_once) * per_group)
        out[seq, :, heads] = _attend(
            query[seq, heads], key[seq, groups], value[seq, groups], bounds[seq].contiguous(),
            scale, None if sinks is None else sinks[heads].contiguous(),
        )  # fmt: skip
    return out


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """The same in float32, for some groups of one sequence: [T, H, dv]."""
    num_heads, num_queries, width = query.shape
    num_groups, _, value_width = value.shape
    is_half = query.dtype == torch.bfloat16 and multiplies_bfloat16()
    numbers = 2 if is_half else 1  # of a word
    dtype = torch.bfloat16 if is_half else torch.float32
    per_group = num_heads // num_groups
    num_rows = num_queries * per_group
    rows = -(-num_rows // ROWS) * ROWS
    x = torch.zeros(num_groups, rows, width, dtype=dtype, device="cpu")
    own = x[:, :num_rows].unflatten(1, (num_queries, per_group))
    own.copy_(query.unflatten(0, (num_groups, per_group)).transpose(1, 2))
    keys = _packed_keys(key, numbers)
    values = _packed_values(value, dtype, numbers)
    out = host_float32(num_groups, rows, value_width).zero_()
    scales = np.array([scale], np.float32)
    memory = array("q", bytes(8 * (STATE + len(PromptJob._fields))))
    at = memory.buffer_info()[0]
    job = PromptJob(
        state=at,
        num_items=num_groups * (rows // ROWS),
        blocks=rows // ROWS,
        rows=rows,
        heads=per_group,
        num_queries=num_queries,
        query=x.data_ptr(),
        steps=width // numbers,
        keys=keys.data_ptr(),
        keys_bytes=keys.stride(0) * keys.itemsize,
        values=values.data_ptr(),
        values_bytes=values.stride(0) * values.itemsize,
        num_vectors=value_width // LANES,
        bounds=bounds.data_ptr(),
        sinks=0 if sinks is None else sinks.data_ptr(),
        scale=scales.ctypes.data,
        out=out.data_ptr(),
        yield_=yield_address(),
    )
    memory[STATE:] = array("q", job)
    team.run(rows_function(is_half).address, at + 8 * STATE, num_threads())
    found: Tensor = out[:, :num_rows].unflatten(1, (num_queries, per_group)).transpose(0, 1)
    return found.flatten(1, 2)


def _packed_keys(key: Tensor, numbers: int) -> Tensor:
    """[G, N, d] -> [G, blocks, words of d, PACKED]."""
    num_groups, num_keys, width = key.shape
    words = key.contiguous().view(torch.float32) if numbers == 2 else key
    shape = num_groups, -(-num_keys // PACKED), width // numbers, PACKED
    packed = host_float32(*shape)
    by_key = packed.transpose(2, 3)
    num_whole = num_keys // PACKED
    by_key[:, :num_whole] = words[:, : num_whole * PACKED].unflatten(1, (num_whole, PACKED))
    if rest := num_keys % PACKED:
        by_key[:, -1, :rest] = words[:, -rest:]
        by_key[:, -1, rest:] = 0
    return packed


def _packed_values(value: Tensor, dtype: torch.dtype, numbers: int) -> Tensor:
    """[G, N, dv] -> [G, N or pairs of N, dv, 1 or 2], with zeros behind."""
    num_groups, num_keys, width = value.shape
    length = -(-num_keys // PACKED) * PACKED
    shape = num_groups, length // numbers, width, numbers
    packed = torch.empty(shape, dtype=dtype, device="cpu")
    by_key = packed.transpose(2, 3)
    num_whole = num_keys // numbers
    by_key[:, :num_whole] = value[:, : num_whole * numbers].unflatten(1, (num_whole, numbers))
    by_key[:, num_whole:] = 0
    if rest := num_keys % numbers:
        by_key[:, num_whole, :rest] = value[:, -rest:]
    return packed
