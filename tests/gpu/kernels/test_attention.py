"""Attention of new tokens to the cache, Triton's kernels against their reference, and that against
PyTorch's own attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity.gpu.kernels import descriptions, reference
from tests.gpu.kernels.attention_case import DEVICE, AttentionCase

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.gpu.kernels import attention as triton_attention

pytestmark = [pytest.mark.triton]

EPS = torch.finfo(torch.float32).eps
CASES: dict[str, dict[str, Any]] = {
    "first token": {"num_tokens": 1, "num_seqs": 3},
    "two tokens": {"num_tokens": 2, "per_group": 1, "has_sinks": True},
    "before a chunk ends": {"num_tokens": 63, "padding": (10,)},
    "a whole chunk": {"num_tokens": 64, "num_seqs": 3, "padding": (0, 3, 63)},
    "a chunk begins": {"num_tokens": 65, "window": 64, "per_group": 8},
    "a window of one": {"num_tokens": 65, "window": 1, "has_sinks": True},
    "a chunk of padding": {"num_tokens": 140, "num_seqs": 2, "padding": (70, 139)},
    "softcap": {"num_tokens": 140, "softcap": 1.5, "scale": 1.0},
    "padding before a window": {
        "num_tokens": 700, "window": 300, "padding": (0, 500, 699), "num_seqs": 3,
    },
    "gpt-oss": {
        "num_tokens": 200, "window": 128, "has_sinks": True, "per_group": 8, "width": 64,
        "value_width": 64, "num_seqs": 3,
    },
    "latent": {
        "num_tokens": 90, "per_group": 1, "groups": 3, "width": 192, "value_width": 128,
        "is_view": True,
    },
    "absorbed": {"num_tokens": 40, "groups": 1, "per_group": 20, "width": 576, "value_width": 512},
    "odd widths": {
        "num_tokens": 70, "width": 80, "value_width": 96, "is_view": True, "num_seqs": 3,
        "per_group": 1,
    },
    "narrow": {"num_tokens": 70, "width": 6, "value_width": 10},
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]
# Rows that wide fit into the shared memory of every GPU only in 16 bits.
KINDS = [
    (name, dtype)
    for name in CASES
    for dtype in DTYPES
    if name != "absorbed" or dtype is not torch.float32
]


@pytest.fixture(autouse=True)
def few_splits(monkeypatch):
    """Programs run one after the other. Some splits have no chunk, some two."""
    if DEVICE == "cpu":
        monkeypatch.setattr(descriptions, "MAX_SPLITS", 4)


def triton_case(**changes: Any) -> AttentionCase:
    return AttentionCase(**changes, device=DEVICE)


def largest_error(found: Tensor, case: AttentionCase) -> float:
    """As a share of the bound, which is for each column the weighted mean of the sizes of values
    times what is rounded: weights and the result, each by half an eps of the dtype, and scores,
    which are below 40 and each a sum of so many products.
    """
    expected, *_ = case.changed(dtype=torch.float32).compute(reference.attend)
    sizes = case.changed(dtype=torch.float32)
    for name in ("value", "values"):
        sizes.tensors[name] = sizes.tensors[name].abs()
    size, *_ = sizes.compute(reference.attend)
    rounding = EPS * (40 + case.width) + torch.finfo(case.dtype).eps
    return float(((found.float() - expected).abs() / (size * rounding + 1e-30)).max())


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_attention_is_its_reference_but_for_rounding(name, dtype):
    case = triton_case(**CASES[name], dtype=dtype)
    found, *memories = case.compute(triton_attention.attend)
    assert largest_error(found, case) < 1
    for memory, expected in zip(memories, case.with_new_token(), strict=True):
        assert same_bits(memory, expected)


@pytest.mark.parametrize("name", ["gpt-oss", "odd widths"])
def test_every_token_and_setting_counts(name):
    """The bound of the test above is smaller than what it is for."""
    case = AttentionCase(**CASES[name])
    found, *_ = case.compute(reference.attend)
    assert largest_error(found, case) == 0
    window = case.window or case.num_tokens
    for changes in (
        {"window": window - 1},
        {"softcap": 20.0},
        {"has_sinks": not case.has_sinks},
        {"padding": (case.num_tokens - window + 1,) * case.num_seqs},
        {"scale": 1.01 * case.scale},
    ):
        other, *_ = case.changed(**changes).compute(reference.attend)
        assert largest_error(other, case) > 2, changes


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_gets_the_same_bits_alone(dtype):
    case = triton_case(num_seqs=2, num_tokens=70, padding=(3, 65), dtype=dtype, has_sinks=True)
    found, *_ = case.compute(triton_attention.attend)
    for seq in range(2):
        alone, *_ = case.only(seq).compute(triton_attention.attend)
        assert torch.equal(alone[0], found[seq])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 8])
def test_bits_do_not_depend_on_the_buffers(offset, dtype):
    """How large they are, and where they lie."""
    case = triton_case(num_tokens=140, dtype=dtype)
    found, *_ = case.compute(triton_attention.attend)
    moved = case.changed(offset=offset, capacity=37)
    again, *memories = moved.compute(triton_attention.attend)
    assert torch.equal(again, found)
    for memory, expected in zip(memories, moved.with_new_token(), strict=True):
        assert same_bits(memory, expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_a_number_stays_so():
    case = triton_case(num_tokens=70)
    case.tensors["query"][0, 1] = torch.nan
    case.tensors["values"][0, 1, 3, 5] = torch.inf
    found, *_ = case.compute(triton_attention.attend)
    expected, *_ = case.changed(device="cpu").compute(reference.attend)
    assert expected.isnan().any()
    assert torch.equal(found.isfinite(), expected.isfinite())


def test_splits_are_enough_programs_for_any_number_of_heads(monkeypatch):
    monkeypatch.undo()
    for groups, splits in ((1, 64), (2, 64), (8, 64), (12, 32), (16, 32), (96, 8), (128, 8)):
        query, value = torch.zeros(1, 2 * groups, 128), torch.zeros(1, groups, 128)
        assert descriptions.shape_of(query, value, False).splits == splits


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].get("softcap") is None])
def test_the_reference_is_what_pytorch_computes(name):
    case = AttentionCase(**CASES[name])
    found, *_ = case.compute(reference.attend)
    keys, values = case.rows("key"), case.rows("value")
    is_seen_BN = torch.ones(case.num_seqs, case.num_tokens, dtype=torch.bool)
    for seq, num_padded in enumerate(case.padding):
        is_seen_BN[seq, :num_padded] = False
    if case.window is not None:
        is_seen_BN[:, : max(case.num_tokens - case.window, 0)] = False
    is_seen_BN[:, -1] = True
    query = case.tensors["query"][:, :, None]
    bias = torch.zeros(is_seen_BN.shape).masked_fill(~is_seen_BN, -torch.inf)[:, None, None]
    if case.has_sinks:  # a token more, whose key gives no score and whose value is 0
        bias = torch.cat(
            (bias.expand(-1, query.shape[1], -1, -1), torch.zeros(len(bias), query.shape[1], 1, 1)),
            -1,
        )
        bias[..., -1] = case.tensors["sinks"][None, :, None]
        keys, values = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=bias, scale=case.scale, enable_gqa=True
    )
    torch.testing.assert_close(found, expected[:, :, 0])


def test_softcap_is_a_tanh_of_scores():
    """Against numbers that are written out."""
    case = AttentionCase(num_tokens=9, softcap=0.7, groups=1, per_group=1)
    found, *_ = case.compute(reference.attend)
    keys, values = case.rows("key")[0, 0], case.rows("value")[0, 0]
    scores = [float(case.tensors["query"][0, 0] @ key) * case.scale for key in keys]
    weights = (0.7 * (torch.tensor(scores) / 0.7).tanh()).exp()
    torch.testing.assert_close(found[0, 0], weights @ values / weights.sum())
