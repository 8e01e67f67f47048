"""Attention of one query per head is that of float64, within what float32 sums and one rounding
allow, from any cache layout.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_infinity.kernels.cpu.attention import attend

pytestmark = pytest.mark.arithmetic

EPS = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def computed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    out = attend(query, key, value, mask, scale)
    assert out is not None
    return out


def expected(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    query, key, value = query.double(), key.double(), value.double()
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.double()
    return (scores.softmax(-1) @ value.repeat_interleave(groups, 1))[:, :, 0]


def largest_error(found: Tensor, exact: Tensor, value: Tensor) -> float:
    """As a share of the bound: weights are off by 1e-5 of themselves (float32 scores of up to 20,
    two units of the exponential), their sum of values by as much of the largest value; then one
    rounding.
    """
    bound = 2e-5 * value.double().abs().max() + EPS[found.dtype] * exact.abs()
    return float(((found.double() - exact).abs() / bound).max())


def inputs(dtype, *, heads=8, groups=2, tokens=50, width=32, value_width=32, seqs=3):
    query = torch.randn(seqs, heads, 1, width).to(dtype)
    key = torch.randn(seqs, groups, tokens, width).to(dtype)
    return query, key, torch.randn(seqs, groups, tokens, value_width).to(dtype)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 8, "groups": 8},
        {"heads": 6, "groups": 2},  # three queries: a pair and one
        {"heads": 8, "groups": 1, "tokens": 1},
        {"tokens": 16}, {"tokens": 17}, {"tokens": 700, "seqs": 1},
        {"width": 24, "value_width": 16}, {"width": 192, "value_width": 128, "seqs": 1},
        {"width": 16, "value_width": 256},
    ],
)  # fmt: skip
def test_any_shape(shape, dtype):
    query, key, value = inputs(dtype, **shape)
    found = computed(query, key, value, None, 0.3)
    assert found.dtype == dtype
    exact = expected(query, key, value, None, 0.3)
    assert largest_error(found, exact, value) < 1


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("mask_shape", [(1, 1), (3, 1), (3, 8), (1, 8)])
def test_any_mask(mask_shape, kind):
    query, key, value = inputs(torch.float32)
    mask = torch.rand(*mask_shape, 1, 50) > 0.4
    if kind == "added":
        mask = torch.randn(*mask_shape, 1, 50).masked_fill(mask, torch.finfo(torch.float32).min)
    found = computed(query, key, value, mask, 0.3)
    assert largest_error(found, expected(query, key, value, mask, 0.3), value) < 1
    unmasked = expected(query, key, value, None, 0.3)
    assert largest_error(found, unmasked, value) > 100


def test_what_is_masked_is_nothing_and_all_masked_gives_zeros():
    query, key, value = inputs(torch.float32)
    mask = torch.ones(3, 1, 1, 50, dtype=torch.bool)
    mask[0, ..., 7:], mask[1] = False, False
    found = computed(query, key, value, mask, 0.3)
    first = computed(query[:1], key[:1, :, :7], value[:1, :, :7], None, 0.3)
    assert torch.equal(found[:1], first)
    assert not found[1].any()


def test_scores_may_be_as_far_apart_as_they_like():
    query, key, value = inputs(torch.float32)
    for scale in (1e-6, 10.0, 1e4):
        found = computed(query, key, value, None, scale)
        exact = expected(query, key, value, None, scale)
        assert largest_error(found, exact, value) < max(1, scale / 3)  # scores are off by as much


def test_a_cache_is_read_where_it_lies():
    query, key, value = inputs(torch.bfloat16)
    apart = computed(query, key, value, None, 0.3)
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (key, value)]
    longer = [torch.cat([t, torch.full_like(t, torch.nan)], 2)[:, :, :50] for t in (key, value)]
    for there in (by_token, longer):
        assert torch.equal(computed(query, there[0], there[1], None, 0.3), apart)
    shared = [t[:1].expand(3, -1, -1, -1) for t in (key, value)]
    assert torch.equal(computed(query, shared[0], shared[1], None, 0.3)[:1], apart[:1])


@pytest.mark.parametrize("dtype", EPS)
def test_the_bound_rejects_other_heads_tokens_and_scales(dtype):
    query, key, value = inputs(dtype)
    exact = expected(query, key, value, None, 0.3)
    for wrong in (
        computed(query, key.flip(1), value.flip(1), None, 0.3),
        computed(query.roll(1, 1), key, value, None, 0.3),
        computed(query, key, value.roll(1, 2), None, 0.3),
        computed(query, key[:, :, 1:], value[:, :, 1:], None, 0.3),
        computed(query, key, value, None, 0.33),
    ):
        assert largest_error(wrong, exact, value) > 2


def test_what_it_does_not_compute_is_left_to_others():
    query, key, value = inputs(torch.float32)
    assert attend(query.double(), key.double(), value.double(), None, 1.0) is None
    assert attend(query, key, value.bfloat16(), None, 1.0) is None
    assert attend(query, key, value[..., :24], None, 1.0) is None
    assert attend(query, key[..., ::2], value, None, 1.0) is None
    assert attend(query, key[:, :, :0], value[:, :, :0], None, 1.0) is None
    assert attend(query[:, :7], key, value, None, 1.0) is None
    assert attend(query.to("meta"), key.to("meta"), value.to("meta"), None, 1.0) is None
    query, key, value = inputs(torch.float32, width=8)
    assert attend(query, key, value, None, 1.0) is None


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_no_number_shows(number):
    query, key, value = inputs(torch.float32)
    key[0, 1, 20, 5] = number
    query[1, 0, 0, 3] = torch.nan
    found = computed(query, key, value, None, 0.3)
    groups = found.view(3, 2, 4, 32)
    assert not groups[0, 1].isfinite().any() or number == torch.inf
    assert groups[0, 1].isnan().any()
    assert found[1, 0].isnan().all()
    assert groups[0, 0].isfinite().all()
    assert found[2].isfinite().all()


def test_what_is_no_number_may_be_masked():
    query, key, value = inputs(torch.float32)
    mask = torch.ones(3, 1, 1, 50, dtype=torch.bool)
    mask[..., 20] = False
    expected = computed(query, key, value, mask, 0.3)
    key[:, :, 20] = torch.nan
    assert torch.equal(computed(query, key, value, mask, 0.3), expected)


@pytest.mark.parametrize("width", [24, 32, 96])
def test_keys_between_which_others_lie_are_read_right_or_not_at_all(width):
    """A last step that overlaps the one before begins where the row ends."""
    query, key, value = inputs(torch.float32, width=width)
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (key, value)]
    found = attend(query, by_token[0], by_token[1], None, 0.3)
    assert found is None or largest_error(found, expected(query, key, value, None, 0.3), value) < 1
    assert found is not None or width != 32
