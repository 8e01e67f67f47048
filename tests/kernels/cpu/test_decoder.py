"""What surrounds the experts of a decoder layer, against a plain reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity.kernels.cpu.decoder import (
    HALVES,
    NEIGHBOURS,
    OF_ALL,
    OF_CHOSEN,
    Attention,
    DecoderKernel,
    Gate,
    Router,
)
from moe_infinity.kernels.cpu.decoder_steps import Cached, DecoderSteps
from moe_infinity.kernels.cpu.shared_expert import SharedExpert
from moe_infinity.kernels.kv_rows import packed_rows, unpacked_rows
from moe_infinity.kernels.reference import FUNCTIONS, Activation
from moe_infinity.layout import PackedWeight
from tests.kernels.cpu.test_panels import stored

WIDTH = 96
SHAPES = {  # heads, heads of keys, width of a head, of its values
    "grouped": (8, 2, 32, 32),
    "one each": (3, 3, 48, 16),
    "odd": (5, 1, 16, 32),
    "wide": (2, 2, 16, 128),
}
# Each width of values is compiled anew, in seconds: test_attention.py has them all.
FAST = ("grouped", "one each", "odd")


def layer(
    shape: str,
    *,
    dtype: torch.dtype,
    pairs: int = HALVES,
    rotated: int | None = None,
    has_bias: bool = False,
    has_sinks: bool = False,
    norms: str = "",
    has_gates: bool = False,
    shared: SharedExpert | None = None,
) -> Attention:
    num_heads, num_groups, head, value = SHAPES[shape]
    make = torch.Generator().manual_seed(1)

    def weight(*size: int) -> Tensor:
        return (torch.randn(*size, generator=make) * size[-1] ** -0.5).to(dtype)

    query = 2 * head if has_gates else head
    rows = num_heads * query, num_groups * head, num_groups * value
    norm_widths = {"": None, "heads": (head, head), "all": rows[:2]}[norms]
    return Attention(
        products=(weight(rows[0], WIDTH), weight(rows[1], WIDTH), weight(rows[2], WIDTH)),
        biases=(weight(rows[0]), weight(rows[1]), weight(rows[2])) if has_bias else None,
        out=weight(WIDTH, num_heads * value),
        out_bias=weight(WIDTH) if has_bias else None,
        norm=1 + weight(WIDTH),
        norm_eps=1e-5,
        residual_norm=1 + weight(WIDTH),
        residual_norm_eps=1e-6,
        query_norm=None if norm_widths is None else 1 + 3 * weight(norm_widths[0]),
        key_norm=None if norm_widths is None else 1 + 3 * weight(norm_widths[1]),
        query_norm_eps=1e-6,
        key_norm_eps=1e-5,
        sinks=torch.randn(num_heads, generator=make) if has_sinks else None,
        router=Router(
            weight(7, WIDTH),
            weight(7) if has_bias else None,
            Gate(3, OF_CHOSEN if has_bias else OF_ALL, dtype),
            shared,
        ),
        scale=head**-0.5,
        num_heads=num_heads,
        num_groups=num_groups,
        head_width=head,
        rotated=head if rotated is None else rotated,
        pairs=pairs,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: int) -> Tensor:
    """[..., d], [..., pairs]"""
    count = cos.shape[-1]
    turned = x[..., : 2 * count]
    first = turned[..., :count] if pairs == HALVES else turned[..., ::2]
    second = turned[..., count:] if pairs == HALVES else turned[..., 1::2]
    new = first * cos - second * sin, second * cos + first * sin
    joined = torch.cat(new, -1) if pairs == HALVES else torch.stack(new, -1).flatten(-2)
    return torch.cat([joined, x[..., 2 * count :]], -1)


def routing(router: Router | None, x: Tensor) -> tuple[Tensor, ...]:
    """Logits, choice, shares, and what a shared expert adds, in float64."""
    assert router is not None
    logits = x @ router.weight.double().T
    if router.bias is not None:
        logits = logits + router.bias.double()
    largest, chosen = logits.topk(router.gate.top_k)
    shares = largest.softmax(-1)
    if router.gate.softmax_over == OF_ALL:
        shares = logits.softmax(-1).gather(1, chosen)
    added = x[:, :0] if router.shared is None else router.shared(x)
    return logits, chosen, shares, added


def plain(weight: Tensor | PackedWeight) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight


def reference(
    attention: Attention,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    stored: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Residual, its norm, logits, choice, shares, what a shared expert adds, and the new keys and
    values, in float64. They are seen as they are `stored`, by default rounded to the dtype of x.
    """
    dtype = x.dtype
    x = x.double()
    num_seqs = len(x)
    normed = rms_norm(x, attention.norm.double(), attention.norm_eps)
    q, k, v = (normed @ plain(weight).double().T for weight in attention.products)
    if attention.biases is not None:
        q, k, v = (y + b.double() for y, b in zip((q, k, v), attention.biases, strict=True))
    heads, groups = attention.num_heads, attention.num_groups
    q, *gates = q.view(num_seqs, heads, -1).split(attention.head_width, 2)
    q, k, v = (
        q,
        k.view(num_seqs, groups, -1),
        v.view(num_seqs, groups, -1),
    )
    if attention.query_norm is not None:
        assert attention.key_norm is not None
        all_of = len(attention.query_norm) != q.shape[-1]
        q = rms_norm(
            q.flatten(1) if all_of else q, attention.query_norm.double(), attention.query_norm_eps
        ).view(q.shape)
        k = rms_norm(
            k.flatten(1) if all_of else k, attention.key_norm.double(), attention.key_norm_eps
        ).view(k.shape)
    cos, sin = (angle.double()[:, None] for angle in angles)
    q, k = (rotate(y, cos, sin, attention.pairs) for y in (q, k))
    new = stored or (k.to(dtype), v.to(dtype))
    keys = torch.cat([keys[:, :, :-1], new[0][:, :, None]], 2).double()
    values = torch.cat([values[:, :, :-1], new[1][:, :, None]], 2).double()
    repeated = heads // groups
    scores = (keys.repeat_interleave(repeated, 1) @ q[..., None])[..., 0] * attention.scale
    if mask is not None:
        scores = scores + mask.double()[:, None]
    if attention.sinks is not None:
        sinks = attention.sinks.double()[None, :, None].expand(num_seqs, -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = (weights[:, :, None] @ values.repeat_interleave(repeated, 1))[:, :, 0]
    for gate in gates:
        out = out * gate.sigmoid()
    out = out.flatten(1) @ plain(attention.out).double().T
    if attention.out_bias is not None:
        out = out + attention.out_bias.double()
    residual = x + out
    normed = rms_norm(residual, attention.residual_norm.double(), attention.residual_norm_eps)
    return residual, normed, *routing(attention.router, normed), k, v


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "case", [{}, {"norms": "all"}, {"has_bias": True, "has_sinks": True}], ids=str
)
@pytest.mark.parametrize("shape", FAST)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_packed_rows_are_read_and_written_as_they_are(shape, kv_dtype, case):
    """By the definition of a row, new ones from what float64 gives: at most one code apart."""
    attention = layer(shape, dtype=torch.float32, **case)
    steps = DecoderSteps([DecoderKernel(attention, torch.float32, kv_dtype)])
    _, groups, *widths = SHAPES[shape]
    for num_seqs, num_tokens in [(1, 1), (3, 37)]:
        x = 3 * torch.randn(num_seqs, WIDTH)
        angle = torch.randn(num_seqs, attention.rotated // 2) * 3
        angles = angle.cos(), angle.sin()
        rows = [
            packed_rows(torch.randn(num_seqs, groups, num_tokens + 5, width), kv_dtype)
            for width in widths
        ]
        cached = Cached(*(each[:, :, :num_tokens] for each in rows))
        mask = torch.zeros(num_seqs, num_tokens)
        mask[-1, : num_tokens // 3] = -torch.inf
        before = (
            unpacked_rows(cached.keys, kv_dtype, torch.float64),
            unpacked_rows(cached.values, kv_dtype, torch.float64),
        )
        found = steps.attend(0, x, angles, cached, mask)
        keys, values = (unpacked_rows(each[:, :, -1], kv_dtype, torch.float64) for each in cached)
        wanted = reference(attention, x, angles, *before, mask, stored=(keys, values))
        assert torch.equal(found.top_k_index_BK, wanted[3])
        for one, other in zip(found[:5], wanted[:5], strict=True):
            size = other.double().abs().max()
            assert (one.double() - other.double()).abs().max() <= 2e-6 * size
        for one, other in zip((keys, values), wanted[6:], strict=True):
            largest = other.abs().amax(-1, keepdim=True)
            step = (
                largest / 127
                if kv_dtype == "int8"
                else (other.abs() / 8).clamp(min=largest / 2**17)
            )
            assert ((one - other).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("width", [8, 24, 40])
def test_rows_that_vectors_do_not_fill_are_refused(width, monkeypatch):
    monkeypatch.setitem(SHAPES, "uneven", (2, 2, width, 16))
    with pytest.raises(ValueError, match="do not read"):
        DecoderKernel(layer("uneven", dtype=torch.float32), torch.float32, "int8")


CASES = [
    {},
    {"pairs": NEIGHBOURS},
    {"rotated": 8, "norms": "heads"},
    {"norms": "all"},
    {"has_bias": True, "has_sinks": True},
]
GATED = [
    {"has_gates": True},
    {"has_gates": True, "rotated": 8, "norms": "heads"},
    {"has_gates": True, "has_bias": True, "has_sinks": True, "pairs": NEIGHBOURS},
]


@pytest.mark.sample(3)
@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [*FAST, pytest.param("wide", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_gets_what_the_reference_gives(shape, dtype, case):
    check(shape, dtype, case)


@pytest.mark.parametrize("case", GATED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_behind_each_query_multiplies_what_its_head_attends_to(dtype, case):
    check("grouped", dtype, case)


@pytest.mark.parametrize(("shape", "norms"), [("one each", ""), ("grouped", "all")])
def test_gates_that_kernels_do_not_know_are_refused(shape, norms):
    with pytest.raises(ValueError, match="gates"):
        DecoderKernel(layer(shape, dtype=torch.float32, has_gates=True, norms=norms), torch.float32)


def check(shape: str, dtype: torch.dtype, case: dict[str, Any]) -> None:
    """Compare some tokens with the reference."""
    attention = layer(shape, dtype=dtype, **case)
    steps = DecoderSteps([DecoderKernel(attention, dtype)])
    _, groups, head, value = SHAPES[shape]
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for num_seqs, num_tokens in [(1, 1), (1, 37), (3, 16), (2, 33)]:
        make = torch.Generator().manual_seed(num_tokens)
        x = (3 * torch.randn(num_seqs, WIDTH, generator=make)).to(dtype)
        angle = torch.randn(num_seqs, attention.rotated // 2, generator=make) * 3
        keys = torch.randn(num_seqs, groups, num_tokens + 5, head, generator=make).to(dtype)
        values = torch.randn(num_seqs, groups, num_tokens + 5, value, generator=make).to(dtype)
        mask = None
        if num_seqs > 1:
            mask = torch.zeros(num_seqs, num_tokens)
            mask[1, :5] = -torch.inf
        views = keys[:, :, :num_tokens], values[:, :, :num_tokens]
        angles = angle.cos(), angle.sin()
        wanted = reference(attention, x, angles, *views, mask)
        found = steps.attend(0, x, angles, Cached(*views), mask)
        assert torch.equal(found.top_k_index_BK, wanted[3])
        new = views[0][:, :, -1], views[1][:, :, -1]
        assert found.shared_BD.shape == (num_seqs, 0)
        for one, other in zip((*found[:5], *new), wanted[:5] + wanted[6:], strict=True):
            size = other.double().abs().max()
            assert (one.double() - other.double()).abs().max() <= tolerance * size


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("width", "is_scaled"), [(16, False), (40, True), (300, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_expert_adds_what_the_reference_gives(function, width, is_scaled, dtype):
    """It gets the norm as it is before it is rounded."""
    make = torch.Generator().manual_seed(width)

    def weight(*size: int) -> Tensor:
        return (torch.randn(*size, generator=make) * 2 * size[-1] ** -0.5).to(dtype)

    expert = SharedExpert(
        weight(width, WIDTH),
        weight(width, WIDTH),
        weight(WIDTH, width),
        weight(1, WIDTH) if is_scaled else None,
        Activation(function),
    )
    attention = layer("grouped", dtype=dtype, has_bias=is_scaled, shared=expert)
    steps = DecoderSteps([DecoderKernel(attention, dtype)])
    for num_seqs in (1, 5):
        x = (3 * torch.randn(num_seqs, WIDTH, generator=make)).to(dtype)
        angles = torch.ones(num_seqs, 16), torch.zeros(num_seqs, 16)
        cached = (torch.zeros(num_seqs, 2, 1, 32).to(dtype) for _ in range(2))
        keys, values = cached
        wanted = reference(attention, x, angles, keys, values, None)
        found = steps.attend(0, x, angles, Cached(keys, values), None)
        assert torch.equal(found.top_k_index_BK, wanted[3])
        for one, other in zip((found.logits, found.shared_BD), (wanted[2], wanted[5]), strict=True):
            tolerance = (2e-6 if dtype == torch.float32 else 2**-8) * other.abs().max()
            assert (one - other).abs().max() <= tolerance
            assert (one * 0.98 - other).abs().max() > tolerance


def test_a_shared_expert_of_packed_weights_is_read_as_it_lies():
    """Each in another way."""
    make = torch.Generator().manual_seed(3)
    gate, up = (stored(kind, 64, WIDTH)[0] for kind in ("ggml q8_0", "fp8 rows"))
    down = stored("bf16", WIDTH, 64)[0]
    expert = SharedExpert(gate, up, down, torch.randn(1, WIDTH, generator=make), Activation())
    attention = layer("grouped", dtype=torch.float32, shared=expert)
    steps = DecoderSteps([DecoderKernel(attention, torch.float32)])
    x = torch.randn(2, WIDTH, generator=make)
    angles = torch.ones(2, 16), torch.zeros(2, 16)
    keys, values = torch.zeros(2, 2, 1, 32), torch.zeros(2, 2, 1, 32)
    wanted = reference(attention, x, angles, keys, values, None)[5]
    found = steps.attend(0, x, angles, Cached(keys, values), None).shared_BD
    assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("norms", ["", "all"])
def test_what_a_sequence_gets_depends_on_it_alone(norms):
    attention = layer("grouped", dtype=torch.bfloat16, norms=norms)
    steps = DecoderSteps([DecoderKernel(attention, torch.bfloat16)])
    x = torch.randn(9, WIDTH).bfloat16()
    angles = torch.randn(9, 16).cos(), torch.randn(9, 16).sin()
    keys, values = (torch.randn(9, 2, 70, 32).bfloat16() for _ in range(2))
    together = steps.attend(0, x, angles, Cached(keys.clone(), values.clone()), None)
    for seq in range(9):
        rows = slice(seq, seq + 1)
        alone = steps.attend(
            0,
            x[rows],
            (angles[0][rows], angles[1][rows]),
            Cached(keys[rows].clone(), values[rows].clone()),
            None,
        )
        for all_rows, own in zip(together, alone, strict=True):
            assert torch.equal(all_rows[rows], own)


def test_biases_in_front_of_norms_of_all_heads_are_refused():
    attention = layer("grouped", dtype=torch.float32, norms="all")
    q, k, v = (plain(weight)[:, 0] for weight in attention.products)
    biased = replace(attention, biases=(q, k, v))
    with pytest.raises(ValueError, match="biases"):
        DecoderKernel(biased, torch.float32)


@pytest.mark.parametrize("logits", [[2.0, 2.0, 1.0], [torch.nan] * 3, [1.0, torch.nan, 3.0]])
def test_equal_logits_and_no_numbers_choose_experts_that_exist(logits):
    attention = layer("grouped", dtype=torch.float32, has_bias=True)
    router = Router(torch.zeros(3, WIDTH), torch.tensor(logits), Gate(2, OF_ALL, torch.float32))
    steps = DecoderSteps([DecoderKernel(replace(attention, router=router), torch.float32)])
    cached = Cached(torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32))
    angles = torch.ones(1, 16), torch.zeros(1, 16)
    chosen = steps.attend(0, torch.ones(1, WIDTH), angles, cached, None).top_k_index_BK[0].tolist()
    assert len(set(chosen)) == 2
    assert set(chosen) <= {0, 1, 2}
    if logits[0] == 2.0:
        assert chosen == [0, 1]
