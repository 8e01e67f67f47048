"""Products with packed weights against unpacking first: the weights of kernels/unpack.py in
float32, multiplied in float64.

Scales are given to unpack.py in float32, in which a value and its scale multiply without a second
rounding, as in the kernels.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="packed_cpu needs the extra `cpu`")

from moe_infinity.kernels import packed_cpu, unpack

pytestmark = pytest.mark.arithmetic

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request, monkeypatch):
    monkeypatch.setattr(packed_cpu, "MIN_SHARED_BYTES", 0)
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def largest_error(
    found_TR: Tensor, x_TC: Tensor, weight_RC: Tensor, largest_RC: Tensor | None = None
) -> float:
    """As a share of the bound: the roundings of float32 that a product passes at the size of the
    sum of |x| |w|, and one of the output's dtype. They are C / 8 + 16 at most: never fewer than 8
    columns are added to a sum at once. `largest_RC` is for |w| where zeros are subtracted later.
    """
    x_TC, weight_RC = x_TC.double(), weight_RC.double()
    exact_TR = x_TC @ weight_RC.t()
    largest_RC = weight_RC.abs() if largest_RC is None else largest_RC.double()
    sizes_TR = x_TC.abs() @ largest_RC.t()
    bound_TR = (len(x_TC[0]) / 8 + 16) * EPS[torch.float32] * sizes_TR
    bound_TR += EPS[found_TR.dtype] * exact_TR.abs()
    return ((found_TR.double() - exact_TR).abs() / bound_TR.clamp(min=1e-30)).max().item()


def tokens(num_tokens: int, num_columns: int) -> Tensor:
    dtype = {1: torch.bfloat16, 2: torch.float16}.get(num_tokens, torch.float32)
    return torch.randn(num_tokens, num_columns).to(dtype)


def int4_parts(rows: int, columns: int, group: int, dtype: torch.dtype = torch.bfloat16):
    scales = (torch.rand(rows, columns // group) + 0.1).to(dtype)
    return words(rows, columns // 8), scales, words(-(-rows // 8), columns // group)


def word_parts(kind: str, rows: int, columns: int, group: int) -> dict[str, Tensor]:
    shape = (columns // 8, rows) if kind == "gptq" else (columns, rows // 8)
    return {
        "qweight": words(*shape),
        "qzeros": words(columns // group, rows // 8),
        "scales": (torch.rand(columns // group, rows) + 0.1).half(),
    }


def in_float32(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return parts | {"scales": parts["scales"].float()}


def sizes_of(scales_RG: Tensor, columns: int) -> Tensor:
    """|nibble| + |zero| is at most 31 (gptq's zeros reach 16), times the scale of the column."""
    return 31 * scales_RG.float().repeat_interleave(columns // scales_RG.shape[1], dim=1)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize(("rows", "columns"), [(7, 2048), (16, 200), (4, 24)])
def test_int8_is_the_product_with_the_unpacked_weight(num_tokens, rows, columns):
    weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scales = torch.rand(rows, 1).bfloat16()
    x = tokens(num_tokens, columns)
    found = packed_cpu.int8(x, weight, scales)
    assert found.dtype == x.dtype
    assert largest_error(found, x, weight.float() * scales.float()) < 1


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((130, 416), (128, 128)), ((9, 200), (1, 200)), ((6, 96), (6, 96)), ((8, 96), (4, 24))],
)
def test_fp8_is_the_product_with_the_unpacked_weight(num_tokens, shape, block):
    numbers = torch.randint(0, 127, shape) + 128 * torch.randint(0, 2, shape)
    weight = numbers.to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) + 0.1
    x = tokens(num_tokens, shape[1])
    found = packed_cpu.fp8(x, weight, scales, block)
    assert largest_error(found, x, unpack.fp8(weight, scales, block, torch.float32)) < 1


def test_fp8_with_exponents_for_scales_is_the_product_with_the_unpacked_weight():
    weight = torch.randint(0, 127, (6, 160)).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.randint(110, 140, (6, 5)).byte().view(torch.float8_e8m0fnu)
    x = tokens(1, 160)
    found = packed_cpu.fp8(x, weight, scales, (1, 32))
    expected = unpack.fp8(weight, scales, (1, 32), torch.float32)
    assert largest_error(found, x, expected) < 1


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("group", [32, 64, 128, None, 16])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_int4_rows_is_the_product_with_the_unpacked_weight(num_tokens, group, has_zeros):
    rows = {1: 9, 2: 5}.get(num_tokens, 16)
    columns = {32: 416, 64: 448, 128: 512}.get(group, 240)
    dtype = torch.float16 if group == 64 else torch.bfloat16
    packed, scales, zeros = int4_parts(rows, columns, group or columns, dtype)
    zeros = zeros if has_zeros else None
    x = tokens(num_tokens, columns)
    found = packed_cpu.int4_rows(x, packed, scales, zeros)
    expected = unpack.int4_rows(packed, scales.float(), zeros, torch.float32)
    assert largest_error(found, x, expected, sizes_of(scales, columns)) < 1


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize(("rows", "groups"), [(7, 9), (16, 2), (8, 1)])
def test_mxfp4_is_the_product_with_the_unpacked_weight(num_tokens, rows, groups):
    blocks = torch.randint(0, 256, (rows, groups, 16)).byte()
    scales = torch.randint(100, 140, (rows, groups)).byte()
    x = tokens(num_tokens, 32 * groups).float()
    found = packed_cpu.mxfp4(x, blocks, scales)
    assert largest_error(found, x, unpack.mxfp4(blocks, scales, torch.float32).t()) < 1


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize(("rows", "group"), [(264, 32), (128, 64), (8, 192), (16, 12)])
@pytest.mark.parametrize("kind", ["gptq", "gptq_v2", "awq"])
def test_word_formats_are_the_product_with_the_unpacked_weight(num_tokens, rows, group, kind):
    columns = 192
    parts = word_parts(kind.removesuffix("_v2"), rows, columns, group)
    x = tokens(num_tokens, columns)
    if kind == "awq":
        found, expected = packed_cpu.awq(x, parts), unpack.awq(in_float32(parts), torch.float32)
    else:
        adds = kind == "gptq"
        found = packed_cpu.gptq(x, parts, adds_one_to_zeros=adds)
        expected = unpack.gptq(in_float32(parts), torch.float32, adds_one_to_zeros=adds)
    assert largest_error(found, x, expected, sizes_of(parts["scales"].t(), columns)) < 1


def test_gptq_with_columns_in_another_order_is_the_product_with_the_unpacked_weight():
    parts = word_parts("gptq", 16, 128, 32)
    parts["g_idx"] = (torch.randperm(128) // 32).to(torch.int32)
    x = tokens(1, 128)
    found = packed_cpu.gptq(x, parts, adds_one_to_zeros=True)
    expected = unpack.gptq(in_float32(parts), torch.float32, adds_one_to_zeros=True)
    assert largest_error(found, x, expected, sizes_of(parts["scales"].t(), 128)) < 1


def test_the_tolerance_rejects_wrong_weights():
    """Rows swapped, a zero off by one, and one scale of 8 off by the last bit of bfloat16."""
    packed, scales, zeros = int4_parts(8, 256, 32)
    x = torch.randn(1, 256)
    expected = unpack.int4_rows(packed, scales.float(), zeros, torch.float32)
    sizes = sizes_of(scales, 256)
    other_zeros, other_scales = zeros.clone(), scales.clone()
    other_zeros[0, 0] ^= 1
    other_scales.view(torch.int16)[0, 0] += 1
    right = packed_cpu.int4_rows(x, packed, scales, zeros)
    swapped = packed_cpu.int4_rows(x, packed.flip(0), scales, zeros)
    assert largest_error(right, x, expected, sizes) < 1 < largest_error(swapped, x, expected, sizes)
    for wrong in (
        packed_cpu.int4_rows(x, packed, scales, other_zeros),
        packed_cpu.int4_rows(x, packed, other_scales, zeros),
    ):
        assert largest_error(wrong, x, expected, sizes) > 1


def test_weights_may_lie_anywhere_in_a_slot_and_rows_in_any_number_of_callers():
    """Parts are views, 64 bytes aligned; two threads compute at once, as if each were alone."""
    slot = torch.randint(0, 256, (1 << 16,)).byte()
    weight = slot[64 : 64 + 40 * 1024].view(torch.int8).view(40, 1024)
    scales = torch.rand(40, 1)
    x = torch.randn(2, 1024)
    alone = packed_cpu.int8(x, weight, scales)
    results: list[bool] = []

    def call_often() -> None:
        for _ in range(50):
            results.append(torch.equal(packed_cpu.int8(x, weight, scales), alone))

    callers = [threading.Thread(target=call_often) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 100
    assert all(results)
