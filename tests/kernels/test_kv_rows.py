"""Rows of keys and values in 8 bits are what their definition says, and the machine code that
packs them gives the same bytes.
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from numba import njit
from torch import Tensor

from moe_infinity.kernels.cpu.put_row import PACKINGS, put_row
from moe_infinity.kernels.kv_rows import LARGEST, SCALE_BYTES, packed_rows, unpacked_rows

KINDS = ("int8", "fp8")


@njit
def _put_rows(x: Any, width: Any, out: Any, num_rows: Any, packing: Any) -> None:
    for row in range(num_rows):
        put_row(x + 4 * width * row, width, out + (width + 4) * row, packing)


def by_machine(x_Nd: Tensor, kind: str) -> Tensor:
    num_rows, width = x_Nd.shape
    rows = torch.zeros(num_rows, width + SCALE_BYTES, dtype=torch.uint8)
    x_Nd = x_Nd.float().contiguous()
    _put_rows(x_Nd.data_ptr(), width, rows.data_ptr(), num_rows, PACKINGS.index(kind))
    return rows


def slowly(row: list[float], kind: str) -> tuple[float, list[float]]:
    """The scale of a row and its codes, number by number."""
    scale = np.float32(max(map(abs, row))) / np.float32(LARGEST[kind])
    scale = max(scale, np.finfo(np.float32).tiny)
    units = [float(np.float32(x) / scale) for x in row]
    if kind == "int8":
        return float(scale), [float(round(x)) for x in units]  # ties to even
    return float(scale), [math.copysign(nearest_float8(abs(x)), x) for x in units]


def nearest_float8(x: float) -> float:
    """Of 4 significant bits, or a multiple of 2 ** -9 near 0."""
    step = 2.0 ** max(math.frexp(x)[1] - 4, -9) if x else 1.0
    return round(x / step) * step


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_its_codes_and_a_scale(kind):
    x = torch.randn(50, 32) * torch.logspace(-8, 8, 50)[:, None]
    x[0] = 0.0
    x[1, 3:] = 0.0
    x[2] = torch.linspace(-127, 127, 32) / 2  # with ties
    x[3] = torch.linspace(0, 448, 32).round()
    x[4, :8] = 448 * torch.tensor([1, 2**-15, 3 * 2**-19, 2**-18, 2**-19, 2**-20, 17 / 32, 19 / 32])
    rows = packed_rows(x, kind)
    assert rows.shape == (50, 32 + SCALE_BYTES)
    found = unpacked_rows(rows, kind, torch.float32)
    for row, numbers in zip(x.tolist(), found.tolist(), strict=True):
        scale, codes = slowly(row, kind)
        assert numbers == [float(np.float32(code) * np.float32(scale)) for code in codes]


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(
    strategies.lists(strategies.floats(width=32, allow_nan=False), min_size=16, max_size=16)
)
def test_machine_code_gives_the_same_bytes(kind, numbers):
    row = torch.tensor([numbers])
    finite = row.isfinite().all()
    if finite:
        assert torch.equal(by_machine(row, kind), packed_rows(row, kind))
    else:
        assert unpacked_rows(by_machine(row, kind), kind, torch.float32).isnan().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_machine_code_gives_the_same_bytes_of_many_rows(kind, dtype):
    x = (torch.randn(500, 64) * torch.logspace(-6, 3, 500)[:, None]).to(dtype)
    assert torch.equal(by_machine(x, kind), packed_rows(x, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_hidden(kind, wrong):
    x = torch.randn(3, 32)
    x[1, 5] = wrong
    for rows in (packed_rows(x, kind), by_machine(x, kind)):
        found = unpacked_rows(rows, kind, torch.float32)
        assert not found[1].isfinite().any()
        assert found[::2].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_those_of_the_grid(kind, dtype):
    x = torch.randn(2, 3, 40, 48).to(dtype)
    found = unpacked_rows(packed_rows(x, kind), kind, dtype)
    assert found.dtype == dtype
    assert found.shape == x.shape
    exact = unpacked_rows(packed_rows(x, kind), kind, torch.float32)
    largest = x.float().abs().amax(-1, keepdim=True)
    bound = largest / 254 if kind == "int8" else (x.float().abs() / 16).clamp(min=largest / 2**18)
    assert ((exact - x.float()).abs() <= bound * 1.001).all()
    assert torch.equal(found, exact.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_itself_alone(kind):
    x = torch.randn(2, 3, 40, 32)
    whole = packed_rows(x, kind)
    for at in range(0, 40, 7):
        assert torch.equal(packed_rows(x[1:, :, at : at + 7], kind), whole[1:, :, at : at + 7])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_from_any_layout(kind):
    """As windows and batches leave them, and with widths by which scales are not aligned."""
    for width in (32, 10, 7):
        x = torch.randn(2, 3, 40, width)
        rows = packed_rows(x, kind)
        found = unpacked_rows(rows[:, 1:, 3:], kind, torch.float32)
        found_at_5 = unpacked_rows(rows, kind, torch.float32)[0, 0, 5:6]
        assert torch.equal(found, unpacked_rows(rows, kind, torch.float32)[:, 1:, 3:])
        assert torch.equal(unpacked_rows(rows[:1, :1, 5:6], kind, torch.float32)[0, 0], found_at_5)
        empty = packed_rows(x[:, :, :0], kind)
        assert unpacked_rows(empty, kind, torch.float32).shape == (2, 3, 0, width)
