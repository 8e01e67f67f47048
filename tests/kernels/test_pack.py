"""Packing into few bits: against plain definitions, bit for bit; and that what is read back is as
near to the weight as it can be.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_infinity.kernels import pack as module
from moe_infinity.kernels import unpack
from moe_infinity.kernels.pack import Precision, pack, precision_of
from tests.quantized_checkpoints import to_words
from tests.slow_unpack import same_bits

pytestmark = pytest.mark.arithmetic

PRECISIONS = {
    "int4 32": precision_of("int4", 32),
    "int4 64": precision_of("int4", 64),
    "int4 128": precision_of("int4", 128),
    "int8": precision_of("int8", 32),
    "fp8": precision_of("fp8", 32),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=PRECISIONS)
def precision(request) -> Precision:
    return PRECISIONS[request.param]


def random_weight(
    dtype: torch.dtype = torch.bfloat16, rows: int = 24, columns: int = 256
) -> Tensor:
    """Normal values, each row of another size, and some outliers."""
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) * torch.logspace(-3, 1, rows)[:, None]
    weight[::3, 5] *= 8
    return weight.to(dtype)


def read(parts: dict[str, Tensor], precision: Precision, dtype: torch.dtype) -> Tensor:
    if precision.name == "int4":
        group = parts["values"].shape[1] * 8 // parts["scale"].shape[1]
        return unpack.int_rows(parts, (1, group), dtype)
    if precision.name == "int8":
        return unpack.int8_rows(parts["values"], parts["scale"], dtype)
    return unpack.fp8(parts["values"], parts["scale"], (1, parts["values"].shape[1]), dtype)


def plainly_rounded(weight: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """To nearest, group by group: values on the grid [R, C] and scales [R, G]."""
    size = precision.group_size or weight.shape[1]
    values = torch.zeros(weight.shape)
    scales = torch.zeros(len(weight), weight.shape[1] // size)
    half_width = {"int4": 7.5, "int8": 127.5, "fp8": 448.0}[precision.name]
    for row in range(len(weight)):
        for group in range(scales.shape[1]):
            columns = slice(group * size, (group + 1) * size)
            part = weight[row, columns].float()
            scale = (part.abs().max() / half_width).to(precision.scale_dtype).float()
            steps = part / scale
            if precision.name == "fp8":
                values[row, columns] = steps.clamp(-448, 448).to(torch.float8_e4m3fn).float()
            else:
                limits = (-8, 7) if precision.name == "int4" else (-128, 127)
                values[row, columns] = steps.round().clamp(*limits)
            scales[row, group] = scale
    return values, scales.to(precision.scale_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nearest_stores_what_the_plain_definition_says(precision, dtype):
    weight = random_weight(dtype)
    values, scales = plainly_rounded(weight, precision)
    found = pack(weight, precision, is_searched=False).parts
    assert same_bits(found["scale"], scales)
    if precision.name == "int4":
        assert torch.equal(found["values"], to_words(values.int() + 8, 1))
    else:
        assert torch.equal(found["values"].float(), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_searched", [False, True])
def test_the_error_told_is_that_of_what_is_read(precision, dtype, is_searched):
    weight = random_weight(dtype)
    packed = pack(weight, precision, is_searched=is_searched)
    difference = read(packed.parts, precision, dtype).double() - weight.double()
    assert packed.squared_error == pytest.approx(float(difference.square().sum()), rel=1e-4)
    assert packed.squared_norm == pytest.approx(float(weight.double().square().sum()), rel=1e-6)


def test_nearest_is_within_half_a_step_of_the_weight(precision):
    """And the rounding of the scale, by which the largest value can miss the edge of the grid."""
    weight = random_weight(torch.float32)
    parts = pack(weight, precision, is_searched=False).parts
    found = read(parts, precision, torch.float32)
    scales = parts["scale"].float().repeat_interleave(weight.shape[1] // parts["scale"].shape[1], 1)
    steps = scales
    if precision.name == "fp8":  # 3 bits after the leading one; below 2 ** -6 steps of 2 ** -9
        steps = scales * 2.0 ** ((weight / scales).abs().clamp(min=2.0**-6).log2().floor() - 3)
    rounding = torch.finfo(precision.scale_dtype).eps * weight.abs()
    assert bool(((found - weight).abs() <= steps / 2 * (1 + 1e-5) + 1.5 * rounding).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "outliers", "uniform", "equal", "steps", "few bits"])
def test_search_is_never_worse_than_nearest_in_any_group(precision, dtype, kind):
    torch.manual_seed(0)
    weight = {
        "normal": torch.randn(64, 256),
        "outliers": torch.randn(64, 256) ** 5,
        "uniform": torch.rand(64, 256) - 0.5,
        "equal": torch.ones(64, 256) * torch.randn(64, 1),
        "steps": torch.randint(-8, 8, (64, 256)) * torch.rand(64, 1),
        "few bits": torch.randint(-2, 3, (64, 256)).float(),
    }[kind].to(dtype)
    errors = []
    for is_searched in (True, False):
        parts = pack(weight, precision, is_searched=is_searched).parts
        found = read(parts, precision, dtype).float() - weight.float()
        groups = found.view(-1, precision.group_size or weight.shape[1])
        errors.append(groups.double().square().sum(1))
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())
    if kind == "normal":
        assert (
            errors[0].sum()
            < {"int4": 0.87, "int8": 1.0, "fp8": 0.97}[precision.name] * errors[1].sum()
        )


@pytest.mark.parametrize("is_searched", [False, True])
def test_a_group_of_zeros_is_read_as_zeros(precision, is_searched):
    weight = random_weight()
    weight[3] = 0
    packed = pack(weight, precision, is_searched=is_searched)
    assert not read(packed.parts, precision, torch.bfloat16)[3].any()
    assert packed.squared_error < 0.02 * packed.squared_norm


@pytest.mark.parametrize("size", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("is_searched", [False, True])
def test_tiny_and_huge_weights_are_rounded_as_finely(precision, size, is_searched):
    weight = random_weight(torch.float32)
    parts = pack(weight * size, precision, is_searched=is_searched).parts
    found = read(parts, precision, torch.float32) / size
    ordinary = read(
        pack(weight, precision, is_searched=is_searched).parts, precision, torch.float32
    )
    assert (found - weight).norm() <= 1.01 * (ordinary - weight).norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_shows_in_the_norm(precision, value):
    weight = random_weight()
    weight[5, 7] = value
    norm = pack(weight, precision, is_searched=True).squared_norm
    assert not torch.tensor(norm).isfinite()


@pytest.mark.parametrize("chunk_values", [1, 1000, 3000])
def test_chunks_of_any_size_give_the_same_bits(precision, chunk_values, monkeypatch):
    weight = random_weight()
    expected = pack(weight, precision, is_searched=True).parts
    monkeypatch.setattr(module, "CHUNK_VALUES", chunk_values)
    found = pack(weight, precision, is_searched=True).parts
    for suffix, part in expected.items():
        assert torch.equal(found[suffix].view(torch.uint8), part.view(torch.uint8)), suffix


def test_parts_have_the_layout_that_was_promised(precision):
    names = {
        torch.int32: "I32", torch.bfloat16: "BF16", torch.float32: "F32", torch.int8: "I8",
        torch.float8_e4m3fn: "F8_E4M3",
    }  # fmt: skip
    parts = pack(random_weight(), precision, is_searched=False).parts
    found = {role: (names[part.dtype], tuple(part.shape)) for role, part in parts.items()}
    assert found == precision.layout((24, 256))


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_int8_value_is_its_scale_times_itself_in_the_dtype_of_the_scale(scale_dtype, dtype):
    weight = torch.arange(-128, 128).to(torch.int8).repeat(7, 1)
    scales = (torch.rand(7, 1) * torch.logspace(-3, 1, 7)[:, None]).to(scale_dtype)
    expected = (weight.to(scale_dtype) * scales).to(dtype)
    assert same_bits(unpack.int8_rows(weight, scales, dtype), expected)
