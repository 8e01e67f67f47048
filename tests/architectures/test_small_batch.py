"""Steps of few tokens by kernels: linear layers, attention and threads give what they give without,
to rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_infinity import MoE
from moe_infinity.architectures import small_batch
from moe_infinity.architectures.small_batch import MARK, Siblings, SmallBatchSteps
from moe_infinity.kernels.cpu.linear import FusedLinear, fused_linear
from moe_infinity.kernels.many_rows import MOST_TOKENS
from tests.cache_name import CACHE

pytestmark = [pytest.mark.arithmetic, pytest.mark.usefixtures("two_threads")]

DTYPES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("num_tokens", [1, 2, 3, MOST_TOKENS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 32), (48, 33), (1100, 1024)])
def test_a_product_is_that_of_float64_rounded_and_another_row_is_not(shape, dtype, num_tokens):
    weights = [torch.randn(shape).to(dtype), torch.randn(7, shape[1]).to(dtype)]
    x = torch.randn(num_tokens, shape[1]).to(dtype)
    fused = fused_linear(weights)
    assert fused is not None
    found = fused(x)
    expected = x.double() @ torch.cat(weights).double().t()
    assert distance(found, expected) < 1e-4
    assert distance(found.roll(1, dims=1), expected) > 1e-2
    torch.set_num_threads(1)
    assert torch.equal(fused(x), found)


def test_weights_that_kernels_do_not_read():
    good = torch.randn(32, 64)
    for other in (
        good.double(),
        good.t(),
        torch.randn(2, 32, 64),
        torch.randn(32, 80),
        good.to("meta"),
    ):
        assert fused_linear([good, other]) is None
    assert fused_linear([torch.randn(8, 4)]) is None  # too few columns for a step


class Attention(nn.Module):
    """Three layers are given x, the fourth what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
        self.v, self.o = nn.Linear(64, 32), nn.Linear(64, 64)

    def forward(self, x: Tensor, *, is_short: bool = False, factor: float = 1) -> Tensor:
        q = self.q(x)
        if factor != 1:
            x.mul_(factor)
        if not is_short:
            q = q + self.k(x).repeat(1, 1, 2) * self.v(x).repeat(1, 1, 2)
        return self.o(q)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(64, 100, bias=False)

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> Tensor:
        self.num_threads = torch.get_num_threads()
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, **kwargs)
        if inputs_embeds.isnan().any():
            raise ValueError("not a number")
        return self.head(inputs_embeds)


@pytest.fixture
def layers():
    """A model, and one that takes small batches, with the same weights."""
    plain, small = Layers(), Layers()
    small.load_state_dict(plain.state_dict())
    steps = SmallBatchSteps(small, None, "auto")
    with torch.no_grad():
        yield plain, small
    steps.close()


@pytest.fixture
def products(monkeypatch):
    """The number of weights of every call of the kernel."""
    calls: list[int] = []
    call = FusedLinear.__call__

    def counted(self: FusedLinear, x: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
        calls.append(len(self.weights))
        return call(self, x, biases)

    monkeypatch.setattr(FusedLinear, "__call__", counted)
    return calls


def test_layers_that_are_given_one_input_are_computed_together(layers, products):
    plain, small = layers
    for _ in range(4):
        x = torch.randn(1, 2, 64)
        products.clear()
        assert distance(small(x), plain(x)) < 1e-4
    assert products == [3, 1, 3, 1, 1]


@torch.no_grad()
def test_a_layer_that_is_called_twice_joins_its_group_once(products):
    siblings = Siblings()
    first, twice = nn.Linear(64, 64), nn.Linear(64, 64)
    for _ in range(4):
        products.clear()
        x = torch.randn(1, 2, 64)
        for linear in (first, twice, twice):
            assert distance(siblings.forward(linear, x), linear(x)) < 1e-4
    assert products == [2, 1]


@torch.no_grad()
def test_the_input_of_a_prompt_is_not_kept_until_the_next_one(layers):
    _, small = layers
    x = torch.randn(1, 2, 64)
    kept = weakref.ref(x)
    small(x)
    del x
    assert kept() is None


def test_a_layer_that_is_left_out_once_does_not_get_an_old_product(layers):
    plain, small = layers
    x = torch.randn(1, 1, 64)
    for is_short in (False, False, False, True, False, True, True, False):
        x = torch.randn(1, 1, 64)
        assert distance(small(x, is_short=is_short), plain(x, is_short=is_short)) < 1e-4
    x.copy_(torch.randn(1, 1, 64))  # the same object
    assert distance(small(x), plain(x)) < 1e-4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_input_that_is_changed_on_the_way_is_read_anew(layers, mode):
    plain, small = layers
    with mode():
        for factor in (1, 1, 1, 2, 1, 3):
            x = torch.randn(1, 1, 64)
            found, expected = (one(x.clone(), factor=factor) for one in (small, plain))
            assert distance(found, expected) < 1e-4


def test_many_rows_go_to_torch_where_it_is_faster_and_gradients_always(
    layers, products, monkeypatch
):
    plain, small = layers
    x = torch.randn(1, MOST_TOKENS + 1, 64)
    assert distance(small(x), plain(x)) < 1e-4
    assert products
    products.clear()
    monkeypatch.setattr(small_batch, "is_for_torch", lambda *_, **__: True)
    assert torch.equal(small(x), plain(x))
    with torch.enable_grad():
        x = torch.randn(1, 1, 64)
        assert small(x).requires_grad
    assert products == []


def test_weights_that_were_moved_or_cast_are_read_where_they_are(layers, products):
    plain, small = layers
    x = torch.randn(1, 1, 64)
    small(x)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        plain.to(dtype), small.to(dtype)
        assert distance(small(x.to(dtype)), plain(x.to(dtype))) < 2e-2
    with torch.no_grad():
        for layer in (plain, small):
            layer.head.weight = nn.Parameter(-layer.head.weight)
    assert distance(small(x), plain(x)) < 2e-2


def test_torch_has_one_thread_in_a_short_step_and_all_of_them_after_it(layers):
    _, small = layers
    small(torch.randn(1, 1, 64))
    assert (small.num_threads, torch.get_num_threads()) == (1, 2)
    small(inputs_embeds=torch.randn(2, MOST_TOKENS, 64))
    assert (small.num_threads, torch.get_num_threads()) == (2, 2)
    with pytest.raises(ValueError, match="not a number"):
        small(torch.full((1, 1, 64), torch.nan))
    assert (small.num_threads, torch.get_num_threads()) == (1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, "bool", "float", "by head"])
def test_attention_is_that_of_transformers_and_of_no_other_heads(mask, dtype):
    SmallBatchSteps(nn.Module(), None, "auto").close()
    small = ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert small is not sdpa_attention_forward
    module = nn.Module()
    vars(module).update(num_key_value_groups=4, is_causal=True)
    query = torch.randn(3, 8, 1, 32).to(dtype)
    key, value = (torch.randn(3, 2, 50, 32).to(dtype) for _ in range(2))
    attention_mask: Tensor | None = None
    if mask is not None:
        attention_mask = torch.rand(3, 1, 1, 50) > 0.3
        if mask == "by head":
            attention_mask = torch.rand(3, 8, 1, 50) > 0.3
        if mask == "float":
            attention_mask = torch.zeros(3, 1, 1, 50).masked_fill(~attention_mask, -1e4).to(dtype)
    arguments = module, query, key, value, attention_mask
    with torch.inference_mode():
        expected, _ = sdpa_attention_forward(*arguments, dropout=0.0, scaling=0.3)
        assert torch.equal(small(*arguments, dropout=0.0, scaling=0.3)[0], expected)  # not ours yet
        vars(module)[MARK] = True
        found, _ = small(*arguments, dropout=0.0, scaling=0.3, sliding_window=None)
        assert found.shape == expected.shape
        assert distance(found, expected) < DTYPES[dtype]
        others = module, query, key.flip(1), value.flip(1), attention_mask
        assert distance(small(*others, dropout=0.0, scaling=0.3)[0], expected) > 0.1


@pytest.mark.parametrize("of_module", [None, True, False])
@pytest.mark.parametrize("of_call", [None, True, False])
@pytest.mark.parametrize("num_keys", [70, 90])
def test_without_a_mask_prompts_see_what_transformers_shows(of_module, of_call, num_keys):
    SmallBatchSteps(nn.Module(), None, "auto").close()
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]
    module = nn.Module()
    vars(module).update({MARK: True} | ({} if of_module is None else {"is_causal": of_module}))
    query, key = torch.randn(2, 4, 70, 32), torch.randn(2, 4, num_keys, 32)
    value = torch.randn(2, 4, num_keys, 32)
    options = {"scaling": 0.3, "is_causal": of_call}
    with torch.no_grad():
        wanted, _ = sdpa_attention_forward(module, query, key, value, None, **options)
        found, _ = ours(module, query, key, value, None, **options)
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["bool", "float", "by head"])
@pytest.mark.parametrize("num_queries", [2, 16, 64])
def test_a_tail_has_the_bits_of_transformers_without_a_copy_for_each_head(
    num_queries, mask, dtype, monkeypatch
):
    SmallBatchSteps(nn.Module(), None, "auto").close()
    small = ALL_ATTENTION_FUNCTIONS["sdpa"]
    module = nn.Module()
    vars(module).update(num_key_value_groups=4, is_causal=True)
    query = torch.randn(2, 8, num_queries, 32).to(dtype)
    key, value = (torch.randn(2, 2, 700, 32).to(dtype) for _ in range(2))
    attention_mask = torch.ones(2, 8 if mask == "by head" else 1, num_queries, 700).bool()
    attention_mask = attention_mask.tril(700 - num_queries)
    attention_mask[1, :, :, :5] = False  # padding
    if mask == "float":
        attention_mask = torch.zeros(attention_mask.shape).masked_fill(~attention_mask, -1e4)
        attention_mask = attention_mask.to(dtype)
    arguments = module, query, key, value, attention_mask
    with torch.inference_mode():
        expected, _ = sdpa_attention_forward(*arguments, dropout=0.0, scaling=0.3)
        vars(module)[MARK] = True
        copy = Mock(side_effect=lambda x, times: x)
        monkeypatch.setattr(sdpa_attention, "repeat_kv", copy)
        found, _ = small(*arguments, dropout=0.0, scaling=0.3, sliding_window=None)
        assert torch.equal(found, expected)
        assert found.is_contiguous()
        assert copy.call_count == 0
        with pytest.raises((ValueError, RuntimeError)):  # left to transformers
            small(*arguments, dropout=0.1, scaling=0.3)
        assert copy.call_count == 2


def test_a_model_takes_small_batches_unless_it_is_exact_and_stops_when_it_is_closed(
    tiny_checkpoint, products
):
    ids = torch.arange(5, 45)[None]
    logits = {}
    for is_exact in (True, False):
        with (
            MoE(tiny_checkpoint, exact=is_exact, dtype="float32") as moe,
            torch.no_grad(),
        ):
            cache = moe.model(ids[:, :30], use_cache=True).past_key_values
            logits[is_exact] = [
                moe.model(ids[:, at : at + 1], **{CACHE: cache}, use_cache=True).logits
                for at in range(30, 40)
            ]
        assert bool(products) == (not is_exact)
    assert distance(torch.cat(logits[False]), torch.cat(logits[True])) < 1e-4
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("way", [{"generate": {"max_new_tokens": 2}}, {"model": {}}], ids=str)
def test_torch_has_its_threads_again_after_ctrl_c(tiny_checkpoint, monkeypatch, way):
    """For which torch calls no hook."""

    def press(*_: Any) -> None:
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt

    with MoE(tiny_checkpoint, device="cpu") as moe:
        monkeypatch.setattr(moe.engine, "layer", press)
        ((call, options),) = way.items()
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            getattr(moe, call)(torch.tensor([[5]]), **options)
        assert torch.get_num_threads() == 2
