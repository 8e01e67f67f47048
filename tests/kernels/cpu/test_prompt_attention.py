"""Attention of many queries is that of float64, within what the weights' rounding allows, and the
bits of a query depend on what it sees, and not on the other queries.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_infinity.kernels.cpu import prompt_attention
from moe_infinity.kernels.cpu.attention import attend_grouped
from moe_infinity.kernels.cpu.prompt_attention import attend_prompt, bounds_of, causal_bounds

pytestmark = pytest.mark.arithmetic

# Of the largest value: sums in float32; where bfloat16 is multiplied, weights have 8 bits.
SUMS = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 2**-8}
EPS = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SCALE = 0.3


def inputs(
    dtype, *, heads=6, groups=2, queries=70, tokens=150, width=32, value_width=48, seqs=2
) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(seqs, heads, queries, width).to(dtype)
    key = torch.randn(seqs, groups, tokens, width).to(dtype)
    return query, key, torch.randn(seqs, groups, tokens, value_width).to(dtype)


def causal(queries: int, tokens: int, window: int | None = None) -> Tensor:
    """[1, 1, T, N], for the last tokens."""
    last = torch.arange(queries)[:, None] + tokens - queries
    places = torch.arange(tokens)
    seen = places <= last
    return (seen if window is None else seen & (places > last - window))[None, None]


def expected(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks_H=None) -> Tensor:
    per_group = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(per_group, 1) for each in (key, value))
    scores = (query.double() @ key.transpose(2, 3) * SCALE).masked_fill(~mask, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


def computed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks_H=None) -> Tensor:
    bounds = bounds_of(mask, query.shape[2], key.shape[2])
    assert bounds is not None
    out = attend_prompt(query, key, value, bounds, SCALE, sinks_H)
    assert out is not None
    assert out.dtype == query.dtype
    return out


def largest_error(found: Tensor, exact: Tensor, value: Tensor) -> float:
    """As a share of the bound."""
    bound = SUMS[found.dtype] * value.double().abs().max() + EPS[found.dtype] * exact.abs()
    return float(((found.double() - exact).abs() / bound).max())


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(
    "shape",
    [
        {}, {"heads": 1, "groups": 1}, {"heads": 5, "groups": 1}, {"heads": 32, "groups": 4},
        {"queries": 1, "tokens": 1}, {"queries": 64, "tokens": 64}, {"queries": 65, "tokens": 65},
        {"queries": 300, "tokens": 300, "seqs": 1}, {"queries": 7, "tokens": 1031},
        {"width": 2}, {"width": 192, "value_width": 128, "seqs": 1}, {"value_width": 16},
        {"value_width": 80}, {"value_width": 512, "seqs": 1}, {"width": 576, "value_width": 64},
    ],
)  # fmt: skip
def test_any_shape(shape, dtype):
    query, key, value = inputs(dtype, **shape)
    mask = causal(query.shape[2], key.shape[2])
    exact = expected(query, key, value, mask)
    assert largest_error(computed(query, key, value, mask), exact, value) < 1


def left_padded() -> Tensor:
    seen = causal(70, 150).repeat(2, 1, 1, 1)
    seen[1, ..., :90] = seen[1, ..., :90] & (torch.arange(90) > 33)
    return seen


MASKS = {
    "causal": causal(70, 150),
    "window": causal(70, 150, 40),
    "window of one": causal(70, 150, 1),
    "all": torch.ones(1, 1, 70, 150, dtype=torch.bool),
    "padding": torch.ones(2, 1, 1, 150, dtype=torch.bool)
    & (torch.arange(150) > torch.tensor([0, 60])[:, None, None, None]),
    "padding, causal": left_padded(),
}


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_any_band_of_keys(name, is_added):
    query, key, value = inputs(torch.float32)
    seen = MASKS[name]
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(seen.shape).masked_fill(~seen, lowest) if is_added else seen
    exact = expected(query, key, value, seen)
    found = computed(query, key, value, mask)
    assert largest_error(found, exact, value) < 1
    if name != "all":
        everything = torch.ones_like(seen)
        assert largest_error(found, expected(query, key, value, everything), value) > 100


@pytest.mark.parametrize("is_added", [False, True])
def test_a_query_that_sees_nothing_gets_zeros_and_the_others_what_they_see(is_added):
    """As queries of padding in a batch: transformers' masks have empty rows for them."""
    seen = causal(70, 70).repeat(2, 1, 1, 1)
    seen[1, ..., :30] = False
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(seen.shape).masked_fill(~seen, lowest) if is_added else seen
    query, key, value = inputs(torch.float32, tokens=70)
    found = computed(query, key, value, mask)
    assert not found[1, :30].any()
    for seq, start in ((0, 0), (1, 30)):
        own = [each[seq : seq + 1, :, start:] for each in (query, key, value)]
        exact = expected(own[0], own[1], own[2], causal(70 - start, 70 - start))
        assert largest_error(found[seq : seq + 1, start:], exact, value) < 1


def test_what_is_no_number_shows():
    query, key, value = inputs(torch.float32)
    query[0, 0, 3], key[0, 1, 20, 5], value[1, 1, 9, 7] = torch.nan, torch.nan, torch.nan
    found = computed(query, key, value, MASKS["causal"])
    assert found[0, 3, 0].isnan().all()
    assert found[0, :, 3:].isnan().all()  # the heads of that group
    assert found[1, :, 3:, 7].isnan().all()
    assert found[0, 4:, :3].isfinite().all()


@pytest.mark.parametrize("height", [-30.0, 0.0, 30.0])
def test_sinks_take_their_share(height):
    query, key, value = inputs(torch.float32)
    sinks_H = torch.randn(6) + height
    found = computed(query, key, value, MASKS["window"], sinks_H)
    exact = expected(query, key, value, MASKS["window"], sinks_H)
    assert largest_error(found, exact, value) < 1


def test_scores_may_be_as_far_apart_as_they_like():
    query, key, value = inputs(torch.float32)
    for factor in (1e-6, 30.0, 3000.0):
        exact = expected(query * factor, key, value, MASKS["causal"])
        found = computed(query * factor, key, value, MASKS["causal"])
        assert largest_error(found, exact, value) < max(1, factor)  # scores are off by as much


@pytest.mark.parametrize("dtype", EPS)
def test_a_query_has_the_same_bits_in_any_pass(dtype):
    query, key, value = inputs(dtype, queries=600, tokens=600, seqs=1)
    whole = computed(query, key, value, causal(600, 600))
    for start, end in ((0, 100), (100, 101), (101, 470), (470, 600)):
        x = query[:, :, start:end]
        found = computed(x, key[:, :, :end], value[:, :, :end], causal(end - start, end))
        assert torch.equal(found, whole[:, start:end])
    more = torch.full((1, 2, 37, 32), torch.nan, dtype=dtype)  # keys that nobody sees
    keys = torch.cat([key, more], 2)
    values = torch.cat([value, torch.zeros(1, 2, 37, 48, dtype=dtype)], 2)
    mask = torch.nn.functional.pad(causal(600, 600), (0, 37))
    assert torch.equal(computed(query, keys, values, mask), whole)


def test_groups_are_computed_in_slices_where_they_are_large(monkeypatch):
    query, key, value = inputs(torch.float32, heads=15, groups=5)
    sinks_H = torch.randn(15)
    whole = computed(query, key, value, MASKS["causal"], sinks_H)
    monkeypatch.setattr(prompt_attention, "PACKED_NUMBERS", 2 * (150 * 80 + 70 * 3 * 32))
    assert torch.equal(computed(query, key, value, MASKS["causal"], sinks_H), whole)


def test_a_cache_is_read_however_it_lies():
    query, key, value = inputs(torch.bfloat16)
    apart = computed(query, key, value, MASKS["causal"])
    x, keys, values = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    assert torch.equal(computed(x, keys, values, MASKS["causal"]), apart)
    keys, values = (t[:1].expand(2, -1, -1, -1) for t in (key, value))
    assert torch.equal(computed(query, keys, values, MASKS["causal"])[:1], apart[:1])


@pytest.mark.parametrize("dtype", EPS)
def test_the_bound_rejects_other_heads_tokens_and_scales(dtype):
    query, key, value = inputs(dtype)
    mask = MASKS["causal"]
    exact = expected(query, key, value, mask)
    for wrong in (
        computed(query, key.flip(1), value.flip(1), mask),
        computed(query.roll(1, 1), key, value, mask),
        computed(query, key, value.roll(1, 2), mask),
        computed(query, key, value, causal(71, 150)[:, :, :70]),
        computed(query * 1.1, key, value, mask),
    ):
        assert largest_error(wrong, exact, value) > 2


@pytest.mark.parametrize(
    "mask",
    [
        causal(70, 150).repeat(1, 6, 1, 1),
        causal(70, 150)[0],
        causal(70, 149),
        causal(70, 150) & (torch.arange(150) != 7),
        torch.zeros(1, 1, 70, 150).masked_fill(~causal(70, 150), -1.0),
    ],
    ids=["by head", "of three dimensions", "shorter", "a gap", "added numbers"],
)
def test_masks_that_are_no_bands_are_left_to_others(mask):
    assert bounds_of(mask, 70, 150) is None


def test_what_it_does_not_compute_is_left_to_others():
    query, key, value = inputs(torch.float32, queries=150)
    bounds = causal_bounds(150)
    assert attend_prompt(query.double(), key.double(), value.double(), bounds, 1.0) is None
    assert attend_prompt(query, key, value.bfloat16(), bounds, 1.0) is None
    assert attend_prompt(query, key, value[..., :24], bounds, 1.0) is None
    assert attend_prompt(query[..., :31], key[..., :31], value, bounds, 1.0) is None
    assert attend_prompt(query[:, :5], key, value, bounds, 1.0) is None
    assert attend_prompt(query, key[:, :, 1:], value, bounds, 1.0) is None
    meta = torch.device("meta")
    assert attend_prompt(query.to(meta), key.to(meta), value.to(meta), bounds, 1.0) is None


def test_without_a_mask_the_module_says_what_is_seen():
    query, key, value = inputs(torch.float32, queries=150)
    square = attend_grouped(query, key, value, None, SCALE, is_causal=True)
    assert square is not None
    assert torch.equal(square, computed(query, key, value, causal(150, 150)))
    everything = attend_grouped(query, key, value, None, SCALE, is_causal=False)
    assert everything is not None
    assert torch.equal(everything, computed(query, key, value, torch.ones(1, 1, 150, 150) > 0))
    assert attend_grouped(query, key, value, None, SCALE) is None
    assert attend_grouped(query[:, :, 1:], key, value, None, SCALE, is_causal=True) is None
