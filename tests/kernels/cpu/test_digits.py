"""Digits of x, which are multiplied with the bytes of weights, and products with them.

Legend: T tokens, C columns (inputs) of a weight, S steps of a row.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_infinity.kernels.cpu.arrangement import arranged, tables_of
from moe_infinity.kernels.cpu.compiler import multiplies_bytes
from moe_infinity.kernels.cpu.grids import GRID_KINDS
from moe_infinity.kernels.cpu.steps import loop_for
from tests.kernels.cpu.test_blocks import dequantized, packed, product
from tests.kernels.stored_weights import ggml_blocks

pytestmark = [
    pytest.mark.arithmetic,
    pytest.mark.skipif(not multiplies_bytes(), reason="the processor does not multiply bytes"),
]

KINDS = {
    "q4_k": 8, "q6_k": 8, "q4_0": 8, "q2_k": 8, "iq4_xs": 7, "ggml_mxfp4": 8, "iq1_m": 8,
    "iq2_xxs": 7, "iq3_s": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def from_digits(x_TC: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """What digits say that x is, in [T, S, columns of a step], and units [T, S]."""
    loop = loop_for(kind, x_TC.shape[1], group=x_TC.shape[1], scale=None)
    assert loop is not None
    assert loop.digit_bits == KINDS[kind]
    floats = arranged(x_TC.numpy(), loop)  # [T, S, vectors, lanes]
    count = loop.num_vectors // 4
    units = floats[:, :, 3 * count, 0].astype(np.float64)
    assert (floats[:, :, 3 * count] == floats[:, :, 3 * count, :1]).all()
    digits = np.ascontiguousarray(floats[:, :, : 3 * count]).view(np.int8)
    digits = digits.reshape(*floats.shape[:2], count, 3, 16, 4).astype(np.int64)
    weights = (np.int64(1) << loop.digit_bits) ** np.array([2, 1, 0])
    numbers = (digits * weights[:, None, None]).sum(3)  # [T, S, words, lanes, bytes]
    order = tables_of(loop).order[:-1].reshape(count, 4, 16).transpose(0, 2, 1)
    found = np.zeros((*floats.shape[:2], loop.num_columns))
    found[..., order] = numbers * units[..., None, None, None]
    left_out = {"ggml_mxfp4": 0.5, "iq1_m": 0.125, "iq2_xxs": 0.125}.get(kind, 1.0)
    return torch.from_numpy(found / left_out), torch.from_numpy(units / left_out)


@pytest.mark.parametrize("kind", KINDS)
def test_digits_are_x_but_for_half_a_unit(kind):
    x = torch.randn(5, 1024) * 10.0 ** torch.randint(-6, 7, (5, 1))
    x[0, :4] = torch.tensor([3e38, -3e38, 0.0, 1e-30])
    x[1, 7] = 1e4 * x[1].abs().max()
    x[2] = 0
    x[3, 256:512] = -(2.0**-3)
    found, units = from_digits(x, kind)
    error = (found - x.double().view(found.shape)).abs().amax(-1)
    assert (error <= units / 2).all()
    largest = x.double().view(found.shape).abs().amax(-1)
    bits = 22 if KINDS[kind] == 8 else 20
    assert (error <= largest * 2.0**-bits + 1e-35).all()


def test_numbers_of_bfloat16_are_their_digits_unless_they_are_much_smaller_than_others():
    x = (torch.rand(4, 512) * 2.0 ** torch.randint(-13, 0, (4, 512))).bfloat16().float()
    x = torch.where(x.abs() < 2.0**-14, 0, x)
    found, _ = from_digits(x, "q4_k")
    assert torch.equal(found, x.double().view(found.shape))


@pytest.mark.parametrize("columns", [160, 224])
def test_columns_of_which_a_step_before_has_the_products_are_0(columns):
    x = torch.randn(3, columns)
    found, _ = from_digits(x, "q4_0")
    width = found.shape[-1]
    assert found.shape[1] == 2
    assert (found[:, 1, : 2 * width - columns] == 0).all()
    last = x[:, width:].double()
    assert (found[:, 1, 2 * width - columns :] - last).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "iq4_xs", "mxfp4"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_something_that_is_no_number_has_no_finite_output(kind, number):
    values = ggml_blocks(kind, 9, 512)
    x = torch.randn(3, 512)
    expected = product(x, packed(kind, values))
    x[1, 300] = number
    found = product(x, packed(kind, values))
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "iq4_xs", "iq4_nl", "q5_0", "mxfp4"])
def test_the_largest_bytes_and_digits_do_not_overflow(kind):
    """All bytes of a weight are the same, and all columns of x as large as its largest."""
    for filler in (0xFF, 0x77):
        values = ggml_blocks(kind, 4, 512)
        blocks = values.view(4, -1, values.shape[1] * (32 if kind in SMALL else 256) // 512)
        for start, stop in BYTES[kind]:
            blocks[..., start:stop] = filler
        weight = dequantized(kind, values).double()
        for sign in (1, -1):
            x = sign * torch.full((2, 512), 1.9999)
            found = product(x, packed(kind, values)).double()
            expected = x.double() @ weight.t()
            size = x.double().abs() @ weight.abs().t()
            assert ((found - expected).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("kind", GRID_KINDS)
def test_sums_of_products_that_are_all_positive_do_not_overflow(kind):
    """A token for each row, as large as may be, with the signs of its weights."""
    values = ggml_blocks(kind, 4, 512)
    weight = dequantized(kind, values)
    x = 1.9999 * weight.sign()
    found = product(x, packed(kind, values)).diagonal().double()
    expected = (x.double() * weight).sum(1)
    assert ((found - expected).abs() <= 2e-6 * expected).all()


SMALL = ("iq4_nl", "q5_0", "mxfp4")
BYTES = {  # of values, in a block
    "q4_k": [(16, 144)],
    "q6_k": [(0, 192)],
    "iq4_xs": [(8, 136)],
    "iq4_nl": [(2, 18)],
    "q5_0": [(2, 22)],
    "mxfp4": [(1, 17)],
}
