"""A token of linear attention by the kernel is that of plain operations in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moe_infinity.kernels.cpu.delta_rule import DeltaShape, DeltaWeights, delta_step

pytestmark = [pytest.mark.arithmetic, pytest.mark.usefixtures("two_threads")]

EPS = 1e-6


def apart(heads: int, per_head: int, key: int, value: int, taps: int) -> DeltaShape:
    """Queries of all heads, then keys, values, z, b and a."""
    keys, values = heads * key, heads * per_head * value
    a = 2 * keys + 2 * values + heads * per_head
    return DeltaShape(
        heads, per_head, key, value, taps,
        0, key, keys, key, 2 * keys, per_head * value, 2 * keys + values, per_head * value,
        a - heads * per_head, per_head, a, per_head,
    )  # fmt: skip


def random_weights(shape: DeltaShape, dtype: torch.dtype, *, has_bias: bool) -> DeltaWeights:
    return DeltaWeights(
        convolution=torch.randn(shape.num_channels, 1, shape.taps).to(dtype),
        bias=torch.randn(shape.num_channels).to(dtype) if has_bias else None,
        decay=torch.rand(shape.num_value_heads),
        dt=torch.randn(shape.num_value_heads),
        norm=torch.randn(shape.value_width),
        norm_eps=EPS,
    )


def plain(
    shape: DeltaShape, weights: DeltaWeights, x: Tensor, window: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for products that lie apart: output, window, state, in float64."""
    num_seqs = len(x)
    keys = shape.num_key_heads * shape.key_width
    values = shape.num_value_heads * shape.value_width
    sizes = [2 * keys + values, values, shape.num_value_heads, shape.num_value_heads]
    new, z, b, a = x.double().split(sizes, dim=1)
    inputs = torch.cat([window.double(), new[:, :, None]], dim=2)
    window = inputs[:, :, 1:]
    taps = weights.convolution.double()[:, 0]
    mixed = (inputs[:, :, -shape.taps :] * taps).sum(2)
    if weights.bias is not None:
        mixed = mixed + weights.bias.double()
    query, key, value = functional.silu(mixed).split([keys, keys, values], dim=1)

    def heads(vectors: Tensor) -> Tensor:
        vectors = vectors.view(num_seqs, shape.num_key_heads, shape.key_width)
        vectors = vectors * torch.rsqrt(vectors.square().sum(2, keepdim=True) + 1e-6)
        return vectors.repeat_interleave(shape.per_key_head, dim=1)

    query = heads(query) * shape.key_width**-0.5
    key = heads(key)
    value = value.view(num_seqs, -1, shape.value_width)
    decay = torch.exp(-weights.decay.double().exp() * functional.softplus(a + weights.dt.double()))
    state = state.double() * decay[:, :, None, None]
    wrong = value - torch.einsum("bhkv,bhk->bhv", state, key)
    state = state + torch.einsum("bhk,bhv,bh->bhkv", key, wrong, b.sigmoid())
    out = torch.einsum("bhkv,bhk->bhv", state, query)
    out = out * torch.rsqrt(out.square().mean(2, keepdim=True) + EPS) * weights.norm.double()
    return out.flatten(1) * functional.silu(z), window, state


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize(
    ("sizes", "window_width", "has_bias"),
    [((2, 2, 32, 16, 4), 4, False), ((3, 1, 8, 20, 3), 5, True), ((1, 4, 5, 7, 4), 3, False)],
)
def test_a_token_is_that_of_float64(sizes, window_width, has_bias, num_seqs, dtype):
    shape = apart(*sizes)
    weights = random_weights(shape, dtype, has_bias=has_bias)
    num_products = shape.a + shape.num_value_heads
    window = torch.randn(num_seqs, shape.num_channels, window_width).to(dtype)
    state = torch.randn(num_seqs, shape.num_value_heads, shape.key_width, shape.value_width)
    for _ in range(3):  # each goes on with what the one before left
        x = torch.randn(num_seqs, num_products).to(dtype)
        wanted, wanted_window, wanted_state = plain(shape, weights, x, window, state)
        found = delta_step(shape, weights, x, window, state)
        assert found.dtype == torch.float32
        assert near(found, wanted)
        assert torch.equal(window.double(), wanted_window)
        assert near(state, wanted_state)


def test_large_numbers_stay_finite():
    shape = apart(2, 2, 8, 16, 4)
    weights = random_weights(shape, torch.float32, has_bias=False)
    x = 200 * torch.randn(2, shape.a + shape.num_value_heads)
    window = 200 * torch.randn(2, shape.num_channels, 4)
    state = torch.randn(2, 4, 8, 16)
    wanted, _, wanted_state = plain(shape, weights, x, window, state)
    assert near(delta_step(shape, weights, x, window, state), wanted)
    assert near(state, wanted_state)


def test_products_of_a_head_may_lie_together():
    sizes = 2, 2, 8, 16, 4
    shape = apart(*sizes)
    weights = random_weights(shape, torch.float32, has_bias=False)
    x = torch.randn(2, shape.a + 4)
    query, key, value, z, b, a = (
        part.view(2, 2, -1) for part in x.split([16, 16, 64, 64, 4, 4], dim=1)
    )
    together = [torch.cat(parts, dim=2).flatten(1) for parts in ((query, key, value, z), (b, a))]
    step = 8 + 8 + 32 + 32
    other = shape._replace(
        query=0, query_step=step, key=8, key_step=step, value=16, value_step=step,
        z=48, z_step=step, b=2 * step, b_step=4, a=2 * step + 2, a_step=4,
    )  # fmt: skip
    window, state = torch.randn(2, shape.num_channels, 4), torch.randn(2, 4, 8, 16)
    kept = window.clone(), state.clone()
    wanted = delta_step(shape, weights, x, window, state)
    assert torch.equal(delta_step(other, weights, torch.cat(together, dim=1), *kept), wanted)
    assert torch.equal(kept[1], state)


def test_a_sequence_has_the_same_bits_alone_and_with_any_number_of_threads():
    shape = apart(4, 2, 32, 32, 4)
    weights = random_weights(shape, torch.bfloat16, has_bias=False)
    x = torch.randn(5, shape.a + 8).bfloat16()
    window, state = torch.randn(5, shape.num_channels, 4).bfloat16(), torch.randn(5, 8, 32, 32)
    alone = window[2:3].clone(), state[2:3].clone()
    whole = delta_step(shape, weights, x, window, state)
    torch.set_num_threads(1)
    assert torch.equal(delta_step(shape, weights, x[2:3], *alone), whole[2:3])
    assert torch.equal(alone[0], window[2:3])
    assert torch.equal(alone[1], state[2:3])
