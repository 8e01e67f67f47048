"""Queries with a mask are attended block by block: this gives what all at once give, without a
number of the mask or a score for each pair.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_infinity.architectures.small_batch import MARK, SmallBatchSteps
from moe_infinity.kernels.cpu.attention import KEYS, QUERIES, as_wide_as, attend_grouped

pytestmark = pytest.mark.arithmetic
SCALE = 0.3
# Of the largest value: in half precision two last bits, as each side is rounded.
EPS = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def causal(num_queries: int, num_keys: int) -> Tensor:
    """The mask of the last queries of so many tokens."""
    return torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def windowed(num_queries: int, num_keys: int) -> Tensor:
    mask = causal(num_queries, num_keys)
    return mask.triu(num_keys - num_queries - 99)


def padded(num_queries: int, num_keys: int) -> Tensor:
    mask = causal(num_queries, num_keys).repeat(2, 1, 1, 1)
    mask[1, :, :, :5] = False
    return mask


def by_head(num_queries: int, num_keys: int) -> Tensor:
    return padded(num_queries, num_keys).repeat(1, 8, 1, 1)


def of_numbers(num_queries: int, num_keys: int) -> Tensor:
    return torch.zeros(1).masked_fill(~causal(num_queries, num_keys), -1e4)


def of_all_queries(num_queries: int, num_keys: int) -> Tensor:
    """Padding at the end of what each query may see."""
    return torch.arange(num_keys)[None, None, None] < max(num_keys - KEYS - 7, 1)


MASKS = (causal, windowed, padded, by_head, of_numbers, of_all_queries)


def inputs(num_queries: int, num_keys: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = (2, 8, num_queries, 32), (2, 2, num_keys, 32), (2, 2, num_keys, 32)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("mask_of", MASKS)
@pytest.mark.parametrize(
    "shape",
    [(2, 3), (QUERIES, 2 * KEYS), (2 * QUERIES - 1, 3000), (3 * QUERIES + 70, 3 * QUERIES + 70)],
)
def test_blocks_give_what_the_whole_gives(shape, mask_of, dtype):
    num_queries, num_keys = shape
    query, key, value = inputs(num_queries, num_keys, dtype)
    mask = mask_of(num_queries, num_keys)
    if mask.dtype != torch.bool:
        mask = mask.to(dtype)
    whole = functional.scaled_dot_product_attention(
        query, key.repeat_interleave(4, 1), value.repeat_interleave(4, 1), mask, scale=SCALE
    )
    found = attend_grouped(query, key, value, mask, SCALE)
    assert found is not None
    assert found.is_contiguous()
    difference = (found - whole.transpose(1, 2)).abs().max()
    assert difference <= EPS[dtype] * whole.abs().max()
    wrong = attend_grouped(query, key, value.roll(1, 2), mask, SCALE)
    assert wrong is not None
    assert (wrong - whole.transpose(1, 2)).abs().max() > 4 * EPS[dtype] * whole.abs().max()


def test_torch_never_gets_the_whole_mask_nor_keys_that_nobody_sees(monkeypatch):
    pairs = []
    attend = functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
        pairs.append((query.shape[2], key.shape[2], key.stride(1)))
        assert mask.shape == (1, 1, query.shape[2], key.shape[2])
        return attend(query, key, value, mask, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    num_queries = 3 * QUERIES + 100
    num_keys = num_queries + 200
    query, key, value = inputs(num_queries, num_keys, torch.float32)
    mask = causal(num_queries, num_keys)
    mask[..., 7] = False  # else it is no mask for torch
    found = attend_grouped(query, key, value, mask.repeat(2, 1, 1, 1), SCALE)  # of each sequence
    assert pairs == [
        (QUERIES, 2 * KEYS, 0), (QUERIES, 3 * KEYS, 0), (QUERIES, num_keys, 0),
        (100, num_keys, 0),
    ] * 2  # fmt: skip
    copies = (key.repeat_interleave(4, 1), value.repeat_interleave(4, 1))
    whole = attend(query, *copies, mask, scale=SCALE)
    assert found is not None
    assert torch.allclose(found, whole.transpose(1, 2), atol=1e-6)


@pytest.mark.parametrize("mask", [None, causal(60, 60)], ids=["first", "masked"])
def test_values_that_are_narrower_than_keys_get_zeros(mask, monkeypatch):
    """As in DeepSeek's: torch would have the scores of all pairs in memory."""
    SmallBatchSteps(nn.Module(), None, "auto").close()
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]
    module = nn.Module()
    vars(module).update({"is_causal": True, MARK: True})
    query, key = torch.randn(2, 2, 4, 60, 48)
    value = torch.randn(2, 4, 60, 32)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=SCALE)
    stock = Mock(side_effect=sdpa_attention_forward)
    monkeypatch.setattr(ours, "_stock", stock)
    with torch.no_grad():
        found, _ = ours(module, query, key, value, mask, scaling=SCALE)
    assert [call.args[3].shape[3] for call in stock.call_args_list] == [48] * (mask is None)
    wide = as_wide_as(key, value)
    assert wide.shape == key.shape
    assert torch.equal(wide[..., :32], value)
    assert not wide[..., 32:].any()
    assert as_wide_as(value, key) is key
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_mask_of_another_length_and_queries_without_one_are_left_to_transformers():
    query, key, value = inputs(20, 30, torch.float32)
    assert attend_grouped(query, key, value, None, SCALE) is None
    assert attend_grouped(query, key, value, causal(20, 30)[..., :1], SCALE) is None
