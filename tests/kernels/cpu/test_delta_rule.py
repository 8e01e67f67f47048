"""A token of linear attention by the kernel is that of plain operations in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moe_infinity.kernels.cpu.decoder import DecoderKernel, LinearAttention
from moe_infinity.kernels.cpu.decoder_steps import DecoderSteps, States
from moe_infinity.kernels.cpu.delta_rule import DeltaShape

pytestmark = [pytest.mark.arithmetic, pytest.mark.usefixtures("two_threads")]

EPS = 1e-6
WIDTH = 96  # D


def layer(
    shape: DeltaShape,
    dtype: torch.dtype = torch.float32,
    *,
    has_bias: bool = False,
    places: Sequence[int] | None = None,
    strength: float = 1,
) -> LinearAttention:
    make = torch.Generator().manual_seed(1)

    def weight(*size: int) -> Tensor:
        return torch.randn(*size, generator=make).to(dtype)

    num_products = shape.a + shape.num_value_heads
    num_values = shape.num_value_heads * shape.value_width
    return LinearAttention(
        products=(strength * WIDTH**-0.5 * weight(num_products, WIDTH),),
        out=num_values**-0.5 * weight(WIDTH, num_values),
        out_bias=weight(WIDTH) if has_bias else None,
        norm=1 + 0.1 * weight(WIDTH),
        norm_eps=EPS,
        residual_norm=1 + 0.1 * weight(WIDTH),
        residual_norm_eps=1e-5,
        router=None,
        shape=shape,
        convolution=weight(shape.num_channels, 1, shape.taps),
        convolution_bias=weight(shape.num_channels) if has_bias else None,
        decay=weight(shape.num_value_heads).abs(),
        dt=weight(shape.num_value_heads),
        out_norm=weight(shape.value_width),
        out_norm_eps=2 * EPS,
        places=range(shape.num_value_heads) if places is None else places,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def plain(
    own: LinearAttention, x: Tensor, window: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Residual, its norm, window and state, in float64, for products that lie apart."""
    shape = own.shape
    num_seqs = len(x)
    (products,), last = own.products, own.out
    assert isinstance(products, Tensor)
    assert isinstance(last, Tensor)
    keys = shape.num_key_heads * shape.key_width
    values = shape.num_value_heads * shape.value_width
    sizes = [2 * keys + values, values, shape.num_value_heads, shape.num_value_heads]
    given = rms_norm(x.double(), own.norm, own.norm_eps) @ products.double().T
    new, z, b, a = given.split(sizes, dim=1)
    inputs = torch.cat([window.double(), new[:, :, None]], dim=2)
    mixed = (inputs[:, :, -shape.taps :] * own.convolution.double()[:, 0]).sum(2)
    if own.convolution_bias is not None:
        mixed = mixed + own.convolution_bias.double()
    query, key, value = functional.silu(mixed).split([keys, keys, values], dim=1)

    def heads(vectors: Tensor) -> Tensor:
        vectors = vectors.view(num_seqs, shape.num_key_heads, shape.key_width)
        vectors = vectors * torch.rsqrt(vectors.square().sum(2, keepdim=True) + 1e-6)
        return vectors.repeat_interleave(shape.per_key_head, dim=1)

    query = heads(query) * shape.key_width**-0.5
    key = heads(key)
    value = value.view(num_seqs, -1, shape.value_width)
    decay = torch.exp(-own.decay.double().exp() * functional.softplus(a + own.dt.double()))
    state = state.double() * decay[:, :, None, None]
    wrong = value - torch.einsum("bhkv,bhk->bhv", state, key)
    state = state + torch.einsum("bhk,bhv,bh->bhkv", key, wrong, b.sigmoid())
    out = rms_norm(torch.einsum("bhkv,bhk->bhv", state, query), own.out_norm, own.out_norm_eps)
    out = out * functional.silu(z).view_as(out)
    residual = x.double() + out.flatten(1) @ last.double().T
    if own.out_bias is not None:
        residual = residual + own.out_bias.double()
    return residual, rms_norm(residual, own.residual_norm, 1e-5), inputs[:, :, 1:], state


def by_kernel(own: LinearAttention, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    """The same by the kernel, which leaves the states that it is given."""
    before = window.clone(), state.clone()
    states = States(window, state, torch.empty_like(window), torch.empty_like(state))
    attended = DecoderSteps([DecoderKernel(own, x.dtype)]).attend(0, x, None, states, None)
    assert torch.equal(window, before[0])
    assert torch.equal(state, before[1])
    return attended.residual, attended.normed, states.next_window, states.next_recurrent


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    most = max(1e-5, torch.finfo(dtype).eps)
    return bool((found.double() - wanted).abs().max() <= most * wanted.abs().max())


def start(shape: DeltaShape, num_seqs: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = torch.randn(num_seqs, WIDTH).to(dtype)
    window = torch.randn(num_seqs, shape.num_channels, width).to(dtype)
    state = torch.randn(num_seqs, shape.num_value_heads, shape.key_width, shape.value_width)
    return x, window, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize(
    ("sizes", "window_width", "has_bias"),
    [((2, 2, 32, 16, 4), 4, False), ((3, 1, 8, 16, 3), 5, True), ((1, 4, 5, 32, 4), 3, False)],
)
def test_a_token_is_that_of_float64(sizes, window_width, has_bias, num_seqs, dtype):
    shape = DeltaShape.of(*sizes, are_apart=True)
    own = layer(shape, dtype, has_bias=has_bias)
    x, window, state = start(shape, num_seqs, window_width, dtype)
    for _ in range(3):  # each goes on with what the one before left
        wanted = plain(own, x, window, state)
        residual, normed, window, state = by_kernel(own, x, window, state)
        found = residual, normed, window
        assert all(map(near, found, wanted, [dtype] * 3))
        assert near(state, wanted[3])
        x = torch.randn_like(x)


def test_large_numbers_stay_finite():
    shape = DeltaShape.of(2, 2, 8, 16, 4, are_apart=True)
    own = layer(shape, strength=200)
    x, window, state = start(shape, 2, 4, torch.float32)
    assert all(map(near, by_kernel(own, x, window, state), plain(own, x, window, state)))


def test_products_of_a_head_may_lie_together():
    shape = DeltaShape.of(2, 2, 8, 16, 4, are_apart=True)
    own = layer(shape)
    (rows,) = own.products
    assert isinstance(rows, Tensor)
    query, key, value, z, b, a = (
        part.view(2, -1, WIDTH) for part in rows.split([16, 16, 64, 64, 4, 4])
    )
    together = [torch.cat(parts, dim=1).flatten(0, 1) for parts in ((query, key, value, z), (b, a))]
    other = DeltaShape.of(2, 2, 8, 16, 4, are_apart=False)
    given = start(shape, 2, 4, torch.float32)
    wanted = by_kernel(own, *given)
    found = by_kernel(replace(own, products=tuple(together), shape=other), *given)
    assert all(map(torch.equal, found, wanted))


def test_heads_may_go_to_other_columns():
    shape = DeltaShape.of(2, 2, 8, 16, 4, are_apart=True)
    own = layer(shape)
    places = [2, 0, 3, 1]
    assert isinstance(own.out, Tensor)
    columns = own.out.view(WIDTH, 4, 16)[:, [places.index(i) for i in range(4)]].flatten(1)
    given = start(shape, 2, 4, torch.float32)
    moved = replace(own, out=columns.contiguous(), places=places)
    assert near(by_kernel(moved, *given)[0], by_kernel(own, *given)[0].double())


def test_a_sequence_has_the_same_bits_alone_and_with_any_number_of_threads():
    shape = DeltaShape.of(4, 2, 32, 32, 4, are_apart=True)
    own = layer(shape, torch.bfloat16)
    given = start(shape, 5, 4, torch.bfloat16)
    whole = by_kernel(own, *given)
    torch.set_num_threads(1)
    alone = by_kernel(own, *(each[2:3].clone() for each in given))
    assert all(torch.equal(one, many[2:3]) for one, many in zip(alone, whole, strict=True))
